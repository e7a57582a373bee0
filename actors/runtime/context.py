"""What an actor is given once, at its start: bus, knobs, clock, seeds, vitals, and the request to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median_low
from typing import Any

import msgspec

from actors.runtime.host import Folder, processes_name, room_left, shared_memory_name
from actors.runtime.refusals import ActorRefusals, RunEnds
from bus import Bus, BusConfig, Out
from bus.errors import printable
from bus.knobs.live import KnobValues, LiveKnobs
from bus.messages.control import ActorState, Event, Vitals
from bus.messages.events import EventKind, Level
from bus.messages.waits import Wait
from bus.topology import EVENTS

AT_ONCE_S = 0.02
ANSWERS, FEW_ANSWERS = 9, 3  # of the bus, of which the middle one is told; of fewer none: who starts waits for a core
ROOM_S = 10.0  # between two looks at the host's disk and memory
STOP_WISH = "stop"
"""Field of the run's state: who asked the whole run to stop; empty = nobody. Every actor looks at each heartbeat, so that it
is heard without a launcher too."""


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start-up settings that every actor has; `room` holds the room's own, checked against its struct."""

    name: str
    role: str
    bus: BusConfig
    run_seed: int = 0
    heartbeat_s: float
    drain_timeout_s: float
    loop_deadline_s: float  # 0 = nobody watches the loop
    run_dir: str = ""
    release: str = ""
    room: dict[str, Any] = {}


class Context:
    """One actor's surroundings. `draining` is set by SIGTERM or by the room itself when its work is over."""

    def __init__(self, spec: ActorSpec, bus: Bus, knobs: LiveKnobs) -> None:
        self.spec = spec
        self.name = spec.name
        self.bus = bus
        self.clock = bus.clock
        self.live_knobs = knobs
        self.draining = asyncio.Event()
        self.log = logging.getLogger(spec.name)
        self.state: ActorState = "starting"
        self.version = -1
        self.in_flight = 0
        self.slots = 0
        self.counters: dict[str, float] = {}
        self.refusals = ActorRefusals(self.count, self.event)
        self.note = ""
        self.noting: Callable[[], str] = str  # makes a note at each look, where one at each event would cost too much
        self.depot = ""  # where this actor serves versions to other hosts
        self.received = 0  # bytes of versions that came from other hosts
        self.takes = -1  # version that is coming
        self.ranks = ""  # process ids of a trainer's other ranks, by host
        self.news = asyncio.Event()  # in the vitals: they are sent at once
        self._room_due = 0.0
        self._folder = Folder(spec.run_dir)
        self._answered_s: deque[float] = deque(maxlen=ANSWERS)  # how long the bus took for each of the last vitals
        self._waits: list[tuple[str, float]] = []
        self._last_wait: tuple[str, float, float] = ("", 0.0, 0.0)
        self._finishes = ("", 0.0)  # what, since when

    @property
    def knobs(self) -> KnobValues:
        """One frozen snapshot; take it once per decision."""
        return self.live_knobs.snapshot()

    def count(self, name: str, by: float = 1.0) -> None:
        """Move a counter that vitals show. No decision reads it."""
        self.counters[name] = self.counters.get(name, 0.0) + by

    @contextmanager
    def waiting(self, wait: Wait, *, first: bool = False, **values: object) -> Iterator[Callable[[], None]]:
        """Say what this actor waits for while the body runs, with the `values` that the wait names; the doctor reads it. The body
        calls what it is given when it got something: the next wait is another one then. A loop that asks again after an empty
        answer waits all along. Of several waits the oldest is said, or the one that is to be `first`.

        Example:
            with context.waiting(Wait.ACTIVATION, version=7):
                await link.activate(order)
        """
        what, now = wait.text(**values), self.clock.wall()
        before, since, ended = self._last_wait
        item = (what, since if before == what and now - ended < AT_ONCE_S else now)
        answered = False

        def heard() -> None:
            nonlocal answered
            answered = True

        self._waits.insert(0 if first else len(self._waits), item)
        try:
            yield heard
        finally:
            self._waits.remove(item)
            self._last_wait = ("", 0.0, 0.0) if answered else (*item, self.clock.wall())

    @contextmanager
    def finishing(self, wait: Wait) -> Iterator[None]:
        """Say what the body does, in the vitals of an actor that was asked to end: it is waited for (drain.py)."""
        before, self._finishes = self._finishes, (wait.text(), self.clock.wall())
        try:
            yield
        finally:
            self._finishes = before

    def vitals(self) -> Vitals:
        """The present state as a message."""
        own = self._finishes if self.draining.is_set() else ("", 0.0)
        waits_for, since = self._waits[0] if self._waits else own
        if self.bus.waiting_for_room:
            waits_for = Wait.STREAM_SPACE.text(stream=self.bus.waiting_for_room)
        elif self.bus.blobs.full:
            waits_for = self.bus.blobs.full
        state: ActorState = "waiting" if waits_for and self.state == "running" else self.state
        return Vitals(
            actor=self.name,
            role=self.spec.role,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=state,
            wall=self.clock.wall(),
            version=self.version,
            waits_for=printable(waits_for),
            waits_since=since,
            in_flight=self.in_flight,
            counters=dict(self.counters),
            note=printable(self.note or self.noting()),
            slots=self.slots,
            memory=shared_memory_name(),
            depot=self.depot,
            received=self.received,
            processes=processes_name(),
            takes=self.takes,
            release=self.spec.release,
            ranks=self.ranks or msgspec.UNSET,
        )

    async def event(self, kind: EventKind, text: str, *, level: Level | None = None, about: str = "", **data: Any) -> None:
        """Tell the operator something worth finding later, in one line. `level`: where it is not the kind's usual one. `about`:
        what the kind is followed by."""
        text, level, name = " ".join(text.split()), level or kind.level, kind.of(about) if about else kind.value
        self.log.log(logging.INFO if level == "info" else logging.WARNING, "%s: %s", name, text)
        event = Event(actor=self.name, kind=name, text=printable(text), wall=self.clock.wall(), level=level, data=data)
        await self.bus.append([Out(EVENTS, event)], repeatable=True)

    async def beat(self, *, leaves: bool = False) -> None:
        """Send vitals: the last ones to the hash that `status` reads, which renews this actor's name, each one to the events log.
        How long the bus takes to answer is measured each time: on a slow link there is news at every beat. `leaves`: the last
        ones, with which the name is given back. RunEnds where the run's folder is another now, or gone."""
        if self.clock.monotonic() >= self._room_due:
            self._room_due = self.clock.monotonic() + ROOM_S
            self.counters |= await asyncio.to_thread(room_left, self.spec.run_dir or "/")
            if await asyncio.to_thread(self._folder.is_gone):
                raise RunEnds(f"the run's folder {self.spec.run_dir} was removed or replaced: what worked there ends")
        vitals, asked = self.vitals(), self.clock.monotonic()
        lapsed = await self.bus.set_vitals(self.name, vitals, leaves=leaves)
        self._answered_s.append(self.clock.monotonic() - asked)
        # The middle one: a late answer may be a process that waited for a core, a quick one a slow link between two fetches.
        if len(self._answered_s) >= FEW_ANSWERS:
            self.counters["bus_answer_s"] = median_low(self._answered_s)
        await self.bus.append([Out(EVENTS, vitals)], repeatable=True)
        if lapsed and self.bus.names.hold is not None:
            text = f"was not heard for a while, and nobody took its name: it goes on as generation {self.bus.names.hold.generation}"
            await self.event(EventKind.NAME_RETAKEN, text)
