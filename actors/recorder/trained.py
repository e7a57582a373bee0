"""runs/<name>/trained.jsonl: one line for each sample that was trained or dropped by the filter; how one is found among very many.

A line that was cut short by a crash is closed before the next one. What a recorder wrote just before it was killed may stand twice.
Bounded: of two files the older one goes; together they have the newest half million samples or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from actors.recorder.file import BLOCK, append_lines, records_in

if TYPE_CHECKING:  # the bus is not loaded by who reads files alone
    from actors.recorder.records import Record

LIVES = ("trained", "dropped")  # kinds of its lines
FILE, OLDER = "trained.jsonl", "trained.1.jsonl"
MOST_BYTES = 128 << 20  # of each of the two files
LONGEST = 1 << 20  # of a line, bytes


def append_trained(run_dir: Path, records: Iterable[Record]) -> None:
    append_lines(run_dir / FILE, records, older=run_dir / OLDER, most_bytes=MOST_BYTES)


def last_trained(run_dir: Path) -> list[Record]:
    """The newest whole line about a trained sample, if the last LONGEST bytes have any; one that a crash cut short is closed."""
    try:
        with (run_dir / FILE).open("r+b") as file:
            file.seek(max(0, file.seek(0, 2) - LONGEST))
            *lines, rest = file.read().split(b"\n")
            if rest:
                file.write(b"\n")
    except FileNotFoundError:
        return []
    return next(([record] for record in records_in(reversed(lines)) if record["kind"] == "trained"), [])


def pages_with(file: Path, needles: Iterable[bytes], *, newest_first: bool = False) -> Iterator[list[Record]]:
    """Records of the lines that hold any of these bytes, each once, page by page, a page in order; nothing else is parsed, and no
    page is read that is not asked for."""
    needles = tuple(needles)
    try:
        opened = file.open("rb")
    except FileNotFoundError:
        return
    with opened:
        for block in _blocks_back(opened) if newest_first else _blocks(opened):
            starts = {block.rfind(b"\n", 0, at) + 1 for needle in needles for at in _places(block, needle)}
            yield list(records_in(block[start : block.find(b"\n", start)] for start in sorted(starts)))


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """A file in whole lines; sought in memory that was just read, which is quicker than in a mapped file."""
    while block := file.read(BLOCK):
        yield block + file.readline()


def _blocks_back(file: BinaryIO) -> Iterator[bytes]:
    """The same from the end of the file."""
    end, size = file.seek(0, 2), BLOCK
    while end > 0:
        begin = file.seek(max(0, end - size))
        block = file.read(end - begin)
        cut = block.find(b"\n") + 1 if begin else 0
        if begin and not 0 < cut < len(block):  # a line that is longer
            size *= 2
            continue
        yield block[cut:]
        end, size = begin + cut, BLOCK


def _places(block: bytes, needle: bytes) -> Iterator[int]:
    at = block.find(needle)
    while at >= 0:
        yield at
        end = block.find(b"\n", at)
        at = block.find(needle, end) if end >= 0 else -1
