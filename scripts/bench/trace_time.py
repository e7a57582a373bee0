"""How long a trace takes with many samples on record, of a run that goes on and of the same one when it has ended.

    python -m scripts.bench trace_time --samples 100000

The messages of such a run are put on a real Redis (with its logs at their caps) and the recorder writes them down. Asked are
samples of the middle, of the last steps and under way. `command` is the whole of `miles-async trace` with the interpreter's start;
`work` is that without the start (`python -c pass`), imports included; `warm` is the same in a process that has traced before; `cpu`
is what the command takes of a processor, which other work on the machine lengthens less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.recorder.actor import Recorder
from actors.trainer.accounts import A_MESSAGE
from bus import Bus, BusConfig, Out
from bus.messages.control import Event
from bus.messages.groups import GroupVerdict
from bus.messages.policy import Checkpointed, SamplesTrained, SampleTrained, StepDone
from bus.messages.samples import Mark
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.server import EmbeddedRedis
from bus.topology import EVENTS, POLICY, TRAINED, VERDICTS
from miles_async.cli.trace import told_of
from miles_async.settings.runs import RunRef, write_run_file
from scripts.bench import REPO
from tests.miles_async.console_data import Story

GROUP, BATCH = 8, 128
PIECE = 200  # steps between two rounds of the recorder: what they say fits into the logs
SAVE, KEPT = 20, 2  # steps between checkpoints; how many of them the policy log goes back
TIMES = 15


def life(sample: str, step: int) -> SampleTrained:
    now = time.time()
    marks = (Mark("issued", "", 0, now - 0.2), Mark("begun", "generation-0", 0, now - 0.1), Mark("ended", "generation-0", 90, now))
    return SampleTrained(sample, marks, (VersionSpan(step, step - 1, 90),), "stop", 1, 1.0, 1.0, "math", 0.1, 4.5, 90, 0.0078)


def names(step: int, *, kept: bool) -> list[str]:
    """Of a step's trained groups, or of those that were dropped meanwhile."""
    half = BATCH // GROUP
    first = (step - 1) * 2 * half + (0 if kept else half)
    return [f"g{first + n:07d}" for n in range(half)]


def said(step: int) -> list[Out]:
    """What a run says in a step: verdicts, events, the step, its samples, now and then a checkpoint."""
    outs = [
        Out(VERDICTS, GroupVerdict(group_id=g, prompt_id="p1", kept=kept, reason="" if kept else "zero_std_1", n_samples=GROUP,
                                   lives=() if kept else tuple(life(f"{g}/{i}", step) for i in range(GROUP))))
        for kept in (True, False) for g in names(step, kept=kept)
    ]  # fmt: skip
    outs += [
        Out(EVENTS, Event(actor=f"generation-{n % 2}", kind="activated", text=f"version {step}", wall=float(step),
                          data={"version": step, "step": step - 1, "pause_s": 0.1, "total_s": 0.2}))
        for n in range(20)
    ]  # fmt: skip
    groups = tuple(names(step, kept=True))
    samples = tuple(f"{g}/{i}" for g in groups for i in range(GROUP))
    metrics = {f"train/metric_{n}": n / 7 for n in range(110)}
    version = PolicyVersion(step + 1, step)
    outs.append(Out(POLICY, StepDone(step=step, version=version, trained_on=PolicyVersion(step, step - 1), groups=groups,
                                     samples=samples, metrics=metrics)))  # fmt: skip
    lives = [life(sample, step) for sample in samples]
    for at in range(0, len(lives), A_MESSAGE):
        outs.append(Out(TRAINED, SamplesTrained(step=step, samples=tuple(lives[at : at + A_MESSAGE]))))
    if step % SAVE == 0:
        outs.append(Out(POLICY, Checkpointed(step=step, path="x", save_s=1.0)))
    return outs


async def write_run(bus: Bus, run_dir: Path, n_steps: int) -> None:
    """All of it, through the bus and the recorder; at last the samples that are under way."""
    done = asyncio.Event()
    done.set()
    await Story(bus).begin()
    marks: list[str] = []
    for step in range(1, n_steps + 1):
        await bus.append(said(step))
        if step % SAVE == 0:  # as the trainer does it
            marks.append((await bus.last(POLICY))[0].id)
            if len(marks) > KEPT:
                await bus.trim_log(POLICY, marks.pop(0))
        if step % PIECE == 0 or step == n_steps:
            await Recorder(bus, run_dir).follow(done)
    await Story(bus).issue(*(name for step in range(4) for name in names(n_steps + 2 + step, kept=True)), n_samples=GROUP)


def timed(body: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Median milliseconds."""
    spent = []
    for _ in range(TIMES):
        began = clock()
        body()
        spent.append(1000 * (clock() - began))
    return round(statistics.median(spent), 1)


def children_cpu() -> float:
    """Seconds of CPU of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(ref: RunRef, home: str, asked: dict[str, str]) -> dict[str, dict[str, float]]:
    """Milliseconds by sample, see above."""

    def process(*words: str, clock: Callable[[], float] = time.perf_counter) -> float:
        return timed(lambda: subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=REPO), clock)

    start = process("-c", "pass")
    found = {}
    for which, sample in asked.items():
        kinds = {moment.what for moment in told_of(ref, sample).moments}
        wanted = {"older": {"issued", "batch", "checkpoint"}, "newest": {"issued", "batch"}}.get(which, {"issued"})
        assert wanted <= kinds, (which, sample, kinds)
        words = ("-m", "miles_async", "trace", sample, "--runs-dir", home, "--run", "many")
        command, cpu = process(*words), process(*words, clock=children_cpu)
        warm = timed(lambda one=sample: told_of(ref, one))
        found[which] = {"command": command, "work": round(command - start, 1), "warm": warm, "cpu": cpu}
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000, help="trained ones; as many are dropped")
    args = parser.parse_args()
    n_steps = max(2, args.samples // BATCH)
    with tempfile.TemporaryDirectory(prefix="ma-trace-") as home:
        run_dir = Path(home) / "many"
        server = EmbeddedRedis(run_dir)

        async def begin() -> None:
            await server.open()
            async with Bus(BusConfig(url=server.url, run="many")) as bus:
                await write_run(bus, run_dir, n_steps)

        asyncio.run(begin())
        write_run_file(run_dir, run="many", bus_url=server.url)
        ref = RunRef(bus_url=server.url, run="many", run_dir=run_dir)
        asked = {"older": f"{names(n_steps // 2, kept=True)[0]}/3", "dropped": f"{names(n_steps // 2, kept=False)[0]}/3"}
        only_live = {"newest": f"{names(n_steps, kept=True)[0]}/3", "under way": f"{names(n_steps + 2, kept=True)[0]}/3"}
        try:
            live = measured(ref, home, asked | only_live)
        finally:
            server.stop()
        size = sum(file.stat().st_size for file in run_dir.glob("*.jsonl")) / 1e6
        told = {"samples": args.samples, "record_mb": round(size), "load": os.getloadavg()[0], "live": live,
                "ended": measured(ref, home, asked)}  # fmt: skip
    print(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
