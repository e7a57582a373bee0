"""Soak: the quickstart trains on while its processes are killed, stopped, joined, drained, its knobs turned, bad content fed.

    .venv/bin/python scripts/soak.py --minutes 30 --seed 1 --out soak.json
    .venv/bin/python scripts/soak.py --minutes 20 --home DIR            (again and again: each piece goes on with the one before)
    .venv/bin/python scripts/soak.py --minutes 20 --pause 5 --calm --settled 600    (nothing is disturbed: does anything grow?)

Every disturbance is drawn from the seed and the number of the piece. Between two of them the ledger is checked as it is at that
instant, and what the run uses is measured; at the end of a piece the run is drained and the whole lineage of all pieces is
judged, as after a case of tests/crash. A piece may itself be killed: the next one kills what it left and goes on; what that did
meanwhile for more than a minute, unseen, cannot be judged any more. Exit status 1 when anything did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import psutil

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))


from actors.recorder.trained import OLDER  # noqa: E402
from actors.sampler.actor import Position  # noqa: E402
from bus import BY_NAME, Bus, BusConfig, Tail, dead, ledger  # noqa: E402
from bus.errors import MilesAsyncError  # noqa: E402
from bus.knobs.live import read_history, values_at  # noqa: E402
from bus.messages.policy import GroupsGivenUp  # noqa: E402
from bus.streams.hop import id_key  # noqa: E402
from bus.topology import POLICY, VERDICTS  # noqa: E402
from miles_async.console.trace_live import trace  # noqa: E402
from miles_async.launcher.prepare import shared_memory  # noqa: E402
from scripts import growth, soak_figures  # noqa: E402
from scripts.soak_home import Home, commit_of  # noqa: E402
from tests.crash.house import Run, Tables, merged, until  # noqa: E402
from tests.crash.judge import lineage  # noqa: E402
from tests.crash.mischief import Disturbance, Mischief  # noqa: E402

TRACED = 40  # of a piece: each takes up to seconds on a busy machine
LIFE = {"issued", "begun", "ended", "made", "scored", "judged", "trained", "batch", "checkpoint"}


STANDS_S = 300.0  # without a step; every room has been back long before


class Soak:
    """The run, what is done to it, and what was seen."""

    def __init__(self, run: Run, home: Home, seed: int, settled_s: float) -> None:
        self.home, self._settled_s = home, settled_s
        self.seed = seed + home.piece
        self.mischief = Mischief(run, self.seed, f"guest-{home.piece}")
        self._written = 0  # disturbances that are in the home's files
        self._moved = home.done, time.monotonic()

    # -- watching -----------------------------------------------------------------------------------------------

    async def follow(self, bus: Bus, stop: asyncio.Event) -> None:
        """Every message of policy and verdicts, before the logs are trimmed."""
        tail = Tail(bus, [POLICY, VERDICTS])
        await tail.open()
        tail.positions.update(self.home.last)
        while not stop.is_set():
            for entry in await tail.read(0.5):
                await self.home.keep(bus, entry)
        await tail.close()

    async def check(self, bus: Bus) -> None:
        """The ledger at this instant, and what the run uses; whether it has moved."""
        found = await ledger.check(bus)
        done = self.mischief.done
        for d in done[self._written :]:
            self.home.put("disturbed", what=d.kind, which=d.what, at=d.wall, samples=d.samples, tokens=d.tokens)
        self._written = len(done)
        self.home.put("checked", wall=time.time(), closes=found.closes)
        if not found.closes:
            self.fault(f"after {done[-1].kind + ' ' + done[-1].what if done else 'the start'}: {found.text()}")
        for text in self.mischief.faults:
            self.fault(text)
        self.mischief.faults.clear()
        steps, since = self._moved
        if self.home.done > steps:
            self._moved = self.home.done, time.monotonic()
        elif time.monotonic() - since > STANDS_S:
            self.fault(f"no step for {STANDS_S:.0f} s, since step {steps} of all pieces")
            self._moved = steps, time.monotonic()
        run = self.mischief.run
        used = await growth.measure(bus, [*launchers(run), *run.processes()], run.dir, shared_memory(run.dir).parent)
        self.home.put("measured", wall=time.time(), done=self.home.done, **used)

    def fault(self, text: str) -> None:
        """What should not have been."""
        text = f"{time.strftime('%H:%M:%S')} {text}"
        print(f"VIOLATED {text}", flush=True)
        self.home.put("fault", wall=time.time(), text=text)

    async def letters(self, bus: Bus) -> None:
        """Each piece of garbage on a stream with readers has become a dead letter, which goes. What else died stays."""
        letters = {(item.letter.stream, item.letter.entry_id): item for item in await dead.read_letters(bus)}
        planted = set(self.mischief.planted)
        if missing := [key for key in planted - letters.keys() if BY_NAME[key[0]].is_data]:
            self.fault(f"garbage without a dead letter: {missing[:5]} and {max(0, len(missing) - 5)} more")
        for item in letters.values():
            if (item.letter.stream, item.letter.entry_id) in planted:
                await dead.drop(bus, item)
            else:
                self.home.put("letter", text=f"{item.letter.stream} {item.letter.sample_id}: {item.letter.error[:200]}")

    # -- the end ------------------------------------------------------------------------------------------------

    async def judge(self, bus: Bus, since: float) -> dict[str, Any]:
        """Invariants over all pieces, and the figures. Lives are asked of what ended `since`."""
        await self.home.settle(bus)
        policy, verdicts = self.home.policy(), self.home.verdicts()
        found = await ledger.check(bus)
        if not found.closes:
            self.fault(f"at the end: {found.text()}")
        try:
            steps = lineage(policy)
        except AssertionError as error:
            self.fault(str(error))
            steps = {}
        if sorted(steps) != list(range(1, len(steps) + 1)):
            self.fault("steps of the lineage are not 1..N")
        samples = [s for step in sorted(steps) for s in steps[step].samples]
        if len(samples) != len(set(samples)):
            self.fault("a sample contributed twice")
        groups = [g for step in sorted(steps) for g in steps[step].groups]
        dropped = {v.group for v in verdicts if not v.kept}
        dropped |= {g for m in policy if isinstance(m, GroupsGivenUp) for g, _ in m.groups}
        opened = {key.partition("+")[0] for key in await bus.hash_of(bus.keys.open_groups)}
        issued = (await bus.state_as("sampler", Position.parse)).cursor.group
        known = {*groups, *dropped, *opened}
        missing = [g for g in (f"g{n:07d}" for n in range(1, issued + 1)) if g not in known]
        if missing:
            self.fault(f"{len(missing)} issued groups are nowhere: {missing[:5]}")
        history = await read_history(bus)
        for step, message in steps.items():
            bound = values_at(history, message.knob_epoch).max_weight_staleness
            if message.metrics.get("train/staleness_max", 0.0) > bound:
                self.fault(f"step {step} trained a token {message.metrics['train/staleness_max']} steps old")
        since = max(since, first_life(self.mischief.run.dir))
        trained = [s for step in sorted(steps) if steps[step].wall > since for s in steps[step].samples]
        traced = await self._trace_some(bus, trained, [v.group for v in verdicts if not v.kept and v.wall >= since])
        self.home.put("traced", samples=traced)
        return soak_figures.figures(self.home, found, policy, steps, issued, self._settled_s)

    async def _trace_some(self, bus: Bus, trained: Sequence[str], dropped: Sequence[str]) -> int:
        """Of TRACED trained samples and dropped groups, drawn at random, the whole life is on record; how many were asked."""
        draw = random.Random(len(trained))
        asked = draw.sample(trained, min(TRACED, len(trained))), draw.sample(dropped, min(TRACED, len(dropped)))
        for wanted, ids in zip((LIFE, {"dropped"}), asked, strict=True):
            for name in ids:
                found = await trace(bus, name, self.mischief.run.dir)
                if gaps := wanted - {moment.what for moment in found.moments}:
                    self.fault(f"the life of {name} is told without {', '.join(sorted(gaps))}: {found.state}")
        return sum(map(len, asked))


def first_life(run_dir: Path) -> float:
    """When the first sample that trained.jsonl still holds ended; 0.0 where it holds all."""
    try:
        with (run_dir / OLDER).open("rb") as file:
            return float(msgspec.json.decode(file.readline())["wall"])
    except FileNotFoundError:
        return 0.0


SMALL: Tables = {
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "over_sampling_batch_size": 4},
    "ckpt": {"save_interval": 50},
    "eval": {"eval_interval": 200},
}


def tables_of(config: Path, *, small: bool = False) -> Tables:
    """The quickstart's settings, endless, with paths that hold from any directory. `small`: many steps a second."""
    given: Tables = tomllib.loads(config.read_text())
    given["rollout"]["prompt_data"] = str(REPO / given["rollout"]["prompt_data"])
    name, path = given["eval"]["eval_prompt_data"]
    given["eval"]["eval_prompt_data"] = [name, str(REPO / path)]
    ours: Tables = {
        # In the end the tiny model solves every problem, and most groups teach nothing: the run goes on all the same.
        "rollout": {"num_rollout": 1_000_000, "partial_save_tokens": 8, "max_waves": 100_000},
        "ckpt": {"save_interval": 10},
        "bus": {"lease_s": 3.0},
        "launch": {"console": "none", "report": False, "restart_budget": 1000, "heartbeat_s": 1.0},
        "sglang": {"engine_token_deadline_s": 15.0},
    }
    return merged(merged(given, ours), SMALL if small else {})


