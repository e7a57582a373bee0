"""The one fold of a run's logs: new entries become records, and records the history. Recorder and console both read here.

Reads  policy, eval.results, knobs, events, verdicts, dead (logs)    Writes  nothing
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec

from actors.recorder.history import History
from actors.recorder.records import RECORDED, Record, records_of
from actors.runtime.consume import STOPS
from actors.runtime.content import fault_of
from bus import Bus, Stream, Tail
from bus.errors import BadMessage
from bus.streams.hop import id_key


class Feed:
    """`history` has taken in everything that was given out. `unread`: told of each entry that is no message, or none that can be
    written down."""

    def __init__(
        self,
        bus: Bus,
        past: Iterable[Record] = (),
        *,
        unread: Callable[[str], None] = lambda _: None,
        streams: Sequence[Stream] = RECORDED,
    ) -> None:
        self._bus = bus
        self._unread = unread
        self._tail = Tail(bus, streams)
        self.history = History(bounded=True)
        self._heard = asyncio.Event()
        self._tail.positions = dict.fromkeys((stream.name for stream in streams), "0")
        for record in past:
            self.history.fold(record)
            stream, at, entry_id = str(record.get("entry", "")).partition("@")
            if at and id_key(entry_id) > id_key(self._tail.positions.get(stream, "0")):
                self._tail.positions[stream] = entry_id
        if self.history.left_out:
            unread(f"{self.history.left_out} lines of the record are not as this release writes them, and were left out")

    async def close(self) -> None:
        """Close the connection."""
        await self._tail.close()

    async def read(self, block_s: float) -> tuple[list[Record], bool]:
        """New records, folded already, and whether there were entries at all: where there were none within `block_s`, the
        logs have come to their end."""
        fresh: list[Record] = []
        entries = await self._tail.read(block_s)
        for entry in entries:
            try:
                message = await self._bus.message(entry)
                if fault := fault_of(message):
                    raise BadMessage(fault)
                made = records_of(entry, message)
                msgspec.json.encode(made)  # data of an event may be what JSON has not
            except STOPS:
                raise
            except Exception as error:  # noqa: BLE001 - a log is for all: no entry of it may end a reader
                self._unread(f"{entry.stream.name} {entry.id} not recorded: {type(error).__name__}: {error}"[:400])
                continue
            for record in filter(self.history.wants, made):
                if record["kind"] == "restored":
                    made_last = self.history.steps[-1].step if self.history.steps else 0
                    record["lost"] = list(range(record["step"] + 1, made_last + 1))
                self.history.fold(record)
                fresh.append(record)
        if fresh:
            self._heard.set()
            self._heard = asyncio.Event()
        return fresh, bool(entries)

    async def heard(self) -> None:
        """Wait until somebody has read more."""
        await self._heard.wait()
