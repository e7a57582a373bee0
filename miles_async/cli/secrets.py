"""A password on the command line: into the environment, and out of what other users of the host see in the process list.

Between the start of the process and this, some hundredths of a second, it could be read there; the environment or a file is better.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

from miles_async.settings.addresses import take_password

_WORD = re.compile(r"(--[\w-]+=)?((?:rediss?(?:\+sentinel)?|unix)://.*)", re.DOTALL)


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
    from actors.runtime.fork_server import words_at  # only now: few commands have a password to forget

    start, end = words_at()
    if not start:
        return
    at = ctypes.string_at(start, end - start).find(word)
    if at >= 0:
        ctypes.memset(start + at, ord("*"), len(word))
