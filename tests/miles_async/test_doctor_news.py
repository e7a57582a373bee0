"""What the doctor reads of the events: a time, whatever else was said in it, and what came since the last look."""

from __future__ import annotations

import time
from typing import Any

from bus import Bus, Out
from bus.messages.base import Message
from bus.messages.codec import encode
from bus.messages.control import Event
from bus.messages.policy import GroupsGivenUp
from bus.topology import EVENTS, POLICY
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.scene import MOST, NEWS_S, OfLate, read_scene
from tests.miles_async.console_data import Story, config, vitals

MANY = 3000


def event(kind: str, text: str = "", actor: str = "launcher", **data: Any) -> Event:
    return Event(actor=actor, kind=kind, text=text, wall=time.time(), data=data)


def ended(actor: str = "reward-0") -> Event:
    return event("restart", f"{actor} ended with status 1 after 58 s: ValueError: no such rule; restarting")


async def past(bus: Bus, *told: tuple[float, Message]) -> None:
    """Entries as they would stand there if each had been said so many seconds ago."""
    now_ms = 1000 * await bus.server_time()
    calls = [
        ("XADD", bus.keys.stream(EVENTS.name), f"{int(now_ms - 1000 * ago_s)}-{n + 1}",
         "type", message.__struct_config__.tag, *message.header().fields(), "body", encode(message))
        for n, (ago_s, message) in enumerate(sorted(told, key=lambda one: -one[0]))
    ]  # fmt: skip
    await bus.link.run_many(calls, repeatable=True)


async def test_a_slow_crash_loop_is_seen_among_the_heartbeats_and_activations_of_many_workers(redis_url, run_name) -> None:
    beat, active = vitals("generation-7", "generation", version=2), event("activated", "version 2", version=2, total_s=0.1)
    async with Bus(config(redis_url, run_name)) as bus:
        others = [(150 - 150 * n / MANY, message) for n in range(MANY) for message in (beat, active)]
        await past(bus, *others, (130.0, ended()), (70.0, ended()), (10.0, ended()))
        await Story(bus).whole()
        scene = await read_scene(bus)
    found = diagnose(scene)[0]
    assert (found.rule, found.about) == ("crash loop", "reward-0") and found.text.startswith("reward-0 has ended 3 times in 2:1")
    assert [sum(e.kind == kind for e in scene.news) for kind in ("restart", "activated")] == [3, MOST["activated"]]


async def test_who_looks_again_reads_what_came_since_and_knows_what_a_first_look_knows(redis_url, run_name) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        await past(bus, (NEWS_S + 5, ended("filter")), (NEWS_S - 60, ended("trainer")), (5.0, event("no news")))
        again, now = OfLate(), await bus.server_time()
        assert [e.text.split()[0] for e in await again.news(bus, now)] == ["trainer"]
        await Story(bus).say(EVENTS, *[ended(f"reward-{n}") for n in range(MOST["restart"])], event("activated"))
        now = await bus.server_time()
        told = await again.news(bus, now)
        assert told == await OfLate().news(bus, now) and len(told) == MOST["restart"] + 1
        assert [told[0].text.split()[0], told[-2].text.split()[0], told[-1].kind] == ["reward-0", "reward-99", "activated"]

        key = bus.keys.stream(EVENTS.name)
        await bus.link.run("XADD", key, "*", "type", "event.note", "note", "restart", "body", b"\xc1")
        assert await again.news(bus, now) == told  # nor is it read again
        assert await again.news(bus, now + NEWS_S) == []

        await bus.link.run("DEL", key)  # as a server that was started without its file
        bus.link.server_restarts += 1
        await past(bus, (60.0, ended("filter")))
        assert [e.text.split()[0] for e in await again.news(bus, now)] == ["filter"]


async def test_a_policy_log_whose_newest_words_are_of_groups_given_up_is_not_gone(redis_url, run_name) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.whole()
        await bus.append([Out(POLICY, GroupsGivenUp(groups=((f"g{n}", "refused"),))) for n in range(80)])
        assert "stream gone" not in {f.rule for f in diagnose(await read_scene(bus))}
