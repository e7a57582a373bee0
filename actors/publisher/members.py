"""The run's rollout workers, as the events log tells (pure): who lives, serves what, and can be sent a version.

This table alone decides it. Time is the reader's own monotonic clock at the receipt of a word; no clock of another host is read.

    no seat --activated--> seat --joined, engine stalled, transport failed, late, no version--> no seat

Always true: an engine has a seat only between an activation and the next sign of trouble, so one that is new, or that a
transport failed, takes a version from files before it is sent to again. One that failed STRIKES times in a row gets files alone
for ASIDE_S; one that refuses files which others load gets nothing for as long. An engine on a GPU that the trainer lends is here
only while it has it, and takes files: no broadcast joins it with the trainer on one GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from actors.runtime.transports.records import FILES, NETWORK, way_of
from bus.messages.active import Seat
from bus.messages.control import Event, Vitals
from bus.messages.events import EventKind
from bus.messages.waits import Wait

STRIKES = 2
REFUSALS = 3
ASIDE_S = 600.0
SILENT_KEPT = 1000
UNHEARD_S = 3.0  # an order is on its way, or the word that it is followed
NOT_HERE = ("stopped", "failed", "draining")
FAILED = (EventKind.TRANSPORT_FAILED, EventKind.ENGINE_STALLED, EventKind.WEIGHTS_REFUSED)


class Member(msgspec.Struct, kw_only=True):
    """One living worker. `heard`: when, in the reader's monotonic seconds."""

    heard: float
    serving: int = -1  # version id, -1 = none
    slots: int = 0  # samples it takes at once, as it said last
    waits: str = ""
    seat: Seat | None = None
    ordered: tuple[int, float] | None = None  # version id, and when
    told: int = -1  # the version of its newest order, answered or not
    takes: int = -1  # the version that it is at work on, as it said or as its orders came; -1 = none
    offered: dict[int, float] = {}  # versions that it was told to fetch, and when: it may have begun with any
    late: bool = False  # it let the deadline of its last order pass
    refused: str = ""  # the files that it refused, until it activated something
    memory: str = ""  # whose files it can read, as it said; empty = it did not say
    depot: str = ""  # where it serves versions to others
    received: int = 0  # bytes of versions that came to it over the network

    def order(self, version: int, now: float, *, fetched: bool = False) -> None:
        """It is told to take this version. One that is at work on an older one ends that first, and then takes the newest that it
        has heard of."""
        self.ordered, self.told = (version, now), version
        if self.takes < 0:
            self.takes = version
        if fetched:
            self.offered = {v: at for v, at in self.offered.items() if now - at < UNHEARD_S} | {version: now}

    def answered(self, version: int) -> None:
        """It is done with this version, or gave it up."""
        self.takes = self.told if self.told > version else -1

    def wanted(self, now: float) -> set[int]:
        """Versions that it takes, or may be about to."""
        soon = {version for version, at in self.offered.items() if now - at < UNHEARD_S}
        at_hand = {self.takes, self.ordered[0] if self.ordered is not None else -1} - {-1}
        return soon | at_hand


