"""Who outlived an earlier Ray cluster is found before a second one of it is started."""

from __future__ import annotations

import asyncio

import pytest

from bus import Bus
from miles_async.launcher.ray_strangers import refuse_strangers
from miles_async.settings.errors import SettingsError
from tests.miles_async.console_data import ROOMS, Story, config, vitals
from tests.miles_async.web_house import beat


async def test_actors_that_live_and_that_no_place_keeps_are_named(redis_url: str, run_name: str) -> None:
    async with Bus(config(redis_url, run_name)) as bus, asyncio.TaskGroup() as tasks:
        await Story(bus).begin()
        stop = asyncio.Event()
        tasks.create_task(beat(bus, stop))
        names = [*ROOMS, "generation-0", "generation-1"]
        await refuse_strangers(bus, names, names)
        await refuse_strangers(bus, ["generation-7"], [])
        said = rf"^name = '{run_name}': .*generation-1 on .* live, and this Ray cluster does not keep them.*miles-async stop"
        with pytest.raises(SettingsError, match=said):
            await refuse_strangers(bus, names, ROOMS)
        stop.set()


async def test_who_died_a_moment_ago_is_waited_for(redis_url: str, run_name: str) -> None:
    """Its last heartbeat is young, and none follows."""
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.alive(vitals("sampler"))
        await story.alive(vitals("filter", state="stopped"))
        async with asyncio.timeout(18):
            await refuse_strangers(bus, ["sampler", "filter"], [])