def own_data(tables: Tables, home: Path) -> Tables:
    """Data in the home, so that another checkout can go on with it."""
    for table, name in (("rollout", "prompt_data"), ("eval", "eval_prompt_data")):
        *before, path = [tables[table][name]] if isinstance(tables[table][name], str) else tables[table][name]
        mine = home / Path(path).name
        if not mine.exists():
            shutil.copy(path, mine)
        tables[table][name] = [*before, str(mine)] if before else str(mine)
    return tables


def share_models(home: Path) -> None:
    """Use the builtin models that runs in this repository have made."""
    models = REPO / "runs" / ".models"
    if models.is_dir():
        (home / "runs").mkdir(parents=True, exist_ok=True)
        if not (home / "runs" / ".models").exists():
            (home / "runs" / ".models").symlink_to(models)


async def soak(state: Soak, *, minutes: float, pause_s: float, calm: bool) -> dict[str, Any]:
    """One piece: disturb until the time is up, then drain and judge."""
    home, run, mischief = state.home, state.mischief.run, state.mischief
    home.put("began", wall=time.time(), commit=commit_of(REPO), seed=state.seed)
    if left := [*launchers(run), *run.processes()]:
        mischief.done.append(Disturbance("kill all", f"{len(left)} processes that a killed piece left", time.time()))
        for process in launchers(run):
            process.kill()
            process.wait(10)
        run.kill_all()
    run.start()
    await asyncio.to_thread(until, "a step", lambda: steps_after(run, home.last[POLICY.name]) > 0, seconds=900)
    config, began, wall = config_of(run), time.monotonic(), time.time()
    async with Bus(config) as bus:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(state.follow(bus, stop))
            while time.monotonic() - began < minutes * 60:
                await asyncio.sleep(mischief.random.uniform(0.3, 1.7) * pause_s)
                if not calm:
                    await mischief.disturb(bus)
                await asyncio.sleep(0.5)
                await state.check(bus)
                assert run.launcher is not None
                if run.launcher.poll() is not None:
                    state.fault(f"the launcher ended with {run.launcher.returncode}: {run.output()[-600:]}")
                    break
            # Everyone gets the chance to come back before the end.
            await asyncio.sleep(10.0)
            await state.check(bus)
            mischief.meet_the_ended()
            for name, guest in mischief.guests.items():
                guest.send_signal(signal.SIGTERM)
                if await asyncio.to_thread(guest.wait, 60) != 0:
                    state.fault(f"{name} did not drain")
            stop.set()
    if run.launcher is not None and run.launcher.poll() is None:
        await asyncio.to_thread(run.until_it_listens)  # one that was just started again does not yet
        run.launcher.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(run.join, seconds=300)
        if code != 0:
            state.fault(f"the drain ended with {code}: {run.output()[-600:]}")
            await asyncio.to_thread(run.kill_all)  # what still moves cannot be judged
    home.put("ended", wall=time.time(), minutes=(time.monotonic() - began) / 60)
    return await judged(state, wall)


