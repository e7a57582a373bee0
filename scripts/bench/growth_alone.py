"""How the memory of a trainer, an embedded engine or a process that only makes names grows over many thousand steps.

    python -m scripts.bench growth_alone trainer --steps 16000 --model DIR      (a directory of miles_async.quickstart.model)
    python -m scripts.bench growth_alone engine --steps 15000 --model DIR
    python -m scripts.bench growth_alone names --steps 8000000 --room actors.trainer.torch_backend.core

The trainer is its real process on a real Redis; the other rooms are played here: groups of random tokens come as fast as it takes
them, a checkpoint each 50 steps, a version each step, on the quickstart's settings with batches of 8. The engine gets 2 to 14
requests and a new version each time, and each 200th time eight times 64 requests, as of an evaluation. `names` interns strings
that nobody keeps, as pathlib does with every part of a path: what Python's table of such strings takes when it is made anew.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import psutil

from actors.runtime.run import EXIT_DONE
from bus import STREAMS, Bus, Commit, Out
from bus.knobs.live import publish_initial
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import GroupKept, OpenGroup
from bus.messages.samples import Response, RolloutDone, SampleTask, Sampling, Scored
from bus.messages.versions import VersionSpan
from bus.server import EmbeddedRedis
from bus.topology import GROUPS, POLICY
from miles_async.launcher.place import Place, bus_config
from miles_async.launcher.plan import actor_spec, room_specs
from miles_async.settings.live import initial_values
from miles_async.settings.load import settings_from
from scripts import growth
from scripts.bench import REPO
from scripts.soak import tables_of
from tests.bus.suite.knobs import plain_kinds

LOOK_S, EVERY, AHEAD, SIZE = 0.05, 20, 16, 4
VOCABULARY = range(3, 13)
PYTHON = [sys.executable, "-P", "-m"]


def started(module: str, *words: str, log: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*PYTHON, module, *words], cwd=REPO, stdout=log, stderr=log)


class Seen:
    """Measurements of one process, as a soak's."""

    def __init__(self, what: str, pid: int) -> None:
        self._what, self._pid, self._next = what, pid, 0
        self.lines: list[growth.Line] = []

    def look(self, step: int) -> None:
        """Each EVERY steps."""
        if step < self._next:
            return
        self._next = step + EVERY
        with suppress(psutil.Error):
            process = psutil.Process(self._pid)
            used = {"own": growth.own(process), "fds": process.num_fds(), "threads": process.num_threads()}
            self.lines.append({"piece": 1, "done": step, "processes": [{"what": self._what, "life": "1", "age_s": 1e9, **used}]})


def numbers(draw: random.Random, n: int) -> list[int]:
    return [draw.choice(VOCABULARY) for _ in range(n)]


def group(number: int, step: int, draw: random.Random) -> GroupKept:
    """SIZE samples of 2 to 5 tokens; half of them are right."""
    name, prompt = f"g{number:07d}", pack_ints(numbers(draw, draw.randint(4, 6)))
    samples = []
    for index in range(SIZE):
        n = draw.randint(2, 5)
        task = SampleTask(
            sample_id=f"{name}/{index}", group_id=name, index=index, n_samples=SIZE, prompt_id=f"p{number % 1000}", step=step,
            prompt_tokens=prompt, label="7", sampling=Sampling(max_new_tokens=8, stop_token_ids=(0,), seed=number),
        )  # fmt: skip
        response = Response(
            tokens=pack_ints(numbers(draw, n)), logprobs=pack_floats([-2 * draw.random() for _ in range(n)]),
            loss_mask=memoryview(b"\x01" * n), spans=(VersionSpan(step + 1, step, n),),
        )  # fmt: skip
        samples.append(Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=float(index % 2)))
    return GroupKept(group_id=name, prompt_id=f"p{number % 1000}", samples=tuple(samples))


async def put_groups(bus: Bus, made: list[GroupKept], step: int) -> None:
    """As issued by the sampler, and kept by the filter."""
    opened = {g.group_id: OpenGroup(group_id=g.group_id, prompt_id=g.prompt_id, n_samples=SIZE, step=step) for g in made}
    tokens = sum(len(s.rollout.response.loss_mask) for g in made for s in g.samples)
    ledger = {"issued": SIZE * len(made), "tokens/generated": tokens}
    await bus.commit(Commit(open_groups={k: msgspec.msgpack.encode(v) for k, v in opened.items()}, ledger=ledger))
    await bus.append([Out(GROUPS, g) for g in made])


