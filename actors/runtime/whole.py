"""Calls of a user's function that sees several samples at once: in a thread, in its time, its failures with file and line."""

from __future__ import annotations

import asyncio
import inspect
import os
import sysconfig
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.runtime.contained import as_exception, named, text_of
from actors.runtime.hooks import awaited, load_hook
from actors.runtime.loopwatch import in_thread
from actors.runtime.refusals import RunEnds, Streak

if TYPE_CHECKING:
    from actors.runtime.context import Context

MOST_FAILED = 3  # in a row
NOT_THEIRS = (*(str(Path(__file__).parents[2] / name) for name in ("actors", "bus")), sysconfig.get_path("stdlib"))


class WholeFailed(Exception):
    """The function raised; the text says what and where. Called again it may work."""


class Whole:
    """The function at `path`, named by `setting`. No thread can be ended: when one is late, the run ends."""

    def __init__(self, context: Context, setting: str, path: str, deadline_s: float) -> None:
        self.setting = setting
        self._hook, self._deadline_s = load_hook(path), deadline_s
        self._name = f"--{setting.replace('_', '-')} {path}"
        self._row = Streak(context.clock.monotonic, self._name, "Mend it, or leave it out.", most=MOST_FAILED)

    async def __call__(self, *args: Any) -> Any:
        """What it returned. Raises WholeFailed, and RunEnds after several in a row, or when it is late."""
        try:
            return await in_time(self._name, self._deadline_s, self._hook, *fitting(self._hook, args))
        except RunEnds:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a function of the user's raises
            self.refused(said(error))

    def refused(self, why: str) -> None:
        """It raised, or what it returned cannot be used. Raises WholeFailed, or RunEnds."""
        self._row.failed("", why)
        raise WholeFailed(f"{self._name} {why}")

    def worked(self) -> None:
        """What it returned is of use."""
        self._row.worked()


async def in_time(name: str, deadline_s: float, hook: Any, *args: Any) -> Any:
    """What a plain function of the user's returns. Raises what it raises, and RunEnds with its `name` when it is late: no thread
    can be ended, and the same call would be late again."""
    done = called(hook, args)
    try:
        await asyncio.wait((done,), timeout=deadline_s)
        if done.done():
            return done.result()
    finally:
        done.cancel()
    late = f"{name} did not end within {deadline_s:g} s (--batch-hook-timeout-s)"
    raise RunEnds(f"{late}. What is not done stays pending; the same command resumes.")


def fitting(hook: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """As many of the arguments, from the first, as a function takes."""
    try:
        given = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):
        return args
    if any(p.kind is p.VAR_POSITIONAL for p in given):
        return args
    return args[: sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in given)]


def called(hook: Any, args: tuple[Any, ...], *, waits: bool = True) -> asyncio.Future[Any]:
    """What it will return or raise, from a thread that keeps no process alive. `waits`: what can be awaited is, in that thread;
    else it is returned as it is."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    threading.Thread(target=_run, args=(in_thread(hook), args, waits, loop, done), daemon=True).start()
    return done


async def off_loop(hook: Any, *args: Any) -> Any:
    """What a function of the user's gives. Of a plain one, from a thread of its own: it may hold up whatever it runs in, and in a
    pool those that hang would leave none for others. What is to be awaited is, here."""
    if inspect.iscoroutinefunction(hook):
        return await hook(*args)
    value = await called(hook, args, waits=False)
    return await value if inspect.isawaitable(value) else value


def _run(hook: Any, args: tuple[Any, ...], waits: bool, loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any]) -> None:
    try:
        found = hook(*args)
        if waits and inspect.isawaitable(found):
            found = asyncio.run(awaited(found))
        answer: tuple[Any, Exception | None] = (found, None)
    except BaseException as error:  # noqa: BLE001 - it is told where it is waited for
        answer = (None, as_exception(error))
    with suppress(RuntimeError):  # the loop is closed, after a Ctrl-C for example: nobody waits, and a traceback helps nobody
        loop.call_soon_threadsafe(_tell, done, *answer)


def _tell(done: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    """In the loop's own thread, where no cancellation can come between the question and the answer."""
    if done.cancelled():
        return
    if error is None:
        done.set_result(found)
    else:
        done.set_exception(error)


def said(error: BaseException, deadline_s: Any = None) -> str:
    """An exception in one line, with the place in the user's own code."""
    inner = error.__cause__ if isinstance(error, TimeoutError) and error.__cause__ is not None else error
    frames = traceback.extract_tb(inner.__traceback__)
    own = [f for f in frames if not f.filename.startswith(NOT_THEIRS)] or frames
    where = f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    if isinstance(error, TimeoutError) and not text_of(error):
        return f"did not end within its deadline ({deadline_s} s){where}"
    return f"raised {named(error)}{where}"
