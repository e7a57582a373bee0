"""Redis with a replica and sentinels: what a failover does to the bus, on real servers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus import Bus, BusConfig, Commit, Entry, Out, Reader, Tail
from bus.client import PASSWORD, SENTINEL_PASSWORD, connect
from bus.errors import BusRefused, BusUnreachable
from bus.ledger import check
from bus.messages.control import Event
from bus.server.binary import ServerBinary, packaged_binary, probe
from bus.server.checks import check_server
from bus.streams.redis import LIFE
from bus.topology import EVENTS, PROMPTS, ROLLOUTS
from tests.bus.suite.conformance import ids_on, reader_of
from tests.bus.suite.messages import a_rollout, a_task, an_open_group
from tests.bus.test_rights import rights
from tests.failover import SECRET, SENTINEL_SECRET, Failover, failover


def server_of(kind: str) -> ServerBinary:
    path = shutil.which("redis-server") if kind == "redis" else packaged_binary()
    found = probe(Path(path)) if path else f"no {kind} here"
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(params=["redis", "valkey"])
def house(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Failover]:
    """Redis by TLS, with the user of docs/security.md; the packaged Valkey, which is built without TLS, in the clear."""
    monkeypatch.setenv(PASSWORD, SECRET)
    monkeypatch.setenv(SENTINEL_PASSWORD, SENTINEL_SECRET)
    with failover(server_of(request.param), rights=rights(SECRET), tls=request.param == "redis") as made:
        yield made


async def test_a_failover_loses_what_the_replica_had_not_heard_and_nothing_else(
    house: Failover, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await refusals(house, monkeypatch)
    async with connect(house.url) as client:
        assert (await check_server(client, url=house.url))[0].number >= (6, 2, 0)
    async with Bus(BusConfig(url=house.url, run=run_name, deadline_s=30.0)) as bus:
        reader, tail = await reader_of(bus, "a"), Tail(bus, [EVENTS], start="$")
        await tail.open()
        tasks = [a_task(n, n_samples=2) for n in range(2)]
        opened = {tasks[0].group_id: an_open_group(n_samples=2)}
        outs = [Out(PROMPTS, task) for task in tasks]
        await bus.commit(Commit(append=outs, open_groups=opened, ledger={"issued": 2}, state={LIFE: "a"}))
        bus.expect("a")
        first, second = await reader.read(4, 1.0)
        await done(bus, reader, first)
        await asyncio.to_thread(house.server(0).wait, 1, 5000)
        house.sever()
        await done(bus, reader, second)
        await say(bus, "lost")
        assert [e.fields["note"] for e in await tail.read(1.0)] == ["lost"]
        waiting = asyncio.create_task(reader.read(4, 3.0))
        await asyncio.to_thread(house.promote)
        await say(bus, "kept")
        assert bus.link.server_restarts == 1
        assert [e.fields["note"] for e in await tail.read(5.0)] == ["kept"]
        assert await ids_on(bus, ROLLOUTS) == ["g0000001/0"] and (await check(bus)).closes
        (again,) = await waiting or await reader.read(4, 5.0)
        assert again.id == second.id, "its result is lost, so it is work again"
        assert not (await bus.commit(Commit(ack=(first,)))).done
        await done(bus, reader, again)
        assert await ids_on(bus, ROLLOUTS) == ["g0000001/0", "g0000001/1"] and (await check(bus)).closes
        await reader.close()
        await tail.close()


async def done(bus: Bus, reader: Reader, entry: Entry) -> None:
    """Its sample is generated: on to the next stream."""
    task = await bus.message(entry)
    assert (await bus.commit(Commit(ack=(entry,), append=(Out(ROLLOUTS, a_rollout(task)),), ledger={"tokens/generated": 3}))).done
    reader.forget([entry])


async def say(bus: Bus, what: str) -> None:
    await bus.append([Out(EVENTS, Event(actor="a", kind=what, text="", wall=0.0))], repeatable=True)


async def refusals(house: Failover, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each."""

    async def text_of(url: str, kind: type[Exception]) -> str:
        async with connect(url) as client:
            with pytest.raises(kind) as refusal:
                await check_server(client, url=url)
        assert "\n" not in str(refusal.value) and SECRET not in str(refusal.value)
        return str(refusal.value)

    assert "names a primary 'hut' that is up" in await text_of(house.url.replace("/house", "/hut"), BusUnreachable)
    with monkeypatch.context() as without:
        without.setenv(SENTINEL_PASSWORD, "")
        assert SENTINEL_PASSWORD in await text_of(house.url, BusRefused)
    with pytest.raises(BusRefused, match="names no primary"):
        connect("redis+sentinel://127.0.0.1:26379")
