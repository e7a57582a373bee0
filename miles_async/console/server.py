"""Facts about the Redis behind the bus that decide whether a run can go on: memory, persistence, role."""

from __future__ import annotations

import msgspec

from bus import Bus


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """From INFO. `max_memory` 0 = no limit of its own. `aof` empty = no append-only file, else `ok` or its error.
    `snapshot_ok`: the last one was written; a server with one that was not refuses writes, unless told otherwise."""

    software: str = "redis"
    version: str = ""
    used_memory: int = 0
    max_memory: int = 0
    eviction: str = "noeviction"
    role: str = "master"
    aof: str = ""
    snapshot_ok: bool = True

    @property
    def memory_share(self) -> float:
        """Used part of the limit, 0 without one."""
        return self.used_memory / self.max_memory if self.max_memory else 0.0


async def read_server(bus: Bus) -> ServerState:
    """Ask the server."""
    return parse_info(await bus.server_info())


def parse_info(text: str) -> ServerState:
    """The reply to INFO (pure)."""
    pairs = dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))
    aof = ""
    if pairs.get("aof_enabled", "0") != "0":
        aof = pairs.get("aof_last_write_status", "ok")
    return ServerState(
        software="valkey" if "valkey_version" in pairs else "redis",
        version=pairs.get("valkey_version", pairs.get("redis_version", "")),
        used_memory=_whole(pairs.get("used_memory")),
        max_memory=_whole(pairs.get("maxmemory")),
        eviction=pairs.get("maxmemory_policy", "noeviction"),
        role=pairs.get("role", "master"),
        aof=aof,
        snapshot_ok=pairs.get("rdb_last_bgsave_status", "ok") == "ok",
    )


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdigit() else 0