async def trainer(steps: int, model: Path, home: Path, shared: Path) -> Seen:
    """Until it has done its steps. A publisher's part is played: only the newest versions stay."""
    server = EmbeddedRedis(home)
    await asyncio.to_thread(server.start)
    tables = tables_of(REPO / "configs" / "quickstart.toml", small=True)
    # Under the other policies the trainer waits for the filter's word, which nobody gives here.
    tables["rollout"] |= {"num_rollout": steps, "max_weight_staleness": AHEAD, "staleness_policy": "whole"}
    tables["ckpt"] |= {"save": str(home / "checkpoints"), "load": str(home / "checkpoints")}
    settings = settings_from(**tables)
    place = Place(
        run_dir=str(home), model_dir=str(model), weights_dir=str(shared / "weights"), blob_dir=str(home / "blobs"),
        stop_token_ids=(0,), num_rollout=steps, fingerprint="growth",
    )  # fmt: skip
    config = bus_config(settings, f"unix://{home}/redis.sock", place)
    [room] = [spec for name, _, spec in room_specs(settings, place) if name == "trainer"]
    file = home / "trainer.json"
    file.write_bytes(msgspec.json.encode(actor_spec(settings, place, config, "trainer", "trainer", room)))
    process: subprocess.Popen[bytes] | None = None
    try:
        async with Bus(config) as bus:
            await bus.make_readers()
            await publish_initial(bus, values := initial_values(settings), plain_kinds(values))
            with (home / "log").open("w") as log:
                process = started("actors.trainer", str(file), log=log)
            seen = Seen("trainer", process.pid)
            await feed(bus, process, seen, shared / "weights")
        if process.returncode not in (None, EXIT_DONE):
            sys.exit((home / "log").read_text()[-3000:])
    finally:
        if process is not None:
            process.kill()
            process.wait()
        await asyncio.to_thread(server.stop)
    return seen


async def feed(bus: Bus, process: subprocess.Popen[bytes], seen: Seen, weights: Path) -> None:
    draw, issued, step = random.Random(5), 0, 0
    while process.poll() is None:
        if issued < 2 * (step + AHEAD):  # two groups are a batch
            await put_groups(bus, [group(issued + n, step, draw) for n in range(AHEAD)], step)
            issued += AHEAD
        await asyncio.sleep(LOOK_S)
        for entry in await bus.last(POLICY):
            version = getattr(await bus.message(entry), "version", None)
            step = version.step if version is not None else step
        seen.look(step)
        for old in sorted(weights.glob("v*"))[:-4]:
            shutil.rmtree(old, ignore_errors=True)
        for stream in STREAMS:
            if stream.cap:  # as full in a minute as in a run of days
                await bus.link.run("XTRIM", bus.keys.stream(stream.name), "MAXLEN", 200)


def requests(draw: random.Random, version: int) -> Iterator[list[dict[str, Any]]]:
    """What is asked at once."""
    evaluates = version % 200 == 0
    for _ in range(8 if evaluates else 1):
        sampling = {"max_new_tokens": 5, "temperature": 1.0, "stop_token_ids": [0]}
        n = 64 if evaluates else draw.randint(2, 14)
        yield [
            {"input_ids": numbers(draw, draw.randint(4, 6)), "sampling_params": sampling, "return_logprob": True, "stream": True}
            for _ in range(n)
        ]


async def engine(steps: int, model: Path, home: Path, shared: Path) -> Seen:
    """A version each step, as files."""
    draw, port = random.Random(3), home / "port"
    flags = ["--model-path", str(model), "--port-file", str(port), "--max-running-requests", "64"]
    process = started("actors.generation.engines.embedded", *flags)
    seen = Seen("engine", process.pid)
    try:
        while not port.exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(LOOK_S)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port.read_text().strip()}") as session:

            async def ask(path: str, body: dict[str, Any]) -> None:
                async with session.post(path, json=body, raise_for_status=True) as answer:
                    await answer.read()

            for version in range(1, steps + 1):
                for asked in requests(draw, version):
                    await asyncio.gather(*(ask("/generate", body) for body in asked))
                folder = shared / f"v{version:08d}"
                shutil.copytree(model, folder)
                await ask("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})
                shutil.rmtree(folder)
                seen.look(version)
    finally:
        process.terminate()
        process.wait()
    return seen


def names(steps: int, room: str) -> Seen:
    """In this process, which has loaded what the room loads."""
    importlib.import_module(room)
    gc.collect()
    seen = Seen("names", os.getpid())
    for n in range(steps):
        sys.intern(f"v{n:08d}")
        if n % 1000 == 0:
            seen.look(n)
    return seen


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("trainer", "engine", "names"))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--model", type=Path, help="directory of a model")
    parser.add_argument("--room", default="actors.trainer.torch_backend.core", help="module that `names` loads")
    parser.add_argument("--from-step", type=int, nargs="+", default=[0], help="first steps that are left out, one table for each")
    parser.add_argument("--out", type=Path, help="JSON with all measurements")
    args = parser.parse_args()
    if args.what == "names":
        seen = names(args.steps, args.room)
    else:
        if args.model is None:
            parser.error(f"{args.what}: which --model?")
        with TemporaryDirectory(prefix="ma-grow-") as home, TemporaryDirectory(prefix="ma-grow-", dir="/dev/shm") as shared:
            body = trainer if args.what == "trainer" else engine
            seen = asyncio.run(body(args.steps, args.model.absolute(), Path(home), Path(shared)))
    for first in args.from_step:
        print(f"from step {first}:", growth.table(growth.slopes([x for x in seen.lines if x["done"] >= first])), sep="\n\n")
    if args.out is not None:
        points = [(line["done"], line["processes"][0]["own"]) for line in seen.lines]
        growth.write_figures(args.out, {"what": args.what, "steps": args.steps, "own_bytes_by_step": points})
    return 0


if __name__ == "__main__":
    sys.exit(main())
