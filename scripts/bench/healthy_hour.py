"""A healthy run under the doctor's eye: every alarm in it is a false one, unless the machine itself was at fault.

    python -m scripts.bench healthy_hour --minutes 60 --out healthy.json

The whole house as the launcher starts it, over the engines of schedule_engine.py, which take their time and no CPU, and a trainer
that learns nothing. Nothing is done to it. Every ten seconds the doctor looks, as for the web console. Every finding above `info`
is an alarm, written down once from the look that first has it to the last. Beside it stands how late this process woke from a
short sleep in the minute before: a machine that lets everybody wait for seconds makes silences that are no fault of the rules, and
such alarms are counted apart. What the run uses is measured too (growth.py), for lives of an hour without a kill.
Exit status 1: an alarm while the machine was in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import psutil

from actors.runtime.child import Child, free_port
from bus import Bus, BusConfig
from bus.ledger import LedgerCheck, check
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.scene import read_scene
from miles_async.console.watchdog import Audits
from miles_async.launcher.prepare import shared_memory
from scripts import growth
from scripts.bench import REPO
from tests.crash.house import Run, until
from tests.crash.toy import make_toy

LOOK_S, NAP_S, LATE_S = 10.0, 0.1, 1.0
ENGINES, SLOTS, MEDIAN_S, TOKENS = 2, 32, 4.0, 64  # a batch of 128 samples takes about ten seconds


class Naps:
    """How late this process wakes."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()

    async def take(self) -> None:
        """For ever."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(NAP_S)
            now = time.monotonic()
            self._late.append((now, now - began - NAP_S))
            while self._late[0][0] < now - 60:
                self._late.popleft()

    def worst_s(self) -> float:
        """In the last minute."""
        return max((late for _, late in self._late), default=0.0)


class Watch:
    """What the doctor said, look by look."""

    def __init__(self) -> None:
        self.alarms: list[dict[str, Any]] = []
        self._now: dict[tuple[str, str], dict[str, Any]] = {}
        self._audits = Audits()
        self._ledger: LedgerCheck | None = None
        self.looks = 0

    async def look(self, bus: Bus, run_dir: Path, late_s: float) -> None:
        """One."""
        now = bus.clock.monotonic()
        if self.looks == 0 or self._audits.due(now):
            self._ledger = await check(bus)
            self._audits.done(now, bus.clock.monotonic())
        found = diagnose(await read_scene(bus, run_dir, ledger=self._ledger))
        self.looks += 1
        wall, present = time.time(), {(f.rule, f.about): f for f in found if f.level != "info"}
        self._now = {key: alarm for key, alarm in self._now.items() if key in present}
        for key, f in present.items():
            alarm = self._now.get(key)
            if alarm is None:
                alarm = {"rule": f.rule, "about": f.about, "level": f.level, "text": f.text, "first": wall, "late_s": 0.0,
                         "load": os.getloadavg()[0]}  # fmt: skip
                self._now[key] = alarm
                self.alarms.append(alarm)
                print(
                    f"{time.strftime('%H:%M:%S')} {f.level} {f.rule} (woke up to {late_s:.2f} s late): {f.text}",
                    flush=True,
                )
            alarm["last"] = wall
            alarm["late_s"] = max(alarm["late_s"], late_s)


def tables(home: Path, port: int) -> dict[str, dict[str, Any]]:
    """Settings of the run."""
    toy = home / "toy"
    if not toy.exists():
        make_toy(toy)
        (toy / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(4096)))
    return {
        "model": {"hf_checkpoint": str(toy / "model")},
        "rollout": {
            "prompt_data": str(toy / "prompts.jsonl"), "input_key": "prompt", "num_rollout": 1_000_000,
            "rollout_batch_size": 16, "n_samples_per_prompt": 8, "rollout_max_response_len": 200,
            "rm_type": "deterministic_random", "dynamic_sampling_filter_path": "none", "max_weight_staleness": 2,
        },
        "grpo": {"use_tis": True},
        "sglang": {
            "engine": "external", "sglang_server_concurrency": SLOTS,
            "rollout_external_engine_addrs": [f"http://127.0.0.1:{port}/{i}" for i in range(ENGINES)],
        },
        "launch": {"console": "none", "report": False, "debug_rollout_only": True},
    }  # fmt: skip


async def hour(home: Path, minutes: float) -> dict[str, Any]:
    """Start it, look at it, stop it."""
    port, engines = free_port(), Child()
    script = {"lengths": "lognormal", "median_s": MEDIAN_S, "tokens": TOKENS, "proportional": False, "chunk": 0, "slots": SLOTS,
              "engines": ENGINES, "seed": "healthy", "log": str(home / "samples.jsonl")}  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    words = [sys.executable, "-m", "scripts.bench.schedule", "--engines", str(port), json.dumps(script)]
    await engines.start(words, home / "engines.log", environment)
    run, watch, naps, used, began = Run(home, tables(home, port)), Watch(), Naps(), list[dict[str, Any]](), time.time()
    try:
        run.start()
        assert run.launcher is not None
        await asyncio.to_thread(until, "the first step", lambda: run.step() >= 1, seconds=600)
        reference = msgspec.json.decode((run.dir / "run.json").read_bytes())
        config = BusConfig(url=reference["bus_url"], run=reference["run"], blob_dir=str(run.dir / "blobs"))
        end, napping = time.monotonic() + minutes * 60, asyncio.create_task(naps.take())
        async with Bus(config) as bus:
            while time.monotonic() < end:
                await asyncio.sleep(LOOK_S)
                await watch.look(bus, run.dir, naps.worst_s())
                if watch.looks % 6 == 1:
                    step = await asyncio.to_thread(run.step)
                    use = await growth.measure(
                        bus,
                        [psutil.Process(run.launcher.pid), *run.processes()],
                        run.dir,
                        shared_memory(run.dir).parent,
                    )
                    used.append({"piece": 1, "wall": time.time(), "done": step, **use})
                    with (home / "growth.jsonl").open("ab") as file:
                        file.write(msgspec.json.encode(used[-1]) + b"\n")
        napping.cancel()
        run.launcher.send_signal(signal.SIGTERM)
        await asyncio.to_thread(run.finish, seconds=300)
    finally:
        run.clean()
        await engines.stop(1.0)
    late = [a for a in watch.alarms if a["late_s"] >= LATE_S]
    return {
        "minutes": round((time.time() - began) / 60, 1),
        "looks": watch.looks,
        "steps": used[-1]["done"] if used else 0,
        "false_alarms": [a for a in watch.alarms if a["late_s"] < LATE_S],
        "alarms_while_the_machine_was_late": late,
        "growth": [row._asdict() for row in growth.slopes(used)],
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="JSON with all alarms")
    parser.add_argument("--home", type=Path, help="a new folder for the run; default: a temporary one")
    args = parser.parse_args()
    home = (args.home or Path(mkdtemp(prefix="ma-healthy-"))).absolute()
    home.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(hour(home, args.minutes))
    if args.out is not None:
        growth.write_figures(args.out, found)
    print(growth.table(growth.Slope(**row) for row in found["growth"]))
    false, late = found["false_alarms"], found["alarms_while_the_machine_was_late"]
    print(f"{found['minutes']} min, {found['steps']} steps, {found['looks']} looks: {len(false)} false alarms, {len(late)} while "
          f"the machine woke processes {LATE_S:g} s late or more")  # fmt: skip
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
