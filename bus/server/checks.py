"""Looks at a Redis before a run trusts it, and refuses one that would lose entries.

Every refusal is one line: what, where, why, what to do. Passwords never appear in it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
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


class ServerFacts(msgspec.Struct, frozen=True):
    """What start-up learned about a server. `warnings` are single lines for the operator; none of them is fatal."""

    url: str  # without password
    software: str  # "redis" or "valkey"
    version: tuple[int, int, int]
    append_only: bool
    max_memory_bytes: int  # 0 = no limit
    warnings: tuple[str, ...] = ()


async def check_server(client: Redis, *, url: str, deadline_s: float = CHECK_DEADLINE_S) -> ServerFacts:
    """Asks the server what it is and writes one probe key that expires. Sends nothing else.

    Raises BusUnreachable (nobody answers, or not in time) or BusRefused (version, eviction policy, role, rights).
    """
    where = without_secrets(url)
    try:
        async with asyncio.timeout(deadline_s):
            info: dict[str, Any] = await client.info("everything")
            facts = judge(info, url=url)
            warning = await _probe_writing(client, where)
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
    return msgspec.structs.replace(facts, warnings=facts.warnings + warning)


def judge(info: dict[str, Any], *, url: str) -> ServerFacts:
    """Facts from the reply to INFO; raises BusRefused when the server is not fit (pure)."""
    where = without_secrets(url)
    software = "valkey" if "valkey_version" in info else "redis"
    version = _version(str(info.get("valkey_version", info.get("redis_version", ""))))
    dotted = ".".join(map(str, version))
    if version < MINIMUM_VERSION:
        raise BusRefused(
            f"bus at {where} is {software} {dotted}: 6.2 or newer is needed for claiming abandoned entries. "
            f"Upgrade it, {_LEAVE_OUT}."
        )
    for why in unfit(str(info.get("role", "master")), str(info.get("maxmemory_policy", "noeviction"))).values():
        raise BusRefused(f"bus at {where} {why}.")
    max_memory = int(info.get("maxmemory", 0))
    append_only = bool(int(info.get("aof_enabled", 0)))
    warnings: list[str] = []
    if not append_only:
        warnings.append(
            f"bus at {where} keeps no append-only file: entries since its last snapshot are lost if it crashes. "
            "Set appendonly yes there."
        )
    if int(info.get("cluster_enabled", 0)):
        warnings.append(f"bus at {where} is a cluster node: the run works only if this node owns the run's slot.")
    return ServerFacts(
        url=where,
        software=software,
        version=version,
        append_only=append_only,
        max_memory_bytes=max_memory,
        warnings=tuple(warnings),
    )


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


def _version(text: str) -> tuple[int, int, int]:
    numbers = [int(part) for part in text.split(".")[:3] if part.isdigit()]
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch


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
