"""`miles-async top` on a real run's streams, as its keys and its screen."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot

from actors.recorder import samples
from actors.recorder.feed import Feed
from bus import Bus
from bus.knobs.live import read_history
from bus.messages.control import Event
from bus.server import EmbeddedRedis
from bus.topology import EVENTS, POLICY, PROMPTS
from miles_async.cli import app as cli
from miles_async.console.live import run_console
from miles_async.console.top.alarms import FILE, Alarms, read_seen, write_seen
from miles_async.console.top.app import Top
from miles_async.console.verbs import Verbs
from miles_async.console.web.hub import Hub
from miles_async.settings.runs import write_run_file
from tests.miles_async.console_data import Story, config, step_done, task
from tests.miles_async.web_house import HOSTILE, beat

ROOT = Path(__file__).parents[2]


class View:
    """The screen of a running `top`, and its keys."""

    def __init__(self, pilot: Pilot[None], app: Top, story: Story) -> None:
        self.pilot, self.app, self.story = pilot, app, story

    @property
    def lines(self) -> list[str]:
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline, self.text
            await self.pilot.pause(0.05)

    async def press(self, *keys: str, shows: str) -> None:
        await self.pilot.press(*keys)
        await self.until(lambda: shows in self.text)


@asynccontextmanager
async def top(url: str, run: str, folder: Path, size: tuple[int, int], *, alive: bool = True) -> AsyncIterator[View]:
    """On a run on which the whole story has happened; `alive`: every actor lives on."""
    kept = {"step": 1, "group": "g1", "version": 1, "tokens": 4, "finish": "stop", "prompt": "2+2", "label": "4"}
    turns = [
        {"by": "model", "text": "[b]call\x1b[2J calc"},
        {"by": "environment", "text": "4"},
        {"by": "model", "text": HOSTILE},
    ]
    worst = {**kept, "sample": "g1/0", "reward": 0.0, "response": HOSTILE, "turns": turns}
    samples.append(folder, [{**kept, "sample": "g1/1", "reward": 1.0, "response": "4"}, worst])
    stop = asyncio.Event()
    # Nobody renews what the story's actors hold: with a lease that ends, a slow test would see them abandon it.
    told = replace(config(url, run), deadline_s=5.0 if alive else 1.0, lease_s=600.0)
    async with Bus(told) as bus, Bus(replace(told, deadline_s=30.0)) as teller:  # what happens is told however busy the machine is
        story = Story(teller)
        await story.whole()
        feed = Feed(bus)
        hub = Hub(bus, feed, folder, total_steps=3)
        app = Top(hub, Verbs(bus, folder, "top"))
        async with asyncio.TaskGroup() as tasks:
            if alive:
                tasks.create_task(beat(bus, stop))
            tasks.create_task(run_console(bus, feed, mode="none", total_steps=3, stop=stop))
            tasks.create_task(hub.run(stop))
            try:
                async with app.run_test(size=size, notifications=True) as pilot:
                    view = View(pilot, app, story)
                    await view.until(lambda: "prompts▶" in view.text)
                    yield view
            finally:
                stop.set()
        await feed.close()


async def test_every_view_fits_any_terminal_and_alarms_come_first(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with top(redis_url, run_name, tmp_path, (80, 24)) as view:
        await view.story.say(POLICY, step_done(2, raw_reward=0.75))
        await view.story.die("g4/0", PROMPTS, task("g4/0"), error="no room")
        await view.until(lambda: "dead: dead letter" in view.text and "step 2/3" in view.lines[0])
        for width, height in ((80, 24), (120, 40), (60, 20)):
            await view.pilot.resize_terminal(width, height)
            await view.press("1", shows="prompts▶ generation")
            await view.until(lambda: "reward            0.75" in view.text)
            alarm, tabs = (next(i for i, line in enumerate(view.lines) if word in line) for word in ("ERROR", "1 Run"))
            assert alarm == 1 < tabs < 9 and "dead letter: prompts g4/0: no room" in view.text
            await view.until(lambda: "q leave" in view.lines[-1] and "a alarms seen" in view.lines[-1])  # keys, in the footer
            await view.press("2", shows="generation-1")
            await view.press("3", shows="g1/0")
            await view.press("4", shows="over_sampling_batch_size")
            await view.until(lambda: "e change it" in view.lines[-1])
            await view.press("5", shows="no room")
            await view.press("6", shows="reward: retry")
            await view.press("7", shows="the doctor at")
            assert (len(view.lines), max(map(len, view.lines))) <= (height, width)
        await view.press("6", "f", shows="events from warning on")
        for who in ("reward", "filter", "sampler"):
            await view.story.say(EVENTS, Event(actor=who, kind="gave up", text="x", wall=time.time(), level="error"))
        await view.until(lambda: len(view.app.page.alarms.open()) > 3)
        await view.pilot.resize_terminal(30, 9)
        await view.press("1", shows="1 Run")
        assert all(len(line) <= 30 for line in view.lines)


async def test_what_a_model_wrote_is_shown_and_not_obeyed(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with top(redis_url, run_name, tmp_path, (120, 40)) as view:
        await view.press("3", shows="environment:")
        assert "[b]call\\x1b[2J calc" in view.text and "<script>window.hacked" in view.text and "\x1b" not in view.text
        await view.press("o", shows="best first")
        await view.until(lambda: "g1/1 at step 1" in view.text)


async def test_a_knob_is_changed_in_a_form_that_keeps_what_was_refused(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with top(redis_url, run_name, tmp_path, (100, 30)) as view:
        await view.press("4", shows="rollout_batch_size")
        await view.press("enter", shows="permitted: at least 1")
        await view.pilot.press("ctrl+u", *"lr=-1 eps_clip=0.3", "enter", *"why not")
        await view.press("enter", shows="lr = ")
        assert "Nothing was changed." in " ".join(view.text.replace("│", "").split()) and "lr=-1 eps_clip=0.3" in view.text
        await view.pilot.press("shift+tab", "ctrl+u", *"lr=2e-6 eps_clip=0.3", "enter")
        await view.press("enter", shows="epoch 1")
        history = await read_history(view.story.bus)
        assert (history[-1].values["lr"], history[-1].values["eps_clip"]) == (2e-6, 0.3)
        assert history[-1].author.endswith(", top") and history[-1].reason == "why not"
        await view.press("l", shows="epoch 0")
        await view.press("down", "enter", shows="Back to the values of epoch 0")
        await view.press("enter", shows="epoch 2")
        assert (await read_history(view.story.bus))[-1].values["lr"] == 1e-6


async def test_a_dead_letter_is_retried_or_dropped_after_a_question_and_never_when_read_only(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async with top(redis_url, run_name, tmp_path, (100, 30)) as view:
        await view.story.die("g4/0", PROMPTS, task("g4/0"), error="no room")
        await view.press("5", shows="5 Dead (1)")
        await view.until(lambda: "no room" in view.text)
        await view.press("d", shows="Drop for good: prompts g4/0?")
        await view.press("escape", "r", shows="Put back where it failed: prompts g4/0?")
        await view.press("enter", shows="g4/0 is back")
        await view.until(lambda: "no dead letters" in view.text)
        view.app.read_only = "read-only"
        await view.press("4", shows="rollout_batch_size")
        await view.press("enter", shows="read-only: nothing is changed")
        assert (await read_history(view.story.bus))[-1].epoch == 0


async def test_an_alarm_stays_with_its_time_until_it_is_acknowledged(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with top(redis_url, run_name, tmp_path, (80, 24)) as view:
        now = time.time()
        failed = Event(actor="reward", kind="gave up", text="no verifier", wall=now, level="error")
        await view.story.say(EVENTS, failed)
        await view.until(lambda: "ERROR" in view.lines[1])
        assert "reward: gave up: no verifier" in view.lines[1] and " ago" in view.lines[1]
        await view.pilot.press("a")
        await view.until(lambda: "no verifier" not in view.text)
        again = Event(actor="reward", kind="gave up", text="no judge", wall=now + 1, level="error")
        await view.story.say(EVENTS, again)
        await view.until(lambda: "reward: gave up: no judge" in view.lines[1])


def test_the_cause_stands_before_what_follows_from_it_and_what_holds_before_what_has_gone() -> None:
    alarms = Alarms()
    follows = {"who": "abandoned entry", "about": "a", "level": "error", "text": "held", "wall": 20.0, "now": True}
    cause = follows | {"who": "stopped process", "about": "generation-0", "wall": 15.0}
    gone = follows | {"who": "disk", "about": "d", "wall": 30.0}
    alarms.see([follows, gone], [])
    alarms.see([cause, follows], [])
    assert [a.who for a in alarms.open()] == ["stopped process", "abandoned entry", "disk"]


def test_what_has_gone_by_itself_stays_until_it_was_seen_and_what_still_holds_is_quiet_until_it_comes_again() -> None:
    alarms = Alarms()
    found = {
        "who": "no actor",
        "about": "reward",
        "level": "error",
        "text": "no living reward",
        "wall": 10.0,
        "now": True,
    }
    alarms.see([found], [])
    alarms.see([], [])
    [gone] = alarms.open()
    assert (gone.since, gone.now) == (10.0, False), "nobody has seen it"
    alarms.see([found | {"wall": 20.0}], [])
    alarms.acknowledge(alarms.open())
    alarms.see([found | {"wall": 20.0}], [])
    assert (alarms.open(), alarms.known()) == ([], 1)
    alarms.see([], [])
    alarms.see([found | {"wall": 30.0}], [])
    assert [a.since for a in alarms.open()] == [30.0], "it came again"
    told = {"what": "reward: retry", "level": "warning", "text": "slow", "wall": 31.0}
    alarms.see([], [told])
    alarms.see([], [told, told | {"wall": 5.0}, told | {"wall": 40.0, "level": "info"}])
    assert [(a.who, a.times) for a in alarms.open()] == [("no actor", 1), ("reward: retry", 2)], "also one that came late"


def test_the_next_view_knows_what_was_acknowledged(tmp_path):
    """A fault that began later, and one that came again, are new to it."""
    silent = {"who": "silent actor", "about": "generation-1", "level": "error", "text": "for 15 s", "wall": 10.0, "now": True}
    told = {"who": "reward: retry", "about": "", "level": "warning", "text": "slow", "wall": 4.0, "now": False}
    alarms, file = Alarms(), tmp_path / FILE
    alarms.see([silent, told], [])
    alarms.acknowledge(alarms.open())
    write_seen(file, alarms.was_seen)

    again = Alarms(read_seen(file))
    again.see([], [])  # the doctor has not spoken yet
    again.see([silent | {"wall": 11.0, "text": "for 80 s"}, told], [])
    assert (again.open(), again.known()) == ([], 1)
    later = Alarms(read_seen(file))
    later.see([silent | {"wall": 300.0, "text": "for 20 s"}, told | {"wall": 250.0}], [])
    assert [a.since for a in later.open()] == [300.0, 250.0]
    again.see([], [])
    assert set(again.was_seen) == {"reward: retry | on record"}, "it went, so the next one is new"
    file.write_text("{")
    assert read_seen(file) == {} == read_seen(tmp_path / "none")


async def test_a_redis_that_goes_away_shows_and_is_found_again(run_name: str, tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    try:
        async with top(server.url, run_name, tmp_path, (80, 24), alive=False) as view:
            await asyncio.to_thread(server.stop)
            await view.until(lambda: "the bus has not answered for" in view.text)
            assert "reward" in view.text, "what was known stays in sight"
            await asyncio.to_thread(server.start)
            await view.until(lambda: "the bus has not answered" not in view.text)
            await view.story.say(POLICY, step_done(2))
            await view.until(lambda: "step 2/3" in view.lines[0])
    finally:
        server.stop()


def test_a_terminal_that_cannot_show_it_is_told_what_can(
    redis_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_file(tmp_path / run_name, run=run_name, bus_url=redis_url)
    assert cli.main(["top", run_name, "--runs-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "needs a terminal" in err and "Use --plain" in err
    for stream in (sys.stdin, sys.stdout, sys.__stderr__):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert cli.main(["top", run_name, "--runs-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "TERM = 'dumb': this terminal cannot place text" in err


@contextmanager
def in_a_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command as a process on a terminal of 80 by 24 without colours, and that terminal's other end."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "miles_async", "top", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()


def test_an_ended_run_is_shown_from_a_copy(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "late")
    server.start()
    write_run_file(tmp_path / "late", run="late", bus_url=server.url)
    asyncio.run(_happen(server.url, "late"))
    server.stop()
    with in_a_terminal("late", "--runs-dir", str(tmp_path)) as (process, terminal):
        shown = _read_until(terminal, b"copy of what its Redis kept")
        shown += _read_until(terminal, b"not running. The same")
        os.write(terminal, b"q")
        shown += _read_until(terminal, b"left the view")
        assert process.wait(20) == 0
        assert b"this run has ended" in shown and b"Traceback" not in shown
        os.close(terminal)


def test_a_terminal_that_goes_away_takes_the_view_with_it_and_nothing_else(redis_url: str, run_name: str, tmp_path: Path) -> None:
    asyncio.run(_happen(redis_url, run_name))
    with in_a_terminal("--run", run_name, "--bus-url", redis_url) as (process, terminal):
        _read_until(terminal, b"reward")
        os.close(terminal)
        process.wait(30)
    asyncio.run(_happen(redis_url, f"{run_name}-next"))


async def _happen(url: str, run: str) -> None:
    async with Bus(config(url, run)) as bus:
        await Story(bus).whole()


def _read_until(terminal: int, wanted: bytes) -> bytes:
    """What it writes until `wanted` is among it."""
    found, deadline = b"", time.monotonic() + 30
    while wanted not in found:
        assert time.monotonic() < deadline, found[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                found += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                raise AssertionError(found[-2000:]) from None
    return found
