"""The connection to a Ray cluster, and what it tells about its nodes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import AuthenticationError, RayError

from bus.errors import printable
from miles_async.settings.errors import SettingsError
from miles_async.settings.run import RunSettings

DIAL_S = 5.0
SETTINGS = b"\x04"  # type of a frame of HTTP/2
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0" + SETTINGS + b"\0\0\0\0\0"
log = logging.getLogger("ray cluster")


def connect(settings: RunSettings) -> None:
    """Become a driver on the cluster, in the main thread before the loop: Ray sets a handler of SIGTERM, and ours comes after.
    SettingsError, one line, when there is none, it is of another version, or the run's bus is out of its nodes' reach."""
    address = settings.launch.ray_address
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    said: list[str] = []
    try:
        with _held_back(said):
            namespace = f"miles_async-{settings.launch.name}"
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ConnectionError, ValueError, OSError, RayError) as error:
        text = " ".join(printable(str(error)).split())[:400]
        if isinstance(error, AuthenticationError) or any("InvalidAuthToken" in line for line in said):
            raise token_refused(address) from None
        cause = f" ({printable(said[-1])[-200:]})" if said else ""
        raise refused(address, f"cannot be joined: {text}{cause}") from None
    # What Ray says of nodes would go to the terminal, into the live view; the run says it itself.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    _check_bus(settings)


def refused(address: str, problem: str) -> SettingsError:
    """One line about a cluster that cannot be used."""
    remedy = "Give HOST:PORT of a head that runs (ray start --head), of the same Ray and Python, on one of its nodes."
    return SettingsError(problem, field="ray_address", value=address, remedy=remedy)


def token_refused(address: str) -> SettingsError:
    """One line about a cluster that does not take this host's token, or its lack of one."""
    has = "refuses the token of this host" if os.environ.get("RAY_AUTH_MODE") == "token" else "wants a token"
    remedy = "Set RAY_AUTH_MODE=token, and the cluster's own in RAY_AUTH_TOKEN or in the file that RAY_AUTH_TOKEN_PATH names."
    return SettingsError(f"the Ray cluster {has}", field="ray_address", value=address, remedy=remedy)


@contextmanager
def _held_back(said: list[str]) -> Iterator[None]:
    """Ray's core writes to the process's stderr, a line a second while it cannot join, and tells the cause nowhere else: it goes
    into `said`, and after a success to the terminal."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            file.seek(0)
            said += file.read(1 << 20).decode("utf-8", "replace").splitlines()
    for line in said:
        print(line, file=sys.stderr)


def check_address(address: str) -> None:
    """SettingsError at once where nobody listens: Ray would try for long."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("http://").removeprefix("https://").rstrip("/").rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise refused(address, "neither auto nor an address with a port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_S).close()
    except (OSError, OverflowError) as error:
        raise refused(address, f"does not answer: {getattr(error, 'strerror', None) or error}") from None


def check_head(address: str) -> None:
    """SettingsError where another server listens, Redis or the dashboard say: Ray would try it for minutes. A head speaks
    HTTP/2, and begins with its settings."""
    check_address(address)
    if address == "auto" or os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    host, _, port = address.rpartition(":")
    said = b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), DIAL_S) as connection:
            connection.sendall(HELLO)
            while len(said) < 9 and (more := connection.recv(9 - len(said))):
                said += more
    except OSError:
        pass
    if said[3:4] != SETTINGS:
        raise refused(address, f"is no head of a Ray cluster: it {f'answers {said!r}' if said else 'says nothing'}")


def _check_bus(settings: RunSettings) -> None:
    """A bus that only this host reaches is of no use to other nodes."""
    url = settings.bus.bus_url
    host = urlsplit(url or "").hostname or ""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host in ("localhost", "")
    addresses = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    if not url or url.startswith("unix:") or (local and len(addresses) > 1):
        what = "its address is of one host alone" if url else "a private Redis is of one host alone"
        raise SettingsError(
            f"{what}, and the Ray cluster has {len(addresses)}",
            field="bus_url",
            remedy="Start a Redis that they reach (docs/cluster.md) and give --bus-url redis://HOST:PORT.",
        )


async def nodes_of() -> list[dict[str, Any]]:
    """As ray.nodes() tells them."""
    return list(await asyncio.to_thread(ray.nodes))


async def living_nodes() -> set[str]:
    """Ids of those that answer: Ray itself finds out late that a node is gone, later than that of the actors on it."""
    nodes = [node for node in await nodes_of() if node["Alive"]]
    answers = await asyncio.gather(*map(_answers, nodes))
    return {str(node["NodeID"]) for node, answer in zip(nodes, answers, strict=True) if answer}


async def _answers(node: dict[str, Any]) -> bool:
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(node["NodeManagerAddress"], node["NodeManagerPort"])
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def has_gpus() -> bool:
    return bool((await asyncio.to_thread(ray.cluster_resources)).get("GPU"))


async def free_resources() -> dict[str, float]:
    return dict(await asyncio.to_thread(ray.available_resources))


async def draining_nodes() -> dict[str, str]:
    """Node -> why it is left; those that Ray drains. Empty where this Ray does not tell."""
    ask = getattr(ray._private.state.state, "get_draining_nodes", None)
    found = await asyncio.to_thread(ask) if ask is not None else {}
    return {node: f"node {node[:8]} is drained" for node in found}
