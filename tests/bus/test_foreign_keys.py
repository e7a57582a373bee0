"""Another program wrote into a key of the run: whoever meets it says which key in one line, and what to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.evaluator.schedule import Issued, is_under_way
from actors.sampler.actor import Position
from actors.trainer.checkpoint import acknowledged
from bus import Bus, BusConfig, Commit, Out, Reader, ledger
from bus.errors import Garbage, InvariantBroken
from bus.inspect import stream_facts
from bus.sweep import sweep_orphans
from bus.topology import PROMPTS
from miles_async.console.places import read_places
from tests.bus.suite.conformance import publish
from tests.bus.suite.messages import a_task

Meet = Callable[[Bus], Awaitable[Any]]


async def commits(bus: Bus) -> None:
    await bus.commit(Commit(append=(Out(PROMPTS, a_task()),), ledger={"issued": 1}, state={"f": "x"}, bounded=True))


async def reads(bus: Bus) -> None:
    await Reader(bus, [PROMPTS], "generation", "w").read(1, 0.0)


async def audits(bus: Bus) -> None:
    await ledger.check(bus)


HASHES: list[tuple[str, str, bytes, Meet]] = [
    ("open_groups", "x", b"\xc1", lambda bus: bus.open_groups()),
    ("open_groups", "x", b"", lambda bus: bus.open_groups()),
    ("open_groups", "x", b"\x93\x01\x02\x03", lambda bus: bus.open_group("x")),
    ("open_groups", "x", b"\xc1", lambda bus: bus.snapshot()),
    ("open_groups", "x", b"\xc1", audits),
    ("open_groups", "x", b"\xc1", lambda bus: read_places(bus)),
    ("ledger", "issued", b"many", lambda bus: ledger.read_accounts(bus)),
    ("ledger", "issued", b"many", lambda bus: bus.snapshot()),
    ("ledger", "issued", b"many", commits),
    ("state", "sampler", b"\xff", lambda bus: bus.state_as("sampler", Position.parse)),
    ("state", "eval", b"1:2", lambda bus: bus.state_as("eval", Issued.parse)),
    ("state", "eval.done", b"one", lambda bus: is_under_way(bus, Issued(version=1))),
    ("state", "saved", b"1.5", acknowledged),
    ("state", "version", b"v3", lambda bus: bus.next_number("version")),
    ("heard", "sampler", b"now", lambda bus: bus.silences()),
    ("in_flight_bytes", "", b"some", commits),
    ("in_flight_bytes", "", b"some", stream_facts),
]


@pytest.mark.parametrize(("key", "field", "value", "meet"), HASHES)
async def test_in_a_hash(redis_url: str, run_name: str, key: str, field: str, value: bytes, meet: Meet) -> None:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await bus.make_readers()
        name, field = getattr(bus.keys, key), field or bus.keys.stream(PROMPTS.name)
        await bus.link.run("HSET", name, field, value)
        with pytest.raises(Garbage) as met:
            await meet(bus)
        said = str(met.value)
        assert f"field {field[:80]!r} of key {name}" in said and f"redis-cli HDEL '{name}'" in said and "\n" not in said
        await bus.link.run("HDEL", name, field)
        await commits(bus)


KEYS: list[tuple[str, Meet]] = [
    *((key, commits) for key in ("state", "ledger", "in_flight_bytes")),
    *((key, lambda bus: bus.snapshot()) for key in ("state", "ledger", "open_groups")),
    ("open_groups", lambda bus: bus.open_group("x")),
    ("vitals", lambda bus: bus.vitals()),
    ("heard", lambda bus: bus.silences()),
    ("names", lambda bus: bus.names.holder_of("x")),
    ("", reads),
    ("", lambda bus: publish(bus, 1)),
]


@pytest.mark.parametrize(("key", "meet"), KEYS)
async def test_a_whole_key(redis_url: str, run_name: str, key: str, meet: Meet) -> None:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        name = getattr(bus.keys, key) if key else bus.keys.stream(PROMPTS.name)
        await bus.link.run("SET", name, "hello")
        with pytest.raises(Garbage) as met:
            await meet(bus)
        said = str(met.value)
        assert f"key {name} holds" in said and "it is a string, not a" in said and f"redis-cli DEL '{name}'" in said
        assert "\n" not in said


async def test_a_sweep_deletes_no_body_while_it_cannot_read_what_names_them(redis_url: str, run_name: str) -> None:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        ref = await bus.blobs.put(b"x" * 100)
        await bus.link.run("HSET", bus.keys.open_groups, "x", b"\xc1")
        with pytest.raises(InvariantBroken):
            await sweep_orphans(bus, older_s=0.0)
        assert await bus.blobs.get(ref) == b"x" * 100
