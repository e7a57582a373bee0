"""Looks at a Redis before a run trusts it, and refuses one that would lose entries.

Every refusal is one line: what, where, why, what to do. Passwords never appear in it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from bus.client import PASSWORD, PASSWORD_FILE, without_secrets
from bus.errors import BusRefused, BusUnreachable
from bus.server.binary import MINIMUM_VERSION

CHECK_DEADLINE_S = 10.0
_LEAVE_OUT = "or leave --bus-url out to run an embedded one"


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What INFO says of a server: `redis` or `valkey`, and what decides whether a run can begin or go on there. `max_memory` 0 = no
    limit of its own. `aof` empty = no append-only file, else `ok` or its error. `snapshot_ok`: the last one was written; a server
    with one that was not refuses writes, unless told otherwise."""

    software: str
    version: str
    used_memory: int
    max_memory: int
    eviction: str
    role: str
    aof: str
    snapshot_ok: bool
    in_cluster: bool

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ServerFacts:
        """From the reply to INFO, by name (pure)."""
        told = {name: str(value) for name, value in info.items()}
        used, most = (told.get(name, "") for name in ("used_memory", "maxmemory"))
        return cls(
            software="valkey" if "valkey_version" in told else "redis",
            version=told.get("valkey_version", told.get("redis_version", "")),
            used_memory=int(used) if used.isdecimal() else 0,
            max_memory=int(most) if most.isdecimal() else 0,
            eviction=told.get("maxmemory_policy", "noeviction"),
            role=told.get("role", "master"),
            aof=told.get("aof_last_write_status", "ok") if told.get("aof_enabled", "0") != "0" else "",
            snapshot_ok=told.get("rdb_last_bgsave_status", "ok") == "ok",
            in_cluster=told.get("cluster_enabled", "0") != "0",
        )

    @property
    def number(self) -> tuple[int, ...]:
        """Of its version, three parts."""
        parts = [int(part) for part in self.version.split(".")[:3] if part.isdecimal()]
        return tuple([*parts, 0, 0, 0][:3])

    @property
    def memory_share(self) -> float:
        """Used part of the limit, 0 without one."""
        return self.used_memory / self.max_memory if self.max_memory else 0.0


async def check_server(client: Redis, *, url: str, deadline_s: float = CHECK_DEADLINE_S) -> tuple[ServerFacts, tuple[str, ...]]:
    """Asks the server what it is and writes one probe key that expires. Sends nothing else. With warnings, single lines for the
    operator, none of them fatal.

    Raises BusUnreachable (nobody answers, or not in time) or BusRefused (version, eviction policy, role, rights).
    """
    where = without_secrets(url)
    try:
        async with asyncio.timeout(deadline_s):
            info: dict[str, Any] = await client.info("everything")
            facts = ServerFacts.of(info)
            warnings = (*judge(facts, where), *await _probe_writing(client, where))
    except AuthenticationError as error:
        raise _login_refused(where, error) from error
    except NoPermissionError as error:
        raise BusRefused(f"bus at {where} lacks rights: {error}. Allow this user +@all on keys ma:*.") from error
    except BusyLoadingError as error:
        raise BusUnreachable(f"bus at {where} is still loading its data. Try again in a moment.") from error
    except (RedisTimeoutError, TimeoutError) as error:
        raise BusUnreachable(
            f"bus unreachable at {where}: no answer within {deadline_s:g} s. Check host and port, {_LEAVE_OUT}."
        ) from error
    except (RedisConnectionError, OSError) as error:
        if isinstance(error.__cause__, AuthenticationError) or "username-password" in str(error):
            raise _login_refused(where, error) from error
        raise BusUnreachable(
            f"bus unreachable at {where}: {_why(error)}. Start a Redis there, correct --bus-url, {_LEAVE_OUT}."
        ) from error
    except RedisError as error:
        raise BusRefused(
            f"{where} does not answer like a Redis: {_line(error)}. Point --bus-url at a Redis or Valkey 6.2 or newer."
        ) from error
    return facts, warnings


def judge(facts: ServerFacts, where: str) -> Iterator[str]:
    """Warnings; raises BusRefused when the server is not fit (pure)."""
    if facts.number < MINIMUM_VERSION:
        raise BusRefused(
            f"bus at {where} is {facts.software} {'.'.join(map(str, facts.number))}: 6.2 or newer is needed for claiming abandoned "
            f"entries. Upgrade it, {_LEAVE_OUT}."
        )
    for why in unfit(facts.role, facts.eviction).values():
        raise BusRefused(f"bus at {where} {why}.")
    if not facts.aof:
        yield (
            f"bus at {where} keeps no append-only file: entries since its last snapshot are lost if it crashes. "
            "Set appendonly yes there."
        )
    if facts.in_cluster:
        yield f"bus at {where} is a cluster node: the run works only if this node owns the run's slot."


def unfit(role: str, eviction: str) -> dict[Literal["role", "eviction"], str]:
    """Why a server takes no entries or would lose some, each with its remedy: nothing begins there, and a run that is there already
    is told (pure)."""
    found: dict[Literal["role", "eviction"], str] = {}
    if role not in ("master", "primary"):
        found["role"] = f"is a {role}: it takes no writes. Point --bus-url at its primary"
    if eviction != "noeviction":
        remedy = "Run CONFIG SET maxmemory-policy noeviction there and keep it in redis.conf"
        found["eviction"] = f"has maxmemory-policy {eviction}: it would evict unread entries. {remedy}"
    return found


async def _probe_writing(client: Redis, where: str) -> tuple[str, ...]:
    """Writes and deletes one key from a script, as every hop will. A full server is a warning: it can still drain."""
    key = f"ma:{{probe}}:{secrets.token_hex(8)}"
    script = "redis.call('SET', KEYS[1], '1', 'PX', 10000) return redis.call('DEL', KEYS[1])"
    try:
        await client.eval(script, 1, key)
    except (ReadOnlyError, NoPermissionError, AuthenticationError):
        raise
    except ResponseError as error:  # OutOfMemoryError is one
        if "OOM" in str(error) or "maxmemory" in str(error):
            return (f"bus at {where} is at its maxmemory: producers wait until it drains. Raise maxmemory there.",)
        raise BusRefused(
            f"bus at {where} refuses writes: {_line(error)}. Free its disk or lift the restriction, {_LEAVE_OUT}."
        ) from error
    return ()


def _login_refused(where: str, error: BaseException) -> BusRefused:
    return BusRefused(
        f"bus at {where} refused the login: {_line(error)}. Put the user into --bus-url (redis://user@host/0) and the "
        f"password into the variable {PASSWORD}, or into a file that {PASSWORD_FILE} names."
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


def _why(error: BaseException) -> str:
    """The cause in words; redis-py wraps the operating system's error, which says it best."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return tls_failure(cause)
        if isinstance(cause, OSError) and cause.strerror:  # asyncio's own text repeats the address; errno is plain
            number = cause.errno or 0
            return os.strerror(number) if number > 0 else cause.strerror
        cause = cause.__cause__ or cause.__context__
    return _line(error)


def tls_failure(error: ssl.SSLError) -> str:
    """What is wrong with a certificate, or that there is no TLS; its number reads as one of the operating system's and is none."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message.rstrip(".") or _line(error)
        return f"TLS failed: {said}; its certificate must name that host and be signed by who is in ssl_ca_certs"
    return f"TLS failed ({error.reason or _line(error)}); rediss:// needs a TLS port and a trusted certificate"
