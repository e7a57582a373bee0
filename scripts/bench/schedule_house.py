"""A run for schedule.py: real rooms as processes over a real Redis, with the engines of schedule_engine.py and a trainer
that sleeps. Rooms get their specs from the settings, as the launcher makes them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.feed import Feed
from actors.recorder.records import Record
from actors.runtime.child import Child, free_port
from actors.trainer.spec import TurnSpec
from bus import Bus
from bus.knobs.live import publish_initial
from bus.server.embedded import EmbeddedRedis
from miles_async.governor.govern import govern
from miles_async.launcher.place import Place, bus_config
from miles_async.launcher.plan import actor_spec, room_specs
from miles_async.launcher.prepare import live_kinds
from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.tokenizer import save_tokenizer
from miles_async.settings.live import initial_values
from miles_async.settings.load import settings_from
from miles_async.settings.run import RunSettings
from scripts.bench import REPO
from scripts.bench.schedule_engine import draws

ME = (sys.executable, "-m", "scripts.bench.schedule")
LOADS = {"R=T": 1.0, "R=2T": 0.5, "R=4T": 0.25, "T=2R": 2.0}  # trainer's seconds over the engines' seconds of a batch
LENT_AFTER_S = 1.0
NEVER = 1 << 30  # steps: the run is ended by the bench, so that its end is not measured


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. Seconds are those of the stand-ins."""

    lengths: str
    load: str
    bound: int
    policy: str
    over_sampling: int | None = None  # None: the settings' default
    workers: int = 1
    slots: int = 64  # of all workers together
    batch: int = 16
    group: int = 8
    median_s: float = 0.5
    tokens: int = 128
    proportional: bool = False  # tokens follow the seconds; else every sample has `tokens`
    chunk: int = 0
    warm: int = 12
    steps: int = 50
    lends: bool = False  # the trainer's GPU, to one more engine with as many slots as each has
    more: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def rollout_s(self) -> float:
        """R: a batch on full slots."""
        seconds = draws(self.lengths, self.median_s, 40_000)
        return self.batch * self.group * sum(seconds) / len(seconds) / self.slots

    @property
    def train_s(self) -> float:
        """T."""
        return self.rollout_s * LOADS[self.load]


def settings_of(case: Case, folder: Path, port: int) -> RunSettings:
    """As a user would give them."""
    given: dict[str, Any] = {
        "hf_checkpoint": str(folder / "model"), "prompt_data": str(folder / "prompts.jsonl"), "input_key": "prompt",
        "num_rollout": NEVER, "rollout_batch_size": case.batch, "n_samples_per_prompt": case.group,
        "rollout_max_response_len": 64 * case.tokens, "rm_type": "deterministic_random",
        "dynamic_sampling_filter_path": "none", "max_weight_staleness": case.bound, "staleness_policy": case.policy,
        "use_tis": True, "engine": "external", "sglang_server_concurrency": case.slots // case.workers,
        "rollout_external_engine_addrs": tuple(f"http://127.0.0.1:{port}/{i}" for i in range(case.workers)),
        "save_debug_rollout_data": str(folder / "batches" / "{rollout_id}"), "debug_rollout_only": True,
        "runs_dir": str(folder), "name": "bench",
    }  # fmt: skip
    if case.over_sampling is not None:
        given["over_sampling_batch_size"] = case.over_sampling
    return settings_from(**(given | case.more))


def rooms_of(case: Case, settings: RunSettings, place: Place, port: int) -> list[tuple[str, str, Any]]:
    """As the launcher makes them; engines that run elsewhere cannot be lent a GPU, so these are told here that it is theirs."""
    rooms = room_specs(settings, place)
    if not case.lends:
        return rooms
    lent, replace = "lent-0", msgspec.structs.replace
    found: list[tuple[str, str, Any]] = []
    for name, role, room in rooms:
        if role == "trainer":
            room = replace(room, turns=TurnSpec(workers=(lent,), lends=True, after_s=LENT_AFTER_S))
        if role == "publisher":
            room = replace(room, lent=(lent,))
        if name == "generation-0":
            url = f"http://127.0.0.1:{port}/{case.workers}"
            found.append((lent, role, replace(room, engine_url=url, gives_back=("weights",), lent_s=20.0)))
        found.append((name, role, room))
    return found


