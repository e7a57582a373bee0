"""Soak: the quickstart trains on while its processes are killed, stopped, joined, drained and its knobs are turned.

    .venv/bin/python scripts/soak.py --minutes 30 --seed 1 --out soak.json

Every disturbance is drawn from the seed. Between two of them the ledger is checked as it is at that instant; at the end the
run is drained and the whole lineage is judged, as after a case of tests/crash. Exit status 1 when anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))


from actors.sampler.actor import Position  # noqa: E402
from bus import Bus, BusConfig, Tail, ledger  # noqa: E402
from bus.errors import MilesAsyncError  # noqa: E402
from bus.knobs.live import read_history, values_at  # noqa: E402
from bus.messages.policy import GroupsGivenUp, Restored, StepDone  # noqa: E402
from bus.topology import POLICY, VERDICTS  # noqa: E402
from miles_async.console.trace_live import trace  # noqa: E402
from tests.crash.house import Run, Tables, merged, until  # noqa: E402
from tests.crash.judge import lineage  # noqa: E402
from tests.crash.mischief import Mischief  # noqa: E402

TRACED = 200
LIFE = {"issued", "begun", "ended", "made", "scored", "judged", "trained", "batch", "checkpoint"}


class Soak:
    """The run, what is done to it, and what was seen."""

    def __init__(self, run: Run, seed: int) -> None:
        self.mischief = Mischief(run, seed)
        self.faults = self.mischief.faults
        self.policy: list[Any] = []
        self.verdicts: dict[str, bool] = {}
        self.checks = 0

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
                f"{time.strftime('%H:%M:%S')} after {self.mischief.done[-1] if self.mischief.done else 'the start'}: {found.text()}"
            )

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
        samples = [s for step in sorted(steps) for s in steps[step].samples]
        if len(samples) != len(set(samples)):
            self.faults.append("a sample contributed twice")
        groups = [g for step in sorted(steps) for g in steps[step].groups]
        dropped = {g for g, kept in self.verdicts.items() if not kept}
        dropped |= {g for m in self.policy if isinstance(m, GroupsGivenUp) for g, _ in m.groups}
        opened = {key.partition("+")[0] for key in await bus.hash_of(bus.keys.open_groups)}
        issued = Position.parse(await bus.state("sampler")).cursor.group
        known = {*groups, *dropped, *opened}
        missing = [g for g in (f"g{n:07d}" for n in range(1, issued + 1)) if g not in known]
        if missing:
            self.faults.append(f"{len(missing)} issued groups are nowhere: {missing[:5]}")
        history = await read_history(bus)
        for step, message in steps.items():
            bound = values_at(history, message.knob_epoch).max_weight_staleness
            if message.metrics.get("train/staleness_max", 0.0) > bound:
                self.faults.append(f"step {step} trained a token {message.metrics['train/staleness_max']} steps old")
        traced = await self._trace_some(bus, samples, sorted(dropped))
        self._attribute_idle(steps)
        return {"samples_traced": traced} | self._figures(found, steps, issued)

    async def _trace_some(self, bus: Bus, trained: Sequence[str], dropped: Sequence[str]) -> int:
        """Each of TRACED trained samples and dropped groups, drawn at random, has its whole life on record; how many were asked."""
        draw = random.Random(len(trained))
        asked = draw.sample(trained, min(TRACED, len(trained))), draw.sample(dropped, min(TRACED, len(dropped)))
        for wanted, ids in zip((LIFE, {"dropped"}), asked, strict=True):
            for name in ids:
                found = await trace(bus, name, self.mischief.run.dir)
                if gaps := wanted - {moment.what for moment in found.moments}:
                    self.faults.append(f"the life of {name} is told without {', '.join(sorted(gaps))}: {found.state}")
        return sum(map(len, asked))

    def _attribute_idle(self, steps: dict[int, StepDone]) -> None:
        """Seconds between two steps above the median, given to the last disturbance before the later one."""
        walls = sorted(m.wall for m in self.policy if isinstance(m, StepDone))
        gaps = [b - a for a, b in itertools.pairwise(walls)]
        usual = statistics.median(gaps) if gaps else 0.0
        for begin, end in itertools.pairwise(walls):
            before = [d for d in self.mischief.done if d.wall < end]
            if before and end - begin > usual:
                before[-1].idle_s += end - begin - usual

    def _figures(self, found: ledger.LedgerCheck, steps: dict[int, StepDone], issued: int) -> dict[str, Any]:
        all_steps = [m for m in self.policy if isinstance(m, StepDone)]
        kinds = Counter(d.kind for d in self.mischief.done)
        by_kind = {
            kind: {
                "times": n,
                "samples_redone": sum(d.samples for d in self.mischief.done if d.kind == kind),
                "tokens_regenerated_at_most": sum(d.tokens for d in self.mischief.done if d.kind == kind),
                "trainer_idle_s_each": round(sum(d.idle_s for d in self.mischief.done if d.kind == kind) / n, 2),
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


def share_models(home: Path) -> None:
    """Use the builtin models that runs in this repository have made."""
    models = REPO / "runs" / ".models"
    if models.is_dir():
        (home / "runs").mkdir(parents=True, exist_ok=True)
        if not (home / "runs" / ".models").exists():
            (home / "runs" / ".models").symlink_to(models)


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
                await asyncio.sleep(state.mischief.random.uniform(0.3, 2.0) * pause_s)
                await state.mischief.disturb(bus)
                await asyncio.sleep(0.5)
                await state.check(bus)
                assert run.launcher is not None
                if run.launcher.poll() is not None:
                    state.faults.append(f"the launcher ended with {run.launcher.returncode}: {run.output()[-600:]}")
                    break
            # Everyone gets the chance to come back before the end.
            await asyncio.sleep(10.0)
            await state.check(bus)
            for name, guest in state.mischief.guests.items():
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
    share_models(home)
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