class Members:
    """Folded from the events log. `timeout_s`: silence after which a worker counts as gone. `lent`: those on the trainer's GPUs.
    `own`: the transport that the settings name."""

    def __init__(self, timeout_s: float, lent: Collection[str] = (), own: str = "") -> None:
        self._timeout_s = timeout_s
        self._lent, self._own = lent, own
        self.all: dict[str, Member] = {}
        self._failed: dict[str, tuple[int, float]] = {}  # worker -> transports that failed in a row; when the last
        self._refused: dict[str, tuple[int, float]] = {}  # worker -> files refused in a row; when the last
        self._silent: dict[str, Member] = {}  # those that were left out: where they are is known when they are back

    @property
    def serving(self) -> dict[str, int]:
        """Worker -> version id, by name."""
        return {name: member.serving for name, member in sorted(self.all.items())}

    def fold(self, message: object, now: float, entry_id: str = "") -> None:
        """Take one message of the events log; what is not about workers is ignored. `entry_id` names the incarnation of an
        engine that begins with this entry."""
        match message:
            case Vitals(role="generation") if message.state in NOT_HERE or message.wait is Wait.UNLENT:
                self.all.pop(message.actor, None)
            case Event(kind=EventKind.MEMORY_RELEASED) if message.actor in self._lent:
                self.all.pop(message.actor, None)
            case Event(kind=EventKind.LENT):
                member = self._hear(message.actor, now)
                member.serving, member.ordered = int(message.data.get("version", -1)), None
            case Vitals(role="generation"):
                member = self._hear(message.actor, now)
                member.serving, member.slots, member.waits = message.version, message.slots, message.waits_for
                member.memory, member.depot = message.memory, message.depot
                if member.ordered is not None and message.received != member.received:
                    member.ordered = member.ordered[0], now  # it is slow, but it comes
                member.received = message.received
                if message.takes > message.version:
                    member.takes = message.takes
                elif member.takes <= message.version:
                    member.takes = -1  # the word that it serves that was heard before
                if message.version < 0:
                    member.seat = None
            case Event(kind=EventKind.JOINED):
                member = self._hear(message.actor, now)
                member.serving, member.seat, member.ordered, member.takes = -1, None, None, -1
            case Event(kind=EventKind.ACTIVATED, data=data):
                member = self._hear(message.actor, now)
                member.serving = int(data.get("version", -1))
                member.late, member.ordered, member.refused = False, None, ""
                member.answered(member.serving)
                if member.seat is None and message.actor not in self._lent:
                    member.seat = Seat(message.actor, int(data.get("gpus", 1)), str(data.get("host", "")), entry_id)
                if data.get("transport") not in FILES:
                    self._failed.pop(message.actor, None)
                self._refused.pop(message.actor, None)
            case Event(kind=kind) if kind in FAILED and message.actor in self.all:
                member = self.all[message.actor]
                member.ordered = None
                member.answered(int(message.data.get("version", member.takes)))
                if kind != EventKind.WEIGHTS_REFUSED:
                    member.seat = None
                else:
                    member.refused = str(message.data.get("path", ""))
                    self._refused[message.actor] = (self._refused.get(message.actor, (0, 0.0))[0] + 1, now)
                if kind == EventKind.TRANSPORT_FAILED and message.data.get("transport") != NETWORK.name:
                    self._failed[message.actor] = (self._failed.get(message.actor, (0, 0.0))[0] + 1, now)

    def _hear(self, name: str, now: float) -> Member:
        if name not in self.all:
            was = self._silent.pop(name, None)
            self.all[name] = Member(heard=now, memory=was.memory, depot=was.depot) if was else Member(heard=now)
        member = self.all[name]
        member.heard = max(member.heard, now)
        return member

    def expire(self, now: float, *, unread_s: float = 0.0) -> None:
        """Leave out who has been silent for too long. `unread_s`: seconds in which nothing could be read, which count for
        nobody's silence."""
        for name, member in list(self.all.items()):
            member.heard += unread_s
            if now - member.heard > self._timeout_s:
                self._silent[name] = self.all.pop(name)
        for name in list(self._silent)[:-SILENT_KEPT]:
            del self._silent[name]
        for counts in (self._failed, self._refused):
            for name in [n for n, (_, at) in counts.items() if n not in self.all and now - at > ASIDE_S]:
                del counts[name]

    def unseat(self, names: Iterable[str]) -> None:
        """Do not send to them until they activated something."""
        for name in names:
            if name in self.all:
                self.all[name].seat = None

    def withdraw(self, version: int) -> None:
        """Orders to this version are void; their workers get new ones."""
        for member in self.all.values():
            if member.ordered is not None and member.ordered[0] == version:
                member.ordered = None

    def wanted(self, now: float) -> set[int]:
        """Versions that somebody was told to take, or may still be taking, however many are newer: a host that fetches over a slow
        link finds what it began with."""
        return {version for member in self.all.values() for version in member.wanted(now)}

    def overdue(self, now: float, deadline_s: float) -> list[tuple[str, int]]:
        """Workers that let an order's deadline pass, and its version; they take files next. No deadline runs while an engine
        boots."""
        found = []
        for name, member in sorted(self.all.items()):
            if member.ordered is None:
                continue
            version, at = member.ordered
            if Wait.of(member.waits) is Wait.BOOTING:
                member.ordered = (version, now)
            elif now - at > deadline_s:
                member.ordered, member.seat, member.late, member.takes = None, None, True, -1
                found.append((name, version))
        return found

    def able(self, transport: str, host: str, now: float) -> dict[str, Seat]:
        """Who can be sent a version by `transport` from `host`, by name."""
        aside = self.aside(now)
        seats = {name: m.seat for name, m in sorted(self.all.items()) if m.seat is not None and name not in aside}
        way = way_of(transport, self._own)
        return {} if way is None or way.whole else way.seats(seats, host)

    def aside(self, now: float) -> set[str]:
        """Workers that get files alone for now."""
        return {name for name, (times, at) in self._failed.items() if times >= STRIKES and now - at < ASIDE_S}

    def hopeless(self, now: float) -> set[str]:
        """Workers that refused REFUSALS files and one more in a row and get nothing for now."""
        return {name for name, (times, at) in self._refused.items() if times > REFUSALS and now - at < ASIDE_S}
