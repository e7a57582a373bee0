"""The file that says what a run began with: its form, and its reader. `began.py` writes and compares it.

Always true: a file that is missing, damaged or of an earlier release is a run of which nothing is known, and no error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bus.errors import UNREADABLE

FILE = "began.json"


class Began(msgspec.Struct, frozen=True, kw_only=True):
    """`since`: seconds since 1970. `values`: of the settings in KEPT. `contents`: digests of what lay under paths, by KEPT's names;
    empty = not there to be looked at. `revisions`: of what came from the Hub."""

    since: float
    values: dict[str, Any]
    contents: dict[str, str]
    revisions: dict[str, str] = {}


def read_began(folder: Path) -> Began | None:
    """None where a run never began, or one of an earlier release."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Began)
    except (OSError, *UNREADABLE):
        return None
