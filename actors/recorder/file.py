"""runs/<name>/metrics.jsonl: one writer at a time, whole lines only, every entry of the bus at most once."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from actors.recorder.records import Record
from bus.errors import MilesAsyncError

FILE = "metrics.jsonl"


class MetricsBusy(MilesAsyncError):
    """Another process writes this file."""


def read_records(run_dir: Path) -> list[Record]:
    """All whole lines of the run's file, in order; none when there is no file. Lines that are no records are left out."""
    try:
        data = (run_dir / FILE).read_bytes()
    except FileNotFoundError:
        return []
    return _parse(data[: data.rfind(b"\n") + 1])


def _parse(data: bytes) -> list[Record]:
    found: list[Record] = []
    for line in data.splitlines():
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            found.append(record)
    return found


class MetricsFile:
    """The open file, and the records that it had at open. A line cut short by a crash is removed then; the lock goes with the
    process."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / FILE
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise MetricsBusy(
                f"{self.path} is written by another process. End that recorder first, or choose another --name."
            ) from None
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        self.past = _parse(data[:whole])

    def append(self, records: list[Record]) -> None:
        """Write whole lines and hand them to the operating system."""
        if records:
            self._file.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
            self._file.flush()

    def close(self) -> None:
        """Make it durable and release the lock."""
        os.fsync(self._file.fileno())
        self._file.close()
