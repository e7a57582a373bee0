"""A Redis whose host's clock is set, forth or back: leases are times of that clock."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio

from bus import Bus, BusConfig
from bus.server import EmbeddedRedis
from tests.bus.suite.conformance import publish, reader_of
from tests.miles_async.console_data import vitals
from tests.warm.launched import clock_of

LEASE_S, DAY_S = 600.0, 86400.0


class Server:
    """One with a clock of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._file, self.url = folder / "skew", url

    def set_clock(self, ahead_s: float) -> None:
        """Of this machine's."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", int(ahead_s)))


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    with TemporaryDirectory(prefix="ma-test-") as name:
        folder = Path(name)
        if not (library := clock_of(folder)).exists():
            pytest.skip("no compiler for a clock of its own")
        (folder / "skew").write_bytes(bytes(8))
        embedded = EmbeddedRedis(folder)
        with monkeypatch.context() as patched:
            patched.setenv("LD_PRELOAD", str(library))
            patched.setenv("MA_SKEW_FILE", str(folder / "skew"))
            await asyncio.to_thread(embedded.start)
        try:
            yield Server(folder, embedded.url)
        finally:
            await asyncio.to_thread(embedded.stop)


async def test_set_forth_it_ends_no_lease_of_the_living(server: Server, run_name: str) -> None:
    """However many they hold: peers see the step before they claim, and from then on the leases count anew."""
    async with Bus(BusConfig(url=server.url, run=run_name)) as bus:
        await publish(bus, 1200)
        living, peer = await reader_of(bus, "living"), await reader_of(bus, "peer")
        assert len(await living.read(1200, 0)) == 1200
        assert await peer.clock_step(LEASE_S) == 0.0
        server.set_clock(DAY_S)
        assert await peer.clock_step(LEASE_S) == pytest.approx(DAY_S, abs=LEASE_S / 4)
        assert await peer.claim(LEASE_S) == [], "living work was taken away"
        assert await peer.clock_step(LEASE_S) == 0.0, "it was set once"
        server.set_clock(DAY_S + 2 * LEASE_S)  # before anybody looks: a step that is not seen ends them
        assert len(await peer.claim(LEASE_S, 5)) == 5
        for reader in (living, peer):
            await reader.close()


async def test_set_back_it_keeps_no_lease_of_the_dead(server: Server, run_name: str) -> None:
    """Which lay there for as long as it was set back by."""
    async with Bus(BusConfig(url=server.url, run=run_name)) as bus:
        await publish(bus, 3)
        dead, peer = await reader_of(bus, "dead"), await reader_of(bus, "peer")
        held = await dead.read(3, 0)
        await dead.close()
        assert await peer.clock_step(1.0) == 0.0
        server.set_clock(-2 * DAY_S)
        assert await peer.clock_step(1.0) == pytest.approx(-2 * DAY_S, abs=60)
        found: list[str] = []
        async with asyncio.timeout(15):
            while len(found) < 3:
                found += [entry.id for entry in await peer.claim(0.2)]
        assert found == [entry.id for entry in held]
        await peer.close()


async def test_a_step_of_less_than_half_a_lease_is_none(server: Server, run_name: str) -> None:
    """And a stream that is not there yet holds nothing."""
    async with Bus(BusConfig(url=server.url, run=run_name)) as bus:
        peer = await reader_of(bus, "peer")
        await bus.link.run("DEL", *(bus.keys.stream(stream.name) for stream in peer.streams))
        assert await peer.clock_step(LEASE_S) == 0.0
        server.set_clock(0.4 * LEASE_S)
        assert await peer.clock_step(LEASE_S) == 0.0
        server.set_clock(LEASE_S)
        assert await peer.clock_step(LEASE_S) == pytest.approx(0.6 * LEASE_S, abs=0.05 * LEASE_S)
        await peer.close()


async def test_who_was_heard_before_it_was_set_back_is_not_taken_for_living(server: Server, run_name: str) -> None:
    async with Bus(BusConfig(url=server.url, run=run_name)) as bus:
        said = vitals("filter")
        await bus.set_vitals("filter", said)
        server.set_clock(-DAY_S)
        assert (await bus.silences())["filter"] == pytest.approx(DAY_S, abs=60)
        await bus.set_vitals("filter", said)
        assert (await bus.silences())["filter"] < 60
