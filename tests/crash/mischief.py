"""What may happen to a run from outside, drawn from a seed: kills, stops, joins, leaves, knob changes, bad content."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from bus import BY_NAME, Bus
from bus.errors import KnobRejected
from bus.knobs.live import propose, read_history, values_at
from bus.topology import PREFIXES, PROMPTS
from tests.actors.garbage import garbage
from tests.crash.house import Run
from tests.warm.launched import Warmed

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
    *("bad content",) * 3,
)
FED = ("prompts", "prefixes", "tail", "parked", "rollouts", "scored", "groups", "eval.prompts", "eval.rollouts", "eval.scored",
       "policy", "verdicts", "active", "events")  # fmt: skip
AT_ONCE = 5  # pieces of garbage
BURIED_S = 120.0  # a room that was just killed is back long before


class Disturbance(msgspec.Struct):
    """One thing done to the run. `wall`: when, seconds."""

    kind: str
    what: str
    wall: float
    samples: int = 0  # under way in a killed worker: generated again, from their saved prefixes
    tokens: int = 0  # at most so many of their tokens
    idle_s: float = 0.0


class Mischief:
    """Disturbs one run. `done`: what was done; `faults`: what should not have followed."""

    def __init__(self, run: Run, seed: int, guests: str = "guest") -> None:
        """`guests`: the names of workers that join begin so."""
        self.run = run
        self.random = random.Random(seed)
        self.done: list[Disturbance] = []
        self.faults: list[str] = []
        self.guests: dict[str, subprocess.Popen[bytes] | Warmed] = {}
        self.planted: list[tuple[str, str]] = []  # garbage: stream, entry
        self._joined, self._guests = 0, guests

    async def disturb(self, bus: Bus) -> None:
        """One disturbance of a kind drawn at random; what is not there at the moment is passed over."""
        self.meet_the_ended()
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
            "bad content": self._bad_content,
        }
        done = await actions[kind](bus)
        if done is not None:
            self.done.append(done)
            print(f"{time.strftime('%H:%M:%S')} {done.kind}: {done.what}", flush=True)

    def meet_the_ended(self) -> None:
        """Guests that ended by themselves: rightly where a Redis that is away kept them from joining, else a fault."""
        for name in [name for name, guest in self.guests.items() if guest.poll() is not None]:
            code = self.guests.pop(name).poll()
            said = (self.run.home / f"{name}.log").read_text(errors="replace").strip()
            if "joined" not in said and "did not answer" in said:
                self.done.append(Disturbance("join without a Redis", name, time.time()))
            else:
                self.faults.append(f"{name} ended by itself, exit status {code}: {said[-300:]}")

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
        history = await read_history(bus)
        live = values_at(history, history[-1].epoch)
        per_sample = min(live.partial_save_tokens, live.rollout_max_response_len)
        return Disturbance("kill worker", name, wall, samples=samples, tokens=samples * per_sample)

    async def _kill_actor(self, bus: Bus) -> Disturbance | None:
        name, number = self.random.choice(ACTORS[1:]), self.random.choice((signal.SIGKILL, signal.SIGTERM))
        return Disturbance("kill actor", f"{name}, {number.name}", time.time()) if self._signal(name, number) else None

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
        name = f"{self._guests}-{self._joined}"
        self.guests[name] = join(self.run, name)
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

    async def _bad_content(self, bus: Bus) -> Disturbance | None:
        """Garbage on a stream that rooms read, which they take away; on a log it stays, and is passed over."""
        stream = BY_NAME[self.random.choice(FED)]
        pieces = self.random.sample(garbage(stream, self.random), AT_ONCE)
        wall, key = time.time(), bus.keys.stream(stream.name)
        ids = [(await bus.link.run("XADD", key, "*", *fields)).decode() for fields in pieces if fields]
        self.planted += [(stream.name, entry_id) for entry_id in ids]
        if stream.is_data:
            end = time.monotonic() + BURIED_S
            while lying := [i for i in ids if await bus.link.run("XRANGE", key, i, i)]:
                if time.monotonic() > end:
                    self.faults.append(f"garbage still lies on {stream.name} after {BURIED_S:.0f} s: {', '.join(lying)}")
                    break
                await asyncio.sleep(0.2)
        return Disturbance("bad content", f"{len(ids)} entries on {stream.name}", wall)


def join(run: Run, name: str, *flags: str) -> subprocess.Popen[bytes] | Warmed:
    """`miles-async worker` beside the run."""
    return run.beside("worker", "--name", name, "--run", run.dir.name, *flags, log=f"{name}.log")
