"""The one way to a server: its address without secrets, its password, and a client with what delivery relies on.

A run's password is only in the environment of its processes or in a file of the user's: settings move one that came inside a URL
there (miles_async/settings/addresses.py), so that no file, log, error or command line of a run can hold it.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from bus.errors import BusRefused
from bus.streams import sentinel

try:
    from redis.driver_info import DriverInfo
except ImportError:  # an older redis-py
    _DRIVER: dict[str, Any] = {}
else:
    # Once: a connection that makes its own reads redis-py's metadata from disk for it.
    _DRIVER = {"driver_info": DriverInfo()}

SCHEMES = ("redis", "rediss", "unix", f"redis{sentinel.SUFFIX}", f"rediss{sentinel.SUFFIX}")
PASSWORD, PASSWORD_FILE = "MILES_ASYNC_BUS_PASSWORD", "MILES_ASYNC_BUS_PASSWORD_FILE"  # variables of the environment
SENTINEL_PASSWORD = "MILES_ASYNC_SENTINEL_PASSWORD"  # the same of the sentinels, and with _FILE
CONNECT_DEADLINE_S = 5.0  # with TLS
DIAL_S = 2.0  # without: TCP asks after 0, 1, 3 and 7 s, so who asked in vain is sooner heard when he asks anew
SILENT_S = 6  # of a peer's kernel: a paused server's answers all the same


def without_secrets(url: str) -> str:
    """The URL with user and password hidden and its query dropped, fit for messages."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    if not separator:
        scheme, rest = "", url
    authority, slash, path = rest.partition("/") if scheme == "unix" else (rest, "", "")
    login, at, host = authority.rpartition("@")  # a password may hold a slash or an @ that should have been quoted
    if not at and scheme != "unix" and "@" in url:  # or a question mark
        login, at, host = "?", "@", url.rpartition("@")[2]
    return f"{scheme}{separator}{'***' if login else ''}{at}{host}{slash}{path}"


def connect(url: str) -> Redis:
    """A client for an address of one of SCHEMES, with nothing dialled yet.

    A URL without a password gets the one of the environment; a unix socket only where the URL names a user, because the server of
    a run on its own socket has none. No socket timeout and no silent retry: a repeated command whose outcome is unknown would
    append twice, so deadlines and repetition belong to the caller. Replies are bytes (RESP2). Raises BusRefused.
    """
    options = _options(url)
    if not options.get("password") and (options.get("username") or not url.startswith("unix:")):
        options["password"] = _password(PASSWORD) or None
    # Ours last: an option in the URL's query must not undo what delivery relies on.
    options.update(
        protocol=2,
        decode_responses=False,
        socket_timeout=None,
        socket_connect_timeout=DIAL_S if url.startswith("redis:") else CONNECT_DEADLINE_S,
        health_check_interval=0,
        retry=Retry(NoBackoff(), 0),
        **_DRIVER,
    )
    if not url.startswith("unix:"):
        options.update(socket_keepalive=True, socket_keepalive_options=_soon_dead())
    pool: Any = ConnectionPool(**options)
    try:
        pool.make_connection()  # dials nothing: it refuses options that no connection has
    except (ValueError, TypeError) as error:
        raise BusRefused(f"bus URL {without_secrets(url)!r} refused: {error}. Correct --bus-url.") from error
    return Redis.from_pool(pool)


def _soon_dead() -> dict[int, int]:
    """Options of TCP with which a connection whose network is gone ends after SILENT_S. By itself TCP tries again at doubled
    pauses, and would notice a link that is back only after as long as it was away."""
    names = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENT_S - 3, "TCP_USER_TIMEOUT": 1000 * SILENT_S}
    return {getattr(socket, name): value for name, value in names.items() if hasattr(socket, name)}


def _options(url: str) -> dict[str, Any]:
    scheme, given = url.partition("://")[0], url
    if scheme not in SCHEMES or "://" not in url:
        raise BusRefused(
            f"bus URL {without_secrets(url)!r} refused: its scheme must be one of {', '.join(SCHEMES)}. "
            "Write e.g. redis://host:6379/0 or unix:///path/redis.sock, or leave --bus-url out to run an embedded one."
        )
    try:
        named: dict[str, Any] = {}
        if scheme.endswith(sentinel.SUFFIX):
            given, named = sentinel.divided(url)
            named["sentinel_login"] = {"password": _password(SENTINEL_PASSWORD) or None}
        options: dict[str, Any] = {**parse_url(given), **named}
        if named:
            options.pop("host", None)
    except (ValueError, TypeError) as error:
        if scheme.endswith(sentinel.SUFFIX):
            raise BusRefused(
                f"bus URL {without_secrets(url)!r} refused: it names no primary or no sentinel. Write "
                f"{scheme}://HOST:PORT,HOST:PORT,HOST:PORT/NAME/0."
            ) from error
        raise BusRefused(
            f"bus URL {without_secrets(url)!r} refused: it is no address of a Redis. Correct --bus-url; what stands in its "
            f"login is percent-encoded, or the password is given in {PASSWORD}."
        ) from error
    if scheme == "unix" and not options.get("path"):
        raise BusRefused(f"bus URL {without_secrets(url)!r} refused: it names no socket. Write unix:///absolute/path/redis.sock.")
    return options


def _password(variable: str) -> str:
    if os.environ.get(variable):
        return os.environ[variable]
    variable = f"{variable}_FILE"
    name = os.environ.get(variable, "")
    if not name:
        return ""
    try:
        with Path(name).open() as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRGRP | stat.S_IROTH):
                raise BusRefused(f"{variable}={name} refused: other users can read that file. chmod 600 it.")
            return file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BusRefused(f"{variable}={name} cannot be read: {error}. Correct the path.") from error
