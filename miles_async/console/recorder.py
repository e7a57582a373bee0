"""Keeps a run's story on disk: follows the bus and writes metrics.jsonl.

Reads  policy, eval.results, knobs, events, verdicts, dead (logs)    Writes  nothing on the bus    Owns  metrics.jsonl
Started again it goes on behind the last line of each stream: no entry is written twice. A restore of the trainer is a
line of its own that names the lost steps; lines already written stay.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from bus import Bus, Entry, Tail
from bus.errors import BadMessage
from miles_async.console.history import History
from miles_async.console.metrics_file import MetricsFile, positions_of
from miles_async.console.records import RECORDED, Record, records_of

log = logging.getLogger("recorder")


class Recorder:
    """One per run, in the launcher."""

    def __init__(self, bus: Bus, run_dir: Path) -> None:
        self._bus = bus
        self._run_dir = run_dir
        self.history = History()
        self.written = 0

    async def follow(self, stop: asyncio.Event) -> None:
        """Until `stop`, and then whatever is already on the streams. Woken by the blocking read."""
        file = await asyncio.to_thread(MetricsFile, self._run_dir)
        tail = Tail(self._bus, RECORDED)
        try:
            known = positions_of(file.records)
            tail.positions = {stream.name: known.get(stream.name, "0") for stream in RECORDED}
            for record in file.records:
                self.history.fold(record)
            while not stop.is_set():
                await self._write(file, await tail.read(0.5))
            while entries := await tail.read(0.0):
                await self._write(file, entries)
            await self._write_ledger(file)
        finally:
            await tail.close()
            file.close()

    async def _write(self, file: MetricsFile, entries: list[Entry]) -> None:
        records: list[Record] = []
        for entry in entries:
            try:
                message = await self._bus.message(entry)
            except BadMessage as error:
                log.warning("%s not recorded: %s", entry.id, error)
                continue
            for record in records_of(entry, message):
                if record["kind"] == "restored":
                    record["lost"] = [s.step for s in self.history.steps if s.step > record["step"]]
                self.history.fold(record)
                records.append(record)
        file.append(records)
        self.written += len(records)
        if any(record["kind"] in ("checkpoint", "finished") for record in records):
            await self._write_ledger(file)

    async def _write_ledger(self, file: MetricsFile) -> None:
        small = await self._bus.snapshot()
        record: Record = {"kind": "ledger", "wall": self._bus.clock.wall(), "accounts": small.ledger}
        if small.ledger and small.ledger != self.history.ledger:
            self.history.fold(record)
            file.append([record])


__all__ = ("Recorder",)
