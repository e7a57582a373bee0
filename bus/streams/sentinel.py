"""A primary that sentinels name: it is asked for at each dialling, so that a connection lost in a failover finds its successor."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, NoPermissionError

SUFFIX = "+sentinel"
PORT = 26379
ANSWER_S = 1.0  # of one sentinel; then the next is asked


def divided(url: str) -> tuple[str, dict[str, Any]]:
    """(the same address with one host, as redis-py reads it; the sentinels and the primary's name as options of a connection) from
    `redis+sentinel://[LOGIN@]HOST[:PORT][,HOST[:PORT]...]/NAME[/DB][?OPTIONS]`. ValueError when a part is missing."""
    scheme, _, rest = url.partition(f"{SUFFIX}://")
    place, question, query = rest.partition("?")
    authority, _, path = place.partition("/")
    login, at, hosts = authority.rpartition("@")
    name, _, db = path.partition("/")
    if not hosts or not name:
        raise ValueError("it names no primary")
    sentinels = []
    for one in hosts.split(","):
        host, colon, port = one.rpartition(":") if not one.endswith("]") else (one, "", "")
        sentinels.append(((host if colon else one).strip("[]"), int(port) if colon else PORT))
    kind = SentinelTLS if scheme == "rediss" else SentinelTCP
    options = {"connection_class": kind, "sentinels": tuple(sentinels), "primary": unquote(name)}
    return f"{scheme}://{login}{at}sentinel/{db}{question}{query}", options


class _Found(Connection):
    """Dials the primary. `sentinel_login`: what the sentinels themselves ask for."""

    def __init__(
        self, *, sentinels: tuple[tuple[str, int], ...], primary: str, sentinel_login: dict[str, Any], **options: Any
    ) -> None:
        self._sentinels, self._primary, self._login = sentinels, primary, sentinel_login
        super().__init__(redis_connect_func=_greet, **options)

    async def _connect(self) -> None:
        bounds = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S, "retry": Retry(NoBackoff(), 0)}
        asked = Sentinel(self._sentinels, sentinel_kwargs={**self._login, **bounds})  # type: ignore[no-untyped-call]
        try:
            self.host, self.port = await asked.discover_master(self._primary)
        except NoPermissionError as error:
            raise AuthenticationError(f"a sentinel says {error}") from error
        except MasterNotFoundError as error:
            if "Authentication" in str(error):  # of which it makes a connection that failed
                raise AuthenticationError("a sentinel wants the password of MILES_ASYNC_SENTINEL_PASSWORD") from None
            hosts = ", ".join(f"{host}:{port}" for host, port in self._sentinels)
            raise ConnectionError(f"no sentinel of {hosts} names a primary {self._primary!r} that is up") from None
        finally:
            await asked.aclose()
        await super()._connect()  # type: ignore[no-untyped-call]


async def _greet(connection: Any) -> None:
    """Sentinels may be late: a server that was demoted takes no writes, and what it lets read is old."""
    await connection.on_connect()
    await connection.send_command("INFO", "replication", check_health=False)
    if b"role:master" not in await connection.read_response():
        raise ConnectionError(f"{connection.host}:{connection.port} is no primary any more; a failover is under way")


class SentinelTCP(_Found):
    """To Redis and its sentinels in the clear."""


class SentinelTLS(_Found, SSLConnection):
    """To both by TLS, with the same options."""

    def __init__(self, *, sentinel_login: dict[str, Any], **options: Any) -> None:
        tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
        super().__init__(sentinel_login={**sentinel_login, "ssl": True, **tls}, **options)
