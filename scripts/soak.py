"""Soak: the quickstart trains on while its processes are killed, stopped, joined, drained and its knobs are turned.

    .venv/bin/python scripts/soak.py --minutes 30 --seed 1 --out soak.json

Every disturbance is drawn from the seed. Between two of them the ledger is checked as it is at that instant; at the end the
run is drained and the whole lineage is judged, as after a case of tests/crash. Exit status 1 when anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import itertools

from actors.sampler.actor import Position  # noqa: E402
from bus import Bus, BusConfig, Tail, ledger  # noqa: E402
from bus.errors import KnobRejected, MilesAsyncError  # noqa: E402
from bus.knobs.live import propose, read_history, values_at  # noqa: E402
from bus.messages.policy import GroupsGivenUp, Restored, StepDone  # noqa: E402
from bus.topology import POLICY, PREFIXES, PROMPTS, VERDICTS  # noqa: E402
from tests.crash.house import Run, Tables, merged, until  # noqa: E402
from tests.crash.judge import lineage  # noqa: E402

ACTORS = ("trainer", "sampler", "filter", "partial", "publisher", "evaluator", "reward-0")
KNOBS: dict[str, tuple[Any, ...]] = {
    "over_sampling_batch_size": (32, 40, 48, 64),
    "max_weight_staleness": (1, 2, 3),
    "rollout_temperature": (0.9, 1.0, 1.1),
    "sglang_server_concurrency": (16, 32, 64),
    "partial_save_tokens": (4, 8, 64),
    "save_interval": (5, 10, 20),
    "lr": (5e-4, 1e-3),
    "eps_clip": (0.15, 0.2),
}
KINDS = (
    *("kill worker",) * 4,
    *("kill actor",) * 4,
    *("kill trainer",) * 2,
    *("kill engine",) * 2,
    *("kill redis",) * 2,
    "kill launcher",
    *("stop",) * 3,
    *("join",) * 3,
    *("leave",) * 2,
    *("knob",) * 4,
)


class Disturbance(msgspec.Struct):
    """One thing done to the run. `wall`: when, seconds."""

    kind: str
    what: str
    wall: float
    samples: int = 0  # under way in a killed worker: generated again, from their saved prefixes
    tokens: int = 0  # at most so many of their tokens
    idle_s: float = 0.0


class Soak:
    """The run, what is done to it, and what was seen."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self.random = random.Random(seed)
        self.done: list[Disturbance] = []
        self.faults: list[str] = []
        self.policy: list[Any] = []
        self.verdicts: dict[str, bool] = {}
        self.guests: dict[str, subprocess.Popen[bytes]] = {}
        self.checks = 0
        self._joined = 0

    # -- watching -----------------------------------------------------------------------------------------------

    async def follow(self, bus: Bus, stop: asyncio.Event) -> None:
        """Every message of policy and verdicts, before the logs are trimmed."""
        tail = Tail(bus, [POLICY, VERDICTS])
        await tail.open()
        while not stop.is_set():
            for entry in await tail.read(0.5):
                message = await bus.message(entry)
                if entry.stream is POLICY:
                    self.policy.append(message)
                else:
                    self.verdicts[message.group_id] = message.kept
        await tail.close()

    async def check(self, bus: Bus) -> None:
        """The ledger at this instant."""
        found = await ledger.check(bus)
        self.checks += 1
        if not found.closes:
            self.faults.append(
                f"{time.strftime('%H:%M:%S')} after {self.done[-1] if self.done else 'start'}: {found.text()}"
            )

    # -- doing --------------------------------------------------------------------------------------------------

    async def disturb(self, bus: Bus) -> None:
        """One disturbance of a kind drawn at random; what is not there at the moment is passed over."""
        kind = self.random.choice(KINDS)
        actions: dict[str, Callable[[Bus], Awaitable[Disturbance | None]]] = {
            "kill worker": self._kill_worker,
            "kill actor": self._kill_actor,
            "kill trainer": self._kill_trainer,
            "kill engine": self._kill_engine,
            "kill redis": self._kill_redis,
            "kill launcher": self._kill_launcher,
            "stop": self._stop,
            "join": self._join,
            "leave": self._leave,
            "knob": self._knob,
        }
        done = await actions[kind](bus)
        if done is not None:
            self.done.append(done)
            print(f"{time.strftime('%H:%M:%S')} {done.kind}: {done.what}", flush=True)

    def _workers(self) -> list[str]:
        own = ["generation-0", "generation-1"]
        return [name for name in [*own, *self.guests] if self.run.pids(name)]

    async def _kill_worker(self, bus: Bus) -> Disturbance | None:
        workers = self._workers()
        if not workers:
            return None
        name = self.random.choice(workers)
        self._signal(name, signal.SIGKILL)
        wall = time.time()
        guest = self.guests.pop(name, None)
        if guest is not None:
            guest.wait()
        samples = 0
        for stream in (PREFIXES, PROMPTS):
            rows = await bus.link.run("XPENDING", bus.keys.stream(stream.name), "generation", "-", "+", 1000, name)
            samples += len(rows)
        values = (await read_history(bus))[-1:]
        history = await read_history(bus)
        live = values_at(history, values[0].epoch) if values else None
        per_sample = min(live.whole("partial_save_tokens"), live.whole("rollout_max_response_len")) if live else 0
        return Disturbance("kill worker", name, wall, samples=samples, tokens=samples * per_sample)

    async def _kill_actor(self, bus: Bus) -> Disturbance | None:
        return self._kill(self.random.choice(ACTORS[1:]), "kill actor")

    async def _kill_trainer(self, bus: Bus) -> Disturbance | None:
        return self._kill("trainer", "kill trainer")

    def _kill(self, name: str, kind: str) -> Disturbance | None:
        return Disturbance(kind, name, time.time()) if self._signal(name, signal.SIGKILL) else None

    def _signal(self, name: str, number: signal.Signals) -> bool:
        for pid in self.run.pids(name):
            os.kill(pid, number)
            return True
        return False

    async def _kill_engine(self, bus: Bus) -> Disturbance | None:
        pids = self.run.engine_pids()
        if not pids:
            return None
        pid = self.random.choice(pids)
        os.kill(pid, signal.SIGKILL)
        return Disturbance("kill engine", f"pid {pid}", time.time())

    async def _kill_redis(self, bus: Bus) -> Disturbance | None:
        os.kill(self.run.redis_pid(), signal.SIGKILL)
        return Disturbance("kill redis", "", time.time())

    async def _kill_launcher(self, bus: Bus) -> Disturbance | None:
        assert self.run.launcher is not None
        self.run.launcher.kill()
        self.run.launcher.wait()
        wall = time.time()
        await asyncio.sleep(self.random.uniform(0.0, 3.0))
        self.run.start()
        return Disturbance("kill launcher", "and started again", wall)

    async def _stop(self, bus: Bus) -> Disturbance | None:
        name = self.random.choice([*ACTORS, *self._workers()])
        wall = time.time()
        pids = self.run.pids(name)
        if not pids:
            return None
        os.kill(pids[0], signal.SIGSTOP)
        seconds = self.random.uniform(0.5, 2.5) * float(self.run.setting("bus", "lease_s"))
        await asyncio.sleep(seconds)
        os.kill(pids[0], signal.SIGCONT)
        return Disturbance("stop", f"{name} for {seconds:.1f} s", wall)

    async def _join(self, bus: Bus) -> Disturbance | None:
        if len(self.guests) >= 2:
            return None
        self._joined += 1
        name = f"guest-{self._joined}"
        with (self.run.home / f"{name}.log").open("ab") as log:
            self.guests[name] = subprocess.Popen(
                [*(sys.executable, "-m", "miles_async", "worker", "--run-dir", str(self.run.dir), "--name", name)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
            )
        return Disturbance("join", name, time.time())

    async def _leave(self, bus: Bus) -> Disturbance | None:
        here = [name for name in self.guests if self.run.pids(name)]
        if not here:
            return None
        name = self.random.choice(here)
        guest = self.guests.pop(name)
        guest.send_signal(signal.SIGTERM)
        wall = time.time()
        code = await asyncio.to_thread(guest.wait, 60)
        if code != 0:
            self.faults.append(f"{name} drained with exit status {code}")
        return Disturbance("leave", name, wall)

    async def _knob(self, bus: Bus) -> Disturbance | None:
        name = self.random.choice(list(KNOBS))
        value = self.random.choice(KNOBS[name])
        try:
            patch = await propose(bus, {name: value}, author="soak")
        except KnobRejected:
            return None  # it has this value already
        return Disturbance("knob", f"{name}={value} (epoch {patch.epoch})", time.time())

    # -- the end ------------------------------------------------------------------------------------------------

    async def judge(self, bus: Bus) -> dict[str, Any]:
        """Invariants over the whole run, and the figures."""
        found = await ledger.check(bus)
        if not found.closes:
            self.faults.append(f"at the end: {found.text()}")
        try:
            steps = lineage(self.policy)
        except AssertionError as error:
            self.faults.append(str(error))
            steps = {}
        if sorted(steps) != list(range(1, len(steps) + 1)):
            self.faults.append("steps of the lineage are not 1..N")
        groups = [g for step in sorted(steps) for g in steps[step].groups]
        samples = [s for step in sorted(steps) for s in steps[step].samples]
        if len(groups) != len(set(groups)) or len(samples) != len(set(samples)):
            self.faults.append("a group or a sample contributed twice")
        dropped = {g for g, kept in self.verdicts.items() if not kept}
        dropped |= {g for m in self.policy if isinstance(m, GroupsGivenUp) for g, _ in m.groups}
        opened = set(await bus.hash_of(bus.keys.open_groups))
        issued = Position.parse(await bus.state("sampler")).cursor.group
        known = {*groups, *dropped, *opened}
        missing = [g for g in (f"g{n:07d}" for n in range(1, issued + 1)) if g not in known]
        if missing:
            self.faults.append(f"{len(missing)} issued groups are nowhere: {missing[:5]}")
        history = await read_history(bus)
        for step, message in steps.items():
            bound = values_at(history, message.knob_epoch).whole("max_weight_staleness")
            if message.metrics.get("train/staleness_max", 0.0) > bound:
                self.faults.append(f"step {step} trained a token {message.metrics['train/staleness_max']} steps old")
        self._attribute_idle(steps)
        return self._figures(found, steps, issued)

    def _attribute_idle(self, steps: dict[int, StepDone]) -> None:
        """Seconds between two steps above the median, given to the last disturbance before the later one."""
        walls = sorted(m.wall for m in self.policy if isinstance(m, StepDone))
        gaps = [b - a for a, b in itertools.pairwise(walls)]
        usual = statistics.median(gaps) if gaps else 0.0
        for begin, end in itertools.pairwise(walls):
            before = [d for d in self.done if d.wall < end]
            if before and end - begin > usual:
                before[-1].idle_s += end - begin - usual

    def _figures(self, found: ledger.LedgerCheck, steps: dict[int, StepDone], issued: int) -> dict[str, Any]:
        all_steps = [m for m in self.policy if isinstance(m, StepDone)]
        kinds = Counter(d.kind for d in self.done)
        by_kind = {
            kind: {
                "times": n,
                "samples_redone": sum(d.samples for d in self.done if d.kind == kind),
                "tokens_regenerated_at_most": sum(d.tokens for d in self.done if d.kind == kind),
                "trainer_idle_s_each": round(sum(d.idle_s for d in self.done if d.kind == kind) / n, 2),
            }
            for kind, n in sorted(kinds.items())
        }
        lost_steps = len(all_steps) - len(steps)
        return {
            "steps": len(steps),
            "steps_trained_again": lost_steps,
            "samples_trained_again": sum(len(m.samples) for m in all_steps)
            - sum(len(m.samples) for m in steps.values()),
            "restores": sum(isinstance(m, Restored) for m in self.policy),
            "kills_survived": sum(n for kind, n in kinds.items() if kind.startswith("kill")),
            "by_kind": by_kind,
            "ledger_checks": self.checks,
            "groups_issued": issued,
            "ledger": found.text(),
            "accounts": msgspec.to_builtins(found.accounts),
            "faults": self.faults,
        }


def tables_of(config: Path) -> Tables:
    """The quickstart's settings, endless, with paths that hold from any directory."""
    given: Tables = tomllib.loads(config.read_text())
    given["rollout"]["prompt_data"] = str(REPO / given["rollout"]["prompt_data"])
    name, path = given["eval"]["eval_prompt_data"]
    given["eval"]["eval_prompt_data"] = [name, str(REPO / path)]
    return merged(
        given,
        {
            "rollout": {"num_rollout": 1_000_000, "partial_save_tokens": 8},
            "ckpt": {"save_interval": 10},
            "bus": {"lease_s": 3.0},
            "launch": {"console": "none", "report": False, "restart_budget": 1000, "heartbeat_s": 1.0},
            "sglang": {"engine_token_deadline_s": 15.0},
        },
    )


async def soak(run: Run, *, minutes: float, seed: int, pause_s: float) -> dict[str, Any]:
    """Disturb until the time is up, then drain and judge."""
    run.start()
    await asyncio.to_thread(until, "the first step", lambda: run.step() >= 1, seconds=180)
    reference = msgspec.json.decode((run.dir / "run.json").read_bytes())
    config = BusConfig(url=reference["bus_url"], run=reference["run"], blob_dir=str(run.dir / "blobs"))
    state = Soak(run, seed)
    began = time.monotonic()
    async with Bus(config) as bus:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(state.follow(bus, stop))
            while time.monotonic() - began < minutes * 60:
                await asyncio.sleep(state.random.uniform(0.3, 2.0) * pause_s)
                await state.disturb(bus)
                await asyncio.sleep(0.5)
                await state.check(bus)
                assert run.launcher is not None
                if run.launcher.poll() is not None:
                    state.faults.append(f"the launcher ended with {run.launcher.returncode}: {run.output()[-600:]}")
                    break
            # Everyone gets the chance to come back before the end.
            await asyncio.sleep(10.0)
            await state.check(bus)
            for name, guest in state.guests.items():
                guest.send_signal(signal.SIGTERM)
                if await asyncio.to_thread(guest.wait, 60) != 0:
                    state.faults.append(f"{name} did not drain")
            stop.set()
        # What came after the tail's last read.
        await asyncio.sleep(0)
    if run.launcher is not None and run.launcher.poll() is None:
        run.launcher.send_signal(signal.SIGTERM)
        code = run.join(seconds=120)
        if code != 0:
            state.faults.append(f"the drain ended with {code}: {run.output()[-600:]}")
    server = run.server()
    try:
        async with Bus(config) as bus:
            await rest_of_policy(bus, state)
            figures = await state.judge(bus)
    finally:
        server.stop()
    return {"minutes": minutes, "seed": seed, **figures}


async def rest_of_policy(bus: Bus, state: Soak) -> None:
    """The messages of the drain."""
    known = len(state.policy)
    tail = [await bus.message(e) for e in await bus.scan_all(POLICY)]
    last = state.policy[-1] if known else None
    at = max((n for n, message in enumerate(tail) if message == last), default=-1)
    state.policy += tail[at + 1 :]
    for entry in await bus.scan_all(VERDICTS):
        verdict = await bus.message(entry)
        state.verdicts[verdict.group_id] = verdict.kept


def table(figures: dict[str, Any]) -> str:
    """The result as lines of Markdown."""
    lines = [
        "| what | times | samples re-done | tokens re-generated, at most | trainer idle caused, s each |",
        "|---|---|---|---|---|",
    ]
    for kind, row in figures["by_kind"].items():
        lines.append(
            f"| {kind} | {row['times']} | {row['samples_redone']} | {row['tokens_regenerated_at_most']} "
            f"| {row['trainer_idle_s_each']} |"
        )
    lines.append("")
    lines.append(
        f"{figures['kills_survived']} kills survived in {figures['minutes']:g} min; {figures['steps']} steps, "
        f"{figures['steps_trained_again']} trained again ({figures['samples_trained_again']} samples); "
        f"{figures['ledger_checks']} ledger checks. {figures['ledger']}"
    )
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=6.0, help="mean seconds between two disturbances")
    parser.add_argument("--config", type=Path, default=REPO / "configs" / "quickstart.toml")
    parser.add_argument("--home", type=Path, default=None, help="where the run lies; default: a temporary directory")
    parser.add_argument("--out", type=Path, default=None, help="JSON with the figures")
    args = parser.parse_args()
    home = args.home or Path(mkdtemp(prefix="ma-soak-"))
    home.mkdir(parents=True, exist_ok=True)
    run = Run(home, tables_of(args.config))
    try:
        figures = asyncio.run(soak(run, minutes=args.minutes, seed=args.seed, pause_s=args.pause))
    except MilesAsyncError as error:
        print(f"soak: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        run.clean()
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(table(figures))
    for fault in figures["faults"]:
        print(f"VIOLATED {fault}")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
