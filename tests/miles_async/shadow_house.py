"""A bus user who may only look, as docs/security.md names it, and the keys that a run has."""

from __future__ import annotations

from pathlib import Path

from bus.client import connect
from bus.topology import STREAMS

OWN = {"state", "ledger", "bytes", "marks", "blob", "vitals", "heard", "open"} | {stream.name for stream in STREAMS}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"


async def a_user_who_may_only_read(url: str) -> str:
    """The address of the server as the user of the docs page, whose password is `secret`."""
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith("ACL SETUSER looker")]
    async with connect(url) as client:
        await client.execute_command(*line.replace("PASSWORD", "secret").split())
    return url.replace("unix://", "unix://looker@")
