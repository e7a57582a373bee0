"""What is done for readers whose process cannot: their leases kept or let go, and the deaths that a piece of work has caused.

Keys  deaths: hash `n/<name>` -> deaths, `why/<name>` -> cause of the last one; it expires WEEK_S after the last death.
Always true: a death is counted before its entry can be given to anybody else.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.errors import InvariantBroken
from bus.streams.hop import text_of
from bus.streams.redis import Bus

WEEK_S = 7 * 86400
PAGE = 500


Held = dict[tuple[str, str], int]
"""Stream and id of what is pending under a name -> its deliveries."""


async def held_by(bus: Bus, streams: Sequence[str], readers: str, me: str) -> Held:
    """All that is pending under this name."""
    found: Held = {}
    for stream in streams:
        start = "-"
        while True:
            try:
                rows = await bus.link.run("XPENDING", bus.keys.stream(stream), readers, start, "+", PAGE, me)
            except InvariantBroken as error:
                if "NOGROUP" not in str(error):
                    raise
                break
            found |= {(stream, text_of(row[0])): int(row[3]) for row in rows}
            if len(rows) < PAGE:
                break
            start = f"({text_of(rows[-1][0])}"
    return found


async def keep_leases(bus: Bus, held: Held, readers: str, me: str) -> None:
    """Renew them, for a process that is about to be ended, or goes on."""
    for stream, entry_id in held:
        await bus.link.run("XCLAIM", bus.keys.stream(stream), readers, me, 0, entry_id, "JUSTID")


async def let_go(bus: Bus, held: Held, readers: str, me: str, *, blamed: tuple[str, str] = ("", "")) -> None:
    """Of a process that has ended: whoever asks next gets what it held, without waiting for the leases to end. If `blamed` is one
    of them, the death was a delivery of that alone."""
    idle_ms = int(bus.config.lease_s * 1000) + 1
    for (stream, entry_id), deliveries in held.items():
        spared = blamed in held and (stream, entry_id) != blamed
        # Not below 1: who is given it must look for what a former holder has saved.
        count = max(1, deliveries - 1) if spared else deliveries
        key = bus.keys.stream(stream)
        await bus.link.run(*("XCLAIM", key, readers, me, 0, entry_id), *("IDLE", idle_ms, "RETRYCOUNT", count, "JUSTID"))


async def count_death(bus: Bus, name: str, why: str) -> int:
    """A piece of work has ended the process that it was in; how many it has ended by now."""
    key = bus.keys.deaths
    await bus.link.run("HSET", key, f"why/{name}", why)
    n = int(await bus.link.run("HINCRBY", key, f"n/{name}", 1))
    await bus.link.run("EXPIRE", key, WEEK_S)
    return n


async def deaths_of(bus: Bus, name: str) -> tuple[int, str]:
    """How many processes a piece of work has ended, and why the last one."""
    key = bus.keys.deaths
    if not (n := await bus.link.run("HGET", key, f"n/{name}")):
        return 0, ""
    return int(n), text_of(await bus.link.run("HGET", key, f"why/{name}") or b"")


async def forget_deaths(bus: Bus, name: str) -> None:
    """It is a dead letter; retried, it begins anew."""
    await bus.link.run("HDEL", bus.keys.deaths, f"n/{name}", f"why/{name}")
