"""What comes from outside is checked where it enters: names, and texts before a terminal."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from bus import Bus, BusConfig
from bus.dead import letter_of
from bus.errors import printable
from bus.identity import Identity, write_identity
from bus.messages.control import Event
from bus.streams.entry import Entry
from bus.topology import EVENTS, PROMPTS
from tests.miles_async.console_data import vitals

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m all\nis\twell"
SAFE = r"\x1b]0;owned\x07\x1b[2J\x0d\x9b31m all" + "\nis\twell"


def test_no_control_character_is_left_but_line_feed_and_tab():
    assert printable(EVIL) == SAFE
    assert printable("naïve 数学 😀") == "naïve 数学 😀"
    assert printable("\ud83d") == r"\ud83d", "half of a pair, which no message takes"


@pytest.mark.parametrize("words", [["bus", "dead", "list"], ["bus", "tail", "events", "--no-follow"], ["status"], ["doctor"],
                                   ["bus", "show", "events", "evil"]], ids=" ".join)  # fmt: skip
def test_no_command_prints_what_a_terminal_would_obey(run, words, capsys):
    async def put(story):
        await story.whole()
        await story.alive(vitals("reward", "reward", state="failed", note=EVIL))
        await story.die("g2/1", error=EVIL)
        await story.say(EVENTS, Event(actor="evil", kind=EVIL, text=EVIL, wall=0.0, level="error"))

    run.tell(put)
    status, out, err = run.ask(*words)
    assert not set(out + err) & {"\x1b", "\x07", "\r", "\x9b"} and status in (0, 1, 2)
    assert "owned" in out + err


def test_letters_and_logs_hold_none_either(capsys):
    entry = Entry(id="1-0", stream=PROMPTS, readers="generation", fields={}, body=b"", size=0)
    letter = letter_of(entry, actor="a", error=f"ValueError: {EVIL}", traceback=EVIL, wall=0.0)
    assert letter.error == f"ValueError: {SAFE}" and letter.traceback == SAFE
    code = "import logging, sys; from actors.runtime.run import log_to_stderr; log_to_stderr(); logging.error('%s', sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, EVIL], capture_output=True, text=True, timeout=60, check=True)
    assert SAFE in done.stderr and "\x1b" not in done.stderr


def test_the_log_of_an_actor_has_no_line_for_each_call_that_an_agent_makes():
    code = """
from actors.runtime.run import log_to_stderr
log_to_stderr()
import logging, openai
http = logging.getLogger(openai.DefaultHttpxClient.__mro__[-2].__module__.partition(".")[0])
http.info("HTTP Request: GET http://tool/?key=hunter2"), http.warning("slow"), logging.getLogger("my_agent").info("mine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "hunter2" not in done.stderr and "slow" in done.stderr and "mine" in done.stderr


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "x" * 65, "trainer", "generation-0", "launcher", ".hidden", "a\nb", "a b"])
def test_a_worker_cannot_take_a_name_that_leaves_the_run_or_is_anothers(name, redis_url, run_name, tmp_path, capsys):
    async def state() -> None:
        async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
            known = Identity(run=run_name, worker={"model_path": str(tmp_path)}, run_dir=str(tmp_path / "run"))
            await write_identity(bus, known)

    asyncio.run(state())
    words = [sys.executable, "-m", "miles_async", "worker", "--bus-url", redis_url, "--run", run_name, f"--name={name}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "worker name" in done.stderr and "refused" in done.stderr
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        ({"program": "evil.rollout"}, "--custom-generate-function-path"),
        ({"agent": {"function": "evil.rollout"}}, "--custom-agent-function-path"),
    ],
)
def test_code_that_a_worker_runs_is_named_where_it_runs(told, flag, redis_url, run_name, tmp_path):
    async def state() -> None:
        async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
            worker = {"model_path": str(tmp_path), **told}
            await write_identity(bus, Identity(run=run_name, worker=worker, run_dir=str(tmp_path / "run")))

    asyncio.run(state())
    words = [sys.executable, "-m", "miles_async", "worker", "--bus-url", redis_url, "--run", run_name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and f"makes its samples by evil.rollout. Give {flag}" in done.stderr
