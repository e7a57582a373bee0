"""A rollout worker and entries that will never work: buried with a letter, and their group still closes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from bus import Bus, Commit
from bus.messages.active import Activate
from bus.messages.groups import OpenGroup
from bus.messages.policy import WeightManifest
from bus.messages.samples import PrefixDropped, RolloutDone, RolloutLost
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, DEAD, PREFIXES, PROMPTS, ROLLOUTS
from tests.actors.house import messages, open_bus, put, until
from tests.engine.scripted import ScriptedEngine, sample, workers

GOOD = "good"


@asynccontextmanager
async def serving(redis_url: str, run_name: str, *names: str) -> AsyncIterator[tuple[Bus, Any]]:
    """A worker that is about to serve; groups of one sample that the run lists as open."""
    async with open_bus(redis_url, run_name) as bus:
        opened = {name: OpenGroup(group_id=name, prompt_id=name, n_samples=1) for name in (*names, GOOD)}
        await bus.commit(Commit(open_groups={name: msgspec.msgpack.encode(group) for name, group in opened.items()}))

        async def begin() -> list[Any]:
            """Give it a version and a good sample; what it says once that is done."""
            await put(bus, PROMPTS, sample(GOOD, 0))
            await put(bus, ACTIVE, Activate(version=PolicyVersion(1, 0), manifest=WeightManifest()))

            async def all_there() -> bool:
                return await bus.length(ROLLOUTS) == len(names) + 1

            await until(all_there)
            return await messages(bus, ROLLOUTS)

        async with workers(bus, [ScriptedEngine()]):
            yield bus, begin
            assert await bus.length(PROMPTS) == await bus.length(PREFIXES) == 0, "nothing is left to be taken again and again"


def lost(rollouts: list[Any]) -> set[str]:
    assert [m.finish for m in rollouts if isinstance(m, RolloutDone)] == ["length"], "the good one goes on beside"
    return {m.sample_id for m in rollouts if isinstance(m, RolloutLost)}


async def test_what_killed_its_workers_again_and_again_is_buried(redis_url: str, run_name: str) -> None:
    async with serving(redis_url, run_name, "bad") as (bus, begin):
        await put(bus, PROMPTS, sample("bad", 0))
        key, most = bus.keys.stream(PROMPTS.name), bus.config.max_deliveries
        await bus.link.run("XREADGROUP", "GROUP", "generation", "w0", "STREAMS", key, ">")
        [entry] = await bus.scan_all(PROMPTS)
        await bus.link.run("XCLAIM", key, "generation", "w0", 0, entry.id, "RETRYCOUNT", most, "JUSTID")
        assert lost(await begin()) == {"bad/0"}
        [letter] = await messages(bus, DEAD)
        assert (letter.stream, letter.sample_id, letter.deliveries) == ("prompts", "bad/0", most + 1)


async def test_what_is_no_message_is_buried(redis_url: str, run_name: str) -> None:
    async with serving(redis_url, run_name, "bad", "worse") as (bus, begin):
        for stream, name in ((PROMPTS, "bad"), (PREFIXES, "worse")):
            fields = ("type", "any", "id", f"{name}/0", "group", name, "tokens", "0", "body", b"\xff\x00junk")
            await bus.link.run("XADD", bus.keys.stream(stream.name), "*", *fields)
        assert lost(await begin()) == {"bad/0", "worse/0"}
        assert {letter.sample_id for letter in await messages(bus, DEAD)} == {"bad/0", "worse/0"}


async def test_what_the_buffer_gave_up_is_told_as_lost_with_its_reason(redis_url: str, run_name: str) -> None:
    async with serving(redis_url, run_name, "old") as (bus, begin):
        await put(bus, PREFIXES, PrefixDropped(task=sample("old", 0), tokens_made=5))
        rollouts = await begin()
        assert lost(rollouts) == {"old/0"} and await bus.length(DEAD) == 0
        [told] = [m for m in rollouts if isinstance(m, RolloutLost)]
        assert (told.reason, told.tokens_made, told.group_id) == ("evicted", 5, "old")