@asynccontextmanager
async def run_of(case: Case, folder: Path) -> AsyncIterator[tuple[Bus, dict[str, int], str]]:
    """Redis, engines and rooms at work: (bus, process ids by name, address of the engines)."""
    (folder / "batches").mkdir()
    (folder / "model").mkdir()
    save_tokenizer(folder / "model", ARITHMETIC)
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1="}\n' * 4096)
    port, children = free_port(), {"engines": Child()}
    script = {
        "lengths": case.lengths, "median_s": case.median_s, "tokens": case.tokens, "proportional": case.proportional,
        "chunk": case.chunk, "slots": case.slots // case.workers * (case.workers + case.lends),
        "engines": case.workers + case.lends, "seed": "bench", "log": str(folder / "samples.jsonl"),
    }  # fmt: skip
    settings = settings_of(case, folder, port)
    place = Place(
        run_dir=str(folder), model_dir=str(folder / "model"), weights_dir=str(folder / "weights"),
        blob_dir=str(folder / "blobs"), stop_token_ids=(), num_rollout=NEVER, fingerprint="bench",
    )  # fmt: skip
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    server = EmbeddedRedis(folder)
    await asyncio.to_thread(server.start)
    try:
        words = [*ME, "--engines", str(port), json.dumps(script)]
        await children["engines"].start(words, folder / "engines.log", environment)
        async with Bus(bus_config(settings, server.url, place)) as bus:
            await bus.make_readers()
            await publish_initial(bus, initial_values(settings), live_kinds())
            for name, role, room in rooms_of(case, settings, place, port):
                file = folder / f"{name}.json"
                file.write_bytes(msgspec.json.encode(actor_spec(settings, place, bus.config, name, role, room)))
                start = [*ME, "--trainer", str(case.train_s)] if role == "trainer" else [sys.executable, "-m", f"actors.{role}"]
                children[name] = Child()
                await children[name].start([*start, str(file)], folder / f"{name}.log", environment)
            pids = {name: child.pid for name, child in children.items()}
            yield bus, pids | {"redis": server.pid or 0}, f"http://127.0.0.1:{port}"
    finally:
        await asyncio.gather(*(child.stop(1.0) for child in children.values()))
        await asyncio.to_thread(server.kill)


@asynccontextmanager
async def governed(bus: Bus) -> AsyncIterator[list[Record]]:
    """The governor at work on a run, as a launcher has it, and the record, which grows; its settings say whether it is on."""
    feed, stop, records = Feed(bus), asyncio.Event(), list[Record]()

    async def follow() -> None:
        while not stop.is_set():
            records.extend((await feed.read(0.5))[0])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        tasks.create_task(govern(bus, feed, stop))
        try:
            yield records
        finally:
            stop.set()
    await feed.close()


def prefer(pids: Sequence[int], nice: int) -> None:
    """Give processes a priority, all their threads and sessions: rooms lower their own, and a machine with other work would
    let them wait. Below 0 this needs root."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():
            group.write_text(str(nice))


def train(spec_file: str, train_s: float) -> None:
    """The trainer's process: the room itself, with a backend that takes its time."""
    from actors.runtime.run import main as run_room
    from actors.trainer import actor as room
    from actors.trainer.backend import StepBatch, StepResult
    from actors.trainer.backends import NoTraining
    from actors.trainer.spec import TrainerSpec

    class Sleeper(NoTraining):
        """Trains nothing for `train_s`; counts as trained what the bound lets through."""

        def train_step(self, batch: StepBatch) -> StepResult:
            end = time.monotonic() + train_s
            oldest = batch.step - int(batch.knobs["max_weight_staleness"])
            trained = [tuple(int(n) * (step >= oldest) for step, n in s.train.spans or ()) for s in batch.samples]
            time.sleep(max(0.0, end - time.monotonic()))
            return StepResult(metrics={}, packing=(), trained_spans=trained)

    def sleeper(name: str) -> NoTraining:
        return Sleeper()

    room.open_backend = sleeper
    sys.argv = [sys.argv[0], spec_file]
    run_room(TrainerSpec, room.run)


__all__ = ("LOADS", "Case", "governed", "prefer", "run_of", "settings_of", "train")
