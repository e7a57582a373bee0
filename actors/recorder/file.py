"""runs/<name>/metrics.jsonl: one writer at a time, whole lines only, every entry of the bus at most once. And what all files of
lines share: what is no JSON object (cut short by a crash, damaged, changed by hand) is left out, never an error."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from bus.errors import UNREADABLE, MilesAsyncError

if TYPE_CHECKING:  # the bus is not loaded by who reads files alone
    from actors.recorder.records import Record

FILE = "metrics.jsonl"
BLOCK = 1 << 20
_ENTRY = re.compile(rb'"entry":"([a-z.]+)@([0-9]+-[0-9]+)"')


class MetricsBusy(MilesAsyncError):
    """Another process writes this file."""


def read_records(run_dir: Path) -> list[Record]:
    """All whole lines of the run's file, in order; none when there is no file. Lines that are no records are left out."""
    return list(stream_records(run_dir))


def stream_records(run_dir: Path) -> Iterator[Record]:
    """The same one by one: the file of a week is larger than memory should hold."""
    try:
        file = (run_dir / FILE).open("rb")
    except FileNotFoundError:
        return
    with file:
        yield from records_in(line for line in file if line.endswith(b"\n"))


def newest_entries(file: Path) -> dict[str, str]:
    """The id of the newest entry of each stream that the last BLOCK bytes of a file of lines name."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - BLOCK))
            tail = opened.read()
    except FileNotFoundError:
        return {}
    whole = tail[: tail.rfind(b"\n") + 1]
    return {name.decode(): at.decode() for name, at in _ENTRY.findall(whole)}  # in order: the last one stays


def objects(lines: Iterable[bytes]) -> Iterator[Record]:
    """Those lines that are JSON objects."""
    for line in lines:
        try:
            record = msgspec.json.decode(line)
        except UNREADABLE:
            continue
        if isinstance(record, dict):
            yield record


def records_in(lines: Iterable[bytes]) -> Iterator[Record]:
    """Those that are records."""
    return (record for record in objects(lines) if isinstance(record.get("kind"), str))


def append_lines(file: Path, records: Iterable[Record], *, older: Path, most_bytes: int) -> None:
    """Write whole lines; what is full becomes the older file, in place of the one before."""
    if file.exists() and file.stat().st_size > most_bytes:
        file.replace(older)
    with file.open("ab") as opened:
        _append(opened.fileno(), lines_of(records))


def _append(file: int, body: bytes) -> None:
    """All of it or, on a full disk, nothing: half a line would spoil the one behind it, and what was written is written again."""
    end = os.lseek(file, 0, os.SEEK_END)
    try:
        while body:
            body = body[os.write(file, body) :]
    except OSError:
        os.ftruncate(file, end)
        raise


def lines_of(records: Iterable[Record]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


class MetricsFile:
    """The open file. A line cut short by a crash is removed when it is opened; the lock goes with the process."""

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
        self._file.truncate(_whole(self._file))

    def append(self, records: list[Record]) -> None:
        """Write whole lines and hand them to the operating system."""
        if records:
            _append(self._file.fileno(), lines_of(records))

    def close(self) -> None:
        """Make it durable and release the lock."""
        os.fsync(self._file.fileno())
        self._file.close()


def _whole(file: BinaryIO) -> int:
    """Bytes up to the end of the last whole line, looked for from the end."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - BLOCK)
        file.seek(begin)
        at = file.read(end - begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0
