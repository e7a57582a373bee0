"""Code of the user's that means to end its process, or raises what only asyncio may, costs what it was asked about."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from actors.runtime.contained import HookRaised, contained
from actors.runtime.hooks import load_hook
from actors.runtime.refusals import RunEnds
from actors.runtime.run import EXIT_CRASHED, Refused
from actors.runtime.whole import in_time, off_loop
from tests.actors.house import open_bus
from tests.declared import actor_of
from tests.floors.tree import ROOT

ENDS = (SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseExceptionGroup("g", [SystemExit()]))
ACTOR = """
import sys
from actors.runtime.run import main

async def body(context, room):
    async def work():
        %s
    import asyncio
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work())

main(dict, body)
"""


@pytest.mark.parametrize("error", ENDS, ids=lambda e: type(e).__name__)
async def test_what_ends_a_process_or_a_task_is_an_exception_of_the_hook(error: BaseException) -> None:
    with pytest.raises(HookRaised, match=type(error).__name__), contained():
        raise error


async def test_an_error_that_cannot_say_what_it_is_is_told_all_the_same() -> None:
    class Mute(ValueError):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    with pytest.raises(HookRaised, match="Mute: its text cannot be made"), contained():
        raise Mute


async def test_a_cancellation_that_was_asked_for_passes() -> None:
    async def program() -> None:
        with contained():
            await asyncio.sleep(30)

    task = asyncio.create_task(program())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await program()


@pytest.mark.parametrize("error", [*ENDS, StopIteration(3)], ids=lambda e: type(e).__name__)
async def test_a_thread_tells_whatever_its_function_raised(error: BaseException) -> None:
    def hook() -> NoReturn:
        raise error

    with pytest.raises(HookRaised, match=type(error).__name__):
        await asyncio.wait_for(off_loop(hook), 10)


@pytest.mark.parametrize("moment", ["before it is told", "behind the loop's end"])
def test_an_answer_that_nobody_waits_for_any_more_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """As after a Ctrl-C: a traceback of a thread that the user never saw would look like a fault."""
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    begun, go = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def hook() -> int:
        threads.append(threading.current_thread())
        begun.set()
        assert go.wait(20)
        return 1

    async def cancelled() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: shown.append(what))
        waiting = asyncio.create_task(off_loop(hook))
        await asyncio.to_thread(begun.wait, 20)
        if moment == "before it is told":
            go.set()
            threads[0].join(20)  # the loop stands still: what the thread said waits in its queue
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancelled())
    go.set()
    threads[0].join(20)
    assert not shown and not threads[0].is_alive()


async def test_a_timeout_that_a_function_raises_itself_is_its_own() -> None:
    def hook() -> NoReturn:
        raise TimeoutError("the database")

    with pytest.raises(TimeoutError, match="the database"):
        await in_time("--filter f", 20, hook)


async def test_a_function_that_is_late_ends_the_run_and_is_named() -> None:
    go = threading.Event()
    try:
        with pytest.raises(RunEnds, match=r"^--filter f did not end within 0\.01 s"):
            await in_time("--filter f", 0.01, go.wait, 20)
    finally:
        go.set()


def test_a_module_that_ends_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\ndef rew(sample): return 1.0\nsys.exit(0)\n")
    with pytest.raises(Refused, match=r"it calls sys.exit\(0\) while it is loaded"):
        load_hook(f"{tmp_path / 'script.py'}:rew")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("sys.exit(0)", EXIT_CRASHED, "sys.exit(0) at "),
        ("import os; os._exit(0)", 0, ""),  # which is no status of an actor's that is done: test_restart.py
    ],
)
async def test_an_actor_that_its_own_code_ends_has_not_done_its_work(
    redis_url: str, run_name: str, tmp_path: Path, line: str, code: int, said: str
) -> None:
    file = tmp_path / "a.json"
    async with open_bus(redis_url, run_name) as bus:
        spec = actor_of(name="a", role="filter", bus=bus.config, run_dir=str(tmp_path), room={})
        file.write_text(json.dumps(msgspec.to_builtins(spec)))
        words = [sys.executable, "-c", ACTOR % line, str(file)]
        done = await asyncio.to_thread(subprocess.run, words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code and said in done.stderr, done.stderr[-2000:]
