"""A password on the command line: into the environment, and out of what other users of the host see in the process list.

Between the start of the process and this, some hundredths of a second, it could be read there; the environment or a file is better.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from miles_async.settings.secrets import take_password

_WORD = re.compile(r"(--[\w-]+=)?((?:rediss?|unix)://.*)", re.DOTALL)
_ARG_START, _ARG_END = (
    47,
    48,
)  # fields of /proc/self/stat, counted from 0 behind the command's name: 48 and 49 in proc(5)


def take_passwords(words: Sequence[str]) -> list[str]:
    """The words without the passwords of the bus addresses among them. An address that is none stays: its reader refuses it."""
    out = []
    for word in words:
        found = _WORD.fullmatch(word)
        out.append(f"{found[1] or ''}{_bare(found[2])}" if found else word)
    return out


def _bare(url: str) -> str:
    bare = take_password(url)
    if bare != url:
        _forget(url.encode())
    return bare


def _forget(word: bytes) -> None:
    """Overwrite a word of this process's own command line (Linux; elsewhere it stays)."""
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, end = int(fields[_ARG_START - 2]), int(fields[_ARG_END - 2])
    at = ctypes.string_at(start, end - start).find(word)
    if at >= 0:
        ctypes.memset(start + at, ord("*"), len(word))
