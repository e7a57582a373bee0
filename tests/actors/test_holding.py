"""When an actor takes its name from who has it, and how it ends when another took it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.runtime.context import ROOM_S, Context
from actors.runtime.holding import has_ended, me, take_name
from actors.runtime.run import EXIT_DONE, EXIT_NAME_TAKEN, EXIT_RUN_ENDS, run_actor
from bus import Bus, BusConfig
from bus.errors import Garbage, NameTaken
from bus.streams.hold import Who
from tests.actors.house import open_bus, until
from tests.declared import actor_of
from tests.miles_async.console_data import vitals

BEAT_S = 2.0
LAPSE_S = 10.0
ELSEWHERE = Who(pid=7, host="node7", processes="elsewhere", began="7:1")
Hook = Callable[[], Awaitable[None]]


class Slept:
    """A clock on which time passes by sleeping alone, and once by a jump; then something may happen."""

    def __init__(self, *, jump_at_s: float = 1e9, jump_s: float = 0.0, then: Hook | None = None) -> None:
        self.now, self._at, self._jump_s, self._then = 0.0, jump_at_s, jump_s, then

    def wall(self) -> float:
        return 1.7e9 + self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds
        if self.now >= self._at:
            self._at = 1e9
            self.now += self._jump_s
            if self._then is not None:
                await self._then()


async def held(url: str, run: str, who: Who = ELSEWHERE, *, silent_s: float = 0.0) -> Bus:
    """Another process has the name `filter`, and was heard so long ago."""
    bus = Bus(BusConfig(url=url, run=run))
    bus.names.token = "abcd"
    await bus.names.take("filter", who, lapse_s=LAPSE_S)
    await bus.link.run("HINCRBY", bus.keys.heard, "filter", -int(1000 * silent_s))
    return bus


async def asked(url: str, run: str, clock: Slept) -> str:
    """What becomes of who asks for the name: it, or why not."""
    async with Bus(BusConfig(url=url, run=run), clock=clock) as bus:
        try:
            await take_name(bus, "filter", BEAT_S)
        except NameTaken as error:
            return str(error)
        assert bus.names.hold is not None and bus.names.hold.lapse_s == LAPSE_S
        return ""


@pytest.mark.parametrize(
    ("who", "silent_s", "after_s"),
    [
        (ELSEWHERE, 0.0, LAPSE_S),
        (ELSEWHERE, 30.0, LAPSE_S),  # it may have waited for the server as long
        (ELSEWHERE, 3600.0, 1.5 * BEAT_S),  # no actor waits for so long; one that stood still would beat once
        (msgspec.structs.replace(me(), began="1:1"), 0.0, 0.0),  # another process has its number by now
    ],
)
async def test_a_name_is_taken_from_who_has_ended_at_once_and_else_after_a_watch(
    redis_url: str, run_name: str, who: Who, silent_s: float, after_s: float
) -> None:
    other, clock = await held(redis_url, run_name, who, silent_s=silent_s), Slept()
    assert await asked(redis_url, run_name, clock) == ""
    assert after_s <= clock.now <= after_s + 1.0
    with pytest.raises(NameTaken):
        await other.set_vitals("filter", vitals("filter"))
    await other.link.close()


@pytest.mark.parametrize("jump_s", [0.0, 30.0])
async def test_an_outage_or_a_pause_takes_nobodys_name(redis_url: str, run_name: str, jump_s: float) -> None:
    """Whoever waited for the server too is heard a moment after it is back: the watch begins anew."""
    other = await held(redis_url, run_name)

    async def beats() -> None:
        await asyncio.sleep(0.002)  # the server counts milliseconds
        await other.set_vitals("filter", vitals("filter"))

    async def later() -> None:  # than the first look after the gap
        clock._at, clock._jump_s, clock._then = clock.now + LAPSE_S - 1.0, 0.0, beats

    clock = Slept(jump_at_s=LAPSE_S - 1.0, jump_s=jump_s, then=later if jump_s else beats)
    assert "is held by process 7 on host node7, which is heard" in await asked(redis_url, run_name, clock)
    await other.set_vitals("filter", vitals("filter"))
    await other.link.close()


def test_a_process_of_this_host_is_seen_to_live_and_to_have_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not has_ended(me())
        assert has_ended(msgspec.structs.replace(me(), pid=child.pid)), "it began at another time"
        child.communicate(b"\n")
    assert has_ended(msgspec.structs.replace(me(), pid=child.pid)) and not has_ended(ELSEWHERE)


async def ended(url: str, run: str, body: Callable[[Context, None], Awaitable[None]], **fields: Any) -> int:
    config = BusConfig(url=url, run=run)
    return await run_actor(actor_of(name="filter", role="filter", bus=config, heartbeat_s=0.05, **fields), None, body)


async def test_an_actor_gives_its_name_back(redis_url: str, run_name: str) -> None:
    async def works(context: Context, _: None) -> None:
        holder = await context.bus.names.holder_of("filter")
        assert holder is not None and holder.who.pid == os.getpid()

    async with open_bus(redis_url, run_name) as bus:
        assert await ended(redis_url, run_name, works) == EXIT_DONE
        assert await bus.names.holder_of("filter") is None


async def waits(context: Context, _: None) -> None:
    await context.draining.wait()


async def test_who_only_waits_ends_when_another_has_its_name(
    redis_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bus(redis_url, run_name) as bus, asyncio.timeout(20):
        bus.names.token = "abcd"
        working = asyncio.create_task(ended(redis_url, run_name, waits))
        holder = await until(lambda: bus.names.holder_of("filter"))
        assert await bus.names.take("filter", ELSEWHERE, lapse_s=LAPSE_S, instead_of=holder) is None
        assert await working == EXIT_NAME_TAKEN
        assert (await bus.names.holder_of("filter") or holder).token == "abcd", "its last words took nothing back"
    assert "was taken by process 7 on host node7" in caplog.text and "Traceback" not in caplog.text


async def test_who_comes_second_ends_before_it_begins(redis_url: str, run_name: str) -> None:
    begun = asyncio.Event()

    async def begins(context: Context, _: None) -> None:
        begun.set()

    async with open_bus(redis_url, run_name) as bus:
        bus.names.token = "abcd"
        await bus.names.take("filter", ELSEWHERE, lapse_s=LAPSE_S)

        async def beat() -> None:
            while True:
                await bus.set_vitals("filter", vitals("filter"))
                await asyncio.sleep(0.02)

        beating = asyncio.create_task(beat())
        assert await ended(redis_url, run_name, begins) == EXIT_NAME_TAKEN
        beating.cancel()
    assert not begun.is_set()


async def test_garbage_on_the_bus_ends_the_run_and_is_not_met_again(redis_url: str, run_name: str) -> None:
    async def meets(context: Context, _: None) -> None:
        raise Garbage.of_key("k", "e")

    async with open_bus(redis_url, run_name):
        assert await ended(redis_url, run_name, meets) == EXIT_RUN_ENDS


@pytest.mark.parametrize("there", ["gone", "another", "the same"])
async def test_who_works_in_a_folder_that_is_gone_ends(
    redis_url: str, run_name: str, tmp_path: Path, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ROOM_S > 0
    monkeypatch.setattr("actors.runtime.context.ROOM_S", 0.0)
    folder, beats = tmp_path / "run", 0
    folder.mkdir()

    async def works(context: Context, _: None) -> None:
        nonlocal beats
        if there != "the same":
            shutil.rmtree(folder)
        if there == "another":
            folder.mkdir()
        while not context.draining.is_set():
            await asyncio.sleep(0.06)
            if there == "the same" and (beats := beats + 1) > 4:
                return

    async with open_bus(redis_url, run_name), asyncio.timeout(20):
        code = await ended(redis_url, run_name, works, run_dir=str(folder))
    assert code == (EXIT_DONE if there == "the same" else EXIT_RUN_ENDS)
