"""All that the doctor looks at, read at one go."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.file import stream_records
from actors.recorder.history import History, Step
from actors.recorder.records import records_of
from actors.runtime.host import is_stopped
from actors.runtime.snapshot import Snapshot, read_snapshot, readable
from bus import Bus, Entry
from bus.dead import prompt_of
from bus.inspect import Head, newest_heads, noted_entries, wall_of
from bus.knobs.live import read_history, values_at
from bus.ledger import LedgerCheck, check
from bus.messages.control import DeadLetter, Event
from bus.messages.events import EventKind
from bus.messages.policy import StepDone
from bus.server.checks import ServerFacts
from bus.streams.hop import id_key
from bus.topology import DEAD, EVENTS, POLICY, VERDICTS
from miles_async.console.places import EntryPlaces, read_places
from miles_async.governor.standing import GovernorStanding, read_standing

NEWS_S, MOST_DEAD = 600.0, 50
KINDS = (
    EventKind.RESTART,
    EventKind.ENGINE_STALLED,
    EventKind.ENGINE_BOOT_FAILED,
    EventKind.ENGINE_BOOT_REFUSED,
    EventKind.WEIGHTS_REFUSED,
    EventKind.TRANSPORT_FAILED,
    EventKind.CHECKPOINT_FAILED,
)
MOST: dict[str, int] = {**dict.fromkeys(KINDS, 100), EventKind.ACTIVATED: 8}
"""Kinds of events that a rule looks at, and how many of each at most: those of many workers would crowd out all others."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """`verdicts`: newest verdict heads, oldest first. `knobs`: live values, may be empty. `now`: the server's time.
    `uncommitted`: samples that were trained since the last checkpoint; they hold no credit but stay open until the next.
    `first_step`: metrics of the run's first training step, empty where unknown. `news`: events of the last NEWS_S, of
    each kind the newest few (MOST), oldest first, their `wall` the server's. `steps`: those that are still known, oldest
    first. `stopped`: silent actors of this host whose processes are stopped. `dead`: the newest, oldest first;
    `rows`: data set rows of those that name one. `record`: what metrics.jsonl says, bounded; None where it is not here."""

    snapshot: Snapshot
    places: EntryPlaces
    server: ServerFacts
    ledger: LedgerCheck
    verdicts: list[Head]
    dead: list[Head]
    knobs: Mapping[str, Any]
    uncommitted: frozenset[str]
    now: float
    lease_s: float
    stream_max_bytes: int
    first_step: Mapping[str, float | None] = {}
    news: Sequence[Event] = ()
    steps: Sequence[Step] = ()
    stopped: frozenset[str] = frozenset()
    rows: Sequence[str] = ()
    governor: GovernorStanding | None = None
    record: History | None = None

    @property
    def over(self) -> bool:
        """The trainer did its last step, or everything was stopped on purpose."""
        actors = self.snapshot.actors
        return self.snapshot.policy.finished or (bool(actors) and all(a.vitals.state == "stopped" for a in actors))


async def read_scene(
    bus: Bus, run_dir: Path | None = None, *, ledger: LedgerCheck | None = None, of_late: OfLate | None = None
) -> Scene:
    """One look at everything. The ledger check is exact; the rest may be a few milliseconds apart. `run_dir`: the run's
    folder where it is on this host; its metrics.jsonl still knows steps that the bus has trimmed. `ledger`: an audit that is
    recent enough for the one who looks; else another is made, which holds the server. `of_late`: of who looks again."""
    if ledger is None:
        ledger = await check(bus)
    snapshot, places, info, time = await asyncio.gather(read_snapshot(bus), read_places(bus), bus.server_info(), bus.server_time())
    of_late = of_late or OfLate()
    verdicts, dead, patches, (uncommitted, steps), news = await asyncio.gather(
        *(newest_heads(bus, VERDICTS, 2000), newest_heads(bus, DEAD, MOST_DEAD), read_history(bus)),
        *(of_late.read(bus), of_late.news(bus, time)),
    )
    first: Mapping[str, float | None] = {}
    record: History | None = None
    if run_dir is not None:
        first, past = await asyncio.to_thread(_recorded, run_dir)
        record, steps = past, past.steps if len(past.steps) > len(steps) else steps
    return Scene(
        snapshot=snapshot,
        places=places,
        server=ServerFacts.of(info),
        ledger=ledger,
        verdicts=verdicts,
        dead=dead,
        knobs=dict(values_at(patches, patches[-1].epoch).values) if patches else {},
        uncommitted=uncommitted,
        now=time,
        lease_s=bus.config.lease_s,
        stream_max_bytes=bus.config.stream_max_bytes,
        first_step=first,
        record=record,
        news=news,
        steps=steps,
        stopped=frozenset(a.vitals.actor for a in snapshot.actors if a.life == "late" and is_stopped(a.vitals)),
        rows=await _rows(bus) if dead else (),
        governor=await read_standing(bus),
    )


def _recorded(run_dir: Path) -> tuple[Mapping[str, float | None], History]:
    """Metrics of step 1 as it was last done (a run killed before its first checkpoint does it again), and the record, line by line:
    that of a week is larger than memory should hold."""
    first, history = None, History(bounded=True)
    for record in stream_records(run_dir):
        history.fold(record)
        if record["kind"] == "step" and record.get("step") == 1:
            first = record.get("metrics")
    return first if isinstance(first, dict) else {}, history


class OfLate:
    """Samples of the steps behind the newest checkpoint or restore, and the newest steps on the log (`read`); the newest events
    (`news`). Oldest first; read again each takes only what came since: a step's entry has all of its metrics."""

    def __init__(self, most: int = 1000) -> None:
        self._most, self._restarts, self._at = most, -1, "0"
        self._samples: set[str] = set()
        self._history = History()
        self._heard, self._heard_at = -1, "0"  # of events: `server_restarts`, and the entry looked at last
        self._events: dict[str, deque[Event]] = {}

    async def read(self, bus: Bus) -> tuple[frozenset[str], list[Step]]:
        """What there is by now."""
        entries: list[Entry] = []
        if self._restarts != bus.link.server_restarts or len(self._history.steps) > 2 * self._most:
            self._restarts, self._at = bus.link.server_restarts, "0"
            self._samples, self._history = set(), History()
            entries = (await bus.last(POLICY, self._most))[::-1]
        else:
            while page := await bus.scan(POLICY, start=f"({self._at}", count=self._most):
                self._at = page[-1].id
                entries += page
        for entry in entries:
            await self._take(bus, entry)
        return frozenset(self._samples), list(self._history.steps)

    async def _take(self, bus: Bus, entry: Entry) -> None:
        self._at = entry.id
        if entry.fields.get("type") not in ("policy.step", "policy.checkpointed", "policy.restored"):
            return
        message = await readable(bus, entry)
        if isinstance(message, StepDone):
            self._samples.update(message.samples)
        elif entry.fields["type"] != "policy.step":
            self._samples.clear()
        for record in records_of(entry, message):
            self._history.fold(record)

    async def news(self, bus: Bus, now: float) -> list[Event]:
        """Events of the last NEWS_S before `now`, by the server's clock; further back than the log reaches only those that were
        read before. A look takes 10 µs of the server for each entry that came since, most of them heartbeats, in short pages."""
        since_s = now - NEWS_S
        if self._heard != bus.link.server_restarts:
            self._heard, self._heard_at = bus.link.server_restarts, "0"
            self._events = {kind: deque(maxlen=most) for kind, most in MOST.items()}
        begin = max(self._heard_at, f"{int(since_s * 1000)}-0", key=id_key)
        entries, self._heard_at = await noted_entries(bus, EVENTS, MOST, after=begin)
        for entry in entries:
            event = await readable(bus, entry)
            if isinstance(event, Event) and event.kind in self._events:
                self._events[event.kind].append(msgspec.structs.replace(event, wall=wall_of(entry.id)))
        told = [event for events in self._events.values() for event in events if event.wall > since_s]
        return sorted(told, key=lambda event: event.wall)


async def _rows(bus: Bus) -> list[str]:
    """Prompts of the newest dead letters, as far as these hold them."""
    letters = [await readable(bus, entry) for entry in await bus.last(DEAD, MOST_DEAD)]
    return [prompt for one in letters if isinstance(one, DeadLetter) and (prompt := prompt_of(one))]