async def judged(state: Soak, since: float) -> dict[str, Any]:
    """The verdict over what nobody works on any more."""
    run = state.mischief.run
    server = await asyncio.to_thread(run.server)
    try:
        async with Bus(config_of(run)) as bus:
            await state.letters(bus)
            return await state.judge(bus, since)
    finally:
        await asyncio.to_thread(server.stop)


def config_of(run: Run) -> BusConfig:
    """How the run's bus is reached, with patience: a Redis that was killed reads its file again, on a busy machine for minutes."""
    reference = msgspec.json.decode((run.dir / "run.json").read_bytes())
    return BusConfig(url=reference["bus_url"], run=reference["run"], blob_dir=str(run.dir / "blobs"), deadline_s=300.0)


def launchers(run: Run) -> list[psutil.Process]:
    """Living launchers of the run and of its guests, whoever started them."""
    mine = {str(run.home / "run.toml"), str(run.dir.parent)}
    return [p for p in psutil.process_iter(["cmdline"]) if mine.intersection(p.info["cmdline"] or [])]


def steps_after(run: Run, entry_id: str) -> int:
    """Steps on the policy log behind an entry; 0 while its server is down."""

    async def count(bus: Bus) -> int:
        entries = await bus.scan_all(POLICY)
        return sum(e.fields.get("type") == "policy.step" and id_key(e.id) > id_key(entry_id) for e in entries)

    if not (run.dir / "run.json").exists():
        return 0
    try:
        return int(run.ask(count))
    except (MilesAsyncError, OSError):
        return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=6.0, help="mean seconds between two disturbances")
    parser.add_argument("--calm", action="store_true", help="disturb nothing, train on small batches")
    parser.add_argument("--settled", type=float, default=growth.SETTLED_S, help="seconds of a life in which caches fill")
    parser.add_argument("--config", type=Path, default=REPO / "configs" / "quickstart.toml")
    parser.add_argument("--home", type=Path, help="where the run lies, which the next piece goes on with; default: a temporary one")
    parser.add_argument("--judge", action="store_true", help="no new piece: judge what the home holds")
    parser.add_argument("--out", type=Path, help="JSON with the figures of all pieces")
    args = parser.parse_args()
    directory = (args.home or Path(mkdtemp(prefix="ma-soak-"))).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    share_models(directory)
    run = Run(directory, own_data(tables_of(args.config, small=args.calm), directory))
    state = Soak(run, Home(directory), args.seed, args.settled)
    try:
        piece = judged(state, 0.0) if args.judge else soak(state, minutes=args.minutes, pause_s=args.pause, calm=args.calm)
        figures = asyncio.run(piece)
    except (MilesAsyncError, AssertionError) as error:
        state.fault(f"soak: {type(error).__name__}: {error}")
        return 1
    finally:
        state.home.close()
        run.kill_all()
        if args.home is None:
            run.clean()
    if args.out is not None:
        growth.write_figures(args.out, figures)
    print(soak_figures.table(figures), growth.table(growth.Slope(**row) for row in figures["growth"]), sep="\n\n")
    for fault in figures["faults"]:
        print(f"VIOLATED {fault}")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
