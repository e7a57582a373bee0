"""Files that a Redis server appends to, as a crash of its machine may leave them.

Reads and cuts `appendonlydir` of a server's folder, while no server has it. What is left is what the server held at one earlier
instant, or it is not started.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bus.errors import BusRefused

FOLDER, MANIFEST = "appendonlydir", "appendonly.aof.manifest"
DAMAGED = "Move the folder redis of the run away: the train command then goes on from its newest checkpoint."
LINE = re.compile(r"file (\S+) seq (\d+) type ([bhi])")  # and what else a newer release may say
SAYS_SO = re.compile(r"Bad file format|AOF manifest|the AOF file|RDB|[Uu]nexpected (?:EOF|end of file)|Short read")
"""In a line of a server that ends because of its files (Redis 7 and 8, Valkey)."""
_PART = 1 << 16


def shorten(home: Path) -> None:
    """Take zeros from the end of the file that was written last: blocks that a file system gave it before a power cut, and whose
    content did not come. A command ends in a line break, so none of them is part of one; what they cut off in the middle the server
    itself leaves out. BusRefused for a base that is empty: a server would take what came after it for all."""
    folder = home / FOLDER
    try:
        found = LINE.findall((folder / MANIFEST).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return  # of a server that has not begun; else it begins empty, which is seen
    for name, _, kind in found:
        file = folder / name
        if kind == "b" and file.name == name and file.exists() and not file.stat().st_size:
            raise BusRefused(f"{file} is empty, and it is what a server begins with. Its file is damaged. {DAMAGED}")
    last = max(((int(number), name) for name, number, kind in found if kind == "i"), default=None)
    if last is None or not (file := folder / last[1]).is_file():
        return
    size, kept = file.stat().st_size, _without_zeros(file)
    if kept < size:
        os.truncate(file, kept)
        with (home / "redis.log").open("a", encoding="utf-8") as log:
            log.write(f"miles-async: {size - kept} bytes of zeros were cut off from the end of {file.name} (a power cut?)\n")


def _without_zeros(path: Path) -> int:
    """Bytes before the zeros at its end."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _PART)
            file.seek(begin)
            part = file.read(end - begin).rstrip(b"\0")
            if part:
                return begin + len(part)
            end = begin
    return 0


def damage_in(log: Path, since: int) -> str:
    """The line with which a server refuses its files, of what it said since so many bytes; empty if it did not."""
    with log.open("rb") as file:
        file.seek(since)
        lines = file.read(1 << 20).decode("utf-8", "replace").split("\n")
    warnings = [line.strip().rstrip(".") for line in lines if " # " in line and SAYS_SO.search(line)]
    return warnings[-1] if warnings else ""
