"""Simulated engines (pure): workers with slots, whose requests slow each other down.

Each worker has a *work* clock: it moves as fast as a lone request would, slower with each request more, and stands still while
weights are loaded. A sample ends when that clock has moved on by its seconds; its tokens are spread evenly over them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from typing import Literal

import msgspec

from actors.generation.lane import lane_of
from actors.generation.slots import EngineLook, Limits, Slots
from bus.messages.groups import OpenGroup
from bus.messages.versions import VersionSpan
from miles_async.console.whatif.setup import Draw, SimulatedKnobs

NEVER = float("inf")
Way = Literal["prompts", "prefixes", "tail"]


class SimulatedSample(msgspec.Struct):
    """One sample on its way. `made` tokens of it are there; `parts`: step and tokens, oldest first."""

    group: OpenGroup
    index: int
    draw: Draw
    made: float = 0.0
    parts: list[tuple[int, float]] = []
    way: Way = "prompts"
    stop_at: float = NEVER  # tokens at which it gives its slot back
    from_work: float = 0.0

    @property
    def least_step(self) -> int:
        """No worker whose version is older may go on with it."""
        return self.parts[-1][0] if self.parts else self.group.step

    def spans(self) -> tuple[VersionSpan, ...]:
        """Its tokens by version, in whole numbers; a version number is one more than its step."""
        found: list[VersionSpan] = []
        total, told = 0.0, 0
        for step, tokens in self.parts:
            total += tokens
            n = round(total) - told
            if n > 0:
                found.append(VersionSpan(step + 1, step, n))
                told += n
        return tuple(found)


class SimulatedWorker:
    """One engine. `slowdown`: what each request running adds to the seconds of a lone one, as a share."""

    def __init__(self, name: str, slots: int, slowdown: float) -> None:
        self.name, self.slots, self.step = name, slots, -1
        self.area = self.room = 0.0  # requests running, and slots, integrated over seconds
        self._auto = Slots(slots)
        self._ended = 0  # since the last look
        self._slowdown = slowdown
        self._work = self._now = self._paused_until = 0.0
        self._loaded: list[tuple[float, int]] = []  # work clock at which a step's weights came
        self._ends: list[tuple[float, int, SimulatedSample]] = []
        self._number = 0

    @property
    def running(self) -> int:
        return len(self._ends)

    def next_end(self) -> float:
        """Seconds at which the next sample gives its slot back."""
        if not self._ends:
            return NEVER
        return max(self._now, self._paused_until) + max(0.0, self._ends[0][0] - self._work) * self._pace

    @property
    def _pace(self) -> float:
        """Seconds while the work clock moves on by one."""
        return 1 + self._slowdown * len(self._ends)

    def advance(self, now: float) -> None:
        self.area += len(self._ends) * (now - self._now)
        self.room += self.slots * (now - self._now)
        self._work += max(0.0, now - max(self._now, self._paused_until)) / self._pace
        self._now = now

    def look(self, limits: Limits, step: int, masked: float) -> None:
        """Slots under `auto`, as the worker's pace decides them; of keys and values, and of a queue of its own, this engine tells
        nothing. `masked`: share of the batch of that step."""
        alone = sum(run.draw.tokens / run.draw.seconds for _, _, run in self._ends if run.draw.seconds)
        said = EngineLook(len(self._ends), self._ended, alone / self._pace, masked_step=step, masked=masked)
        self.slots, self._ended = self._auto.decide(said, limits), 0

    def load(self, step: int, pause_s: float) -> None:
        """Weights of a step, after which the engine stands still for a while."""
        self.step = step
        self._loaded = [(at, s) for at, s in self._loaded[-64:] if s < step]
        self._loaded.append((self._work, step))
        self._paused_until = self._now + pause_s

    def begin(self, run: SimulatedSample, stop_at: float) -> None:
        """Take a sample; it leaves at its end, or at `stop_at` tokens."""
        run.from_work, run.stop_at = self._work, stop_at
        until = min(run.draw.tokens, stop_at)
        self._number += 1
        seconds = run.draw.seconds * (until - run.made) / run.draw.tokens
        heapq.heappush(self._ends, (self._work + seconds, self._number, run))

    def pop(self) -> SimulatedSample:
        """The sample whose time has come, with its tokens."""
        end, _, run = heapq.heappop(self._ends)
        self._work = max(self._work, end)
        self._ended += 1
        self._tokens(run, min(run.draw.tokens, run.stop_at) - run.made)
        return run

    def interrupt(self) -> list[SimulatedSample]:
        """All samples, with the tokens that they have by now."""
        found = [run for _, _, run in sorted(self._ends, key=lambda item: item[1])]
        self._ends.clear()
        for run in found:
            part = (self._work - run.from_work) / run.draw.seconds if run.draw.seconds else 1.0
            self._tokens(run, min(run.draw.tokens - run.made, run.draw.tokens * part))
        return found

    def _tokens(self, run: SimulatedSample, tokens: float) -> None:
        """Spread tokens that were made since `from_work` over the versions that were loaded meanwhile."""
        took = self._work - run.from_work
        first = max(0, bisect_right(self._loaded, (run.from_work, 1 << 62)) - 1)
        parts, at = list(run.parts), run.from_work
        for number in range(first, len(self._loaded)):
            until = self._loaded[number + 1][0] if number + 1 < len(self._loaded) else self._work
            share = (until - at) / took if took > 0 else float(number + 1 == len(self._loaded))
            parts.append((self._loaded[number][1], tokens * share))
            at = until
        run.parts, run.made = parts, run.made + tokens


class Engines:
    """All workers, and the samples that wait for them. `slowdown`: see `SimulatedWorker`."""

    def __init__(self, knobs: SimulatedKnobs, slowdown: float) -> None:
        names = [f"w{i:04d}" for i in range(knobs.num_generation_workers)]
        self._tail_after, self._slice = knobs.tail_after_tokens, knobs.max_tokens_per_slice
        self._resumes = knobs.partial_rollout  # else an interrupted sample begins anew
        self.lane = lane_of(names, tail_slots=knobs.tail_slots if self._tail_after else 0, each=knobs.slots)
        self.workers = [SimulatedWorker(name, self.lane.get(name, knobs.slots), slowdown) for name in names]
        self._waiting: dict[Way, deque[SimulatedSample]] = {"tail": deque(), "prefixes": deque(), "prompts": deque()}

    @property
    def running(self) -> int:
        return sum(worker.running for worker in self.workers)

    @property
    def slots(self) -> int:
        return sum(worker.slots for worker in self.workers)

    @property
    def under_way(self) -> int:
        """Samples with the engines or waiting for them."""
        return self.running + sum(map(len, self._waiting.values()))

    @property
    def area(self) -> float:
        return sum(worker.area for worker in self.workers)

    @property
    def room(self) -> float:
        return sum(worker.room for worker in self.workers)

    def next_end(self) -> tuple[float, SimulatedWorker]:
        """When, and where, the next sample gives its slot back."""
        return min(((worker.next_end(), worker) for worker in self.workers), key=lambda item: item[0])

    def advance(self, now: float) -> None:
        for worker in self.workers:
            worker.advance(now)

    def look(self, limits: Limits, step: int, masked: float) -> None:
        """Slots under `auto` of all workers but the lane's."""
        for worker in self.workers:
            if worker.step >= 0 and worker.name not in self.lane:
                worker.look(limits, step, masked)

    def issue(self, run: SimulatedSample) -> None:
        self._waiting["prompts"].append(run)

    def end(self, worker: SimulatedWorker) -> SimulatedSample | None:
        """The sample whose time has come on a worker; None where it goes on elsewhere."""
        run = worker.pop()
        if run.made >= run.draw.tokens:
            return run
        outlived = run.way != "tail" and run.made >= self._tail_after
        self._park(run, "tail" if self.lane and worker.name not in self.lane and outlived else "prefixes")
        return None

    def load(self, worker: SimulatedWorker, step: int, pause_s: float, *, abort: bool) -> None:
        """New weights on a worker; with `abort` its samples give their slots back."""
        parked = worker.interrupt() if abort else []
        worker.load(step, pause_s)
        for run in parked:
            if not self._resumes:
                run.made, run.parts = 0.0, []
            self._park(run, "prefixes")

    def _park(self, run: SimulatedSample, way: Way) -> None:
        run.way = way
        self._waiting[way].append(run)

    def fill(self) -> None:
        """Samples into free slots: the least loaded worker takes next, the tail's first, then interrupted ones, then fresh ones."""
        while any(self._waiting.values()):
            free = sorted((w.running / w.slots, w.name, w) for w in self.workers if w.running < w.slots and w.step >= 0)
            if not any(self._take(worker) for _, _, worker in free):
                return

    def _take(self, worker: SimulatedWorker) -> bool:
        in_lane = worker.name in self.lane
        for way, waiting in self._waiting.items():
            if way == "tail" and self.lane and not in_lane:
                continue
            if waiting and waiting[0].least_step <= worker.step:
                run = waiting.popleft()
                worker.begin(run, self._stop_at(run, in_lane))
                return True
        return False

    def _stop_at(self, run: SimulatedSample, in_lane: bool) -> float:
        """Tokens at which a sample gives its slot back."""
        slices = run.made + self._slice if self._slice else NEVER
        leaves = self.lane and not in_lane and run.way != "tail" and run.made < self._tail_after
        return min(slices, self._tail_after if leaves else NEVER)
