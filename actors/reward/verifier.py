"""A verifier process: loads one hook and scores samples with it, apart from the actor, so that the actor may kill it.

`python -m actors.reward.verifier HOOK PARENT_PID [PROFILE]`, started by the pool only. PROFILE: limits that it takes upon itself.
Reads questions on its first standard input, writes answers on its first standard output; what the hook prints goes to standard
error. Ends when its parent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, BinaryIO

from actors.reward.wire import Cancel, Ready, ScoreAnswer, ScoreOrder, decode_to_verifier, frame, plain
from actors.runtime.child import adopt_orphans, die_with_parent
from actors.runtime.confine import confine_calls, confine_files, decoded, with_imports
from actors.runtime.contained import contained, named
from actors.runtime.hooks import awaited, load_hook, own_pipes, read_frame
from actors.runtime.loopwatch_acts import SHOW
from actors.runtime.miles import reward_of
from actors.runtime.priority import lower_to
from bus.errors import printable

Hook = Callable[[Any], Any]
NICE = "MILES_ASYNC_HOOK_NICE"  # variable: how far back such a process stands; unset = as its parent
ARGS = "MILES_ASYNC_HOOK_ARGS"  # variable: what functions written for Miles find on `args`, JSON


def tell_args(values: Mapping[str, Any]) -> None:
    """What functions written for Miles find on `args`, in processes that begin after this."""
    os.environ[ARGS] = json.dumps(dict(values), default=str)


def main() -> None:
    """Serve until the parent closes the pipe."""
    hook_path, parent = sys.argv[1], int(sys.argv[2])
    profile = decoded(sys.argv[3]) if len(sys.argv) > 3 else None
    _end_with(parent)
    faulthandler.enable()
    faulthandler.register(SHOW)
    lower_to(int(os.environ.get(NICE, "0")))
    asks, answers = own_pipes()
    try:
        if profile is not None:
            confine_files(with_imports(profile, hook_path))
        hook: Hook = reward_of(load_hook(hook_path), json.loads(os.environ.get(ARGS, "{}")))
        if profile is not None:
            confine_calls(profile)
    except BaseException as error:  # noqa: BLE001 - importing a hook may raise anything; it is told, not hidden
        _send(answers, Ready(error=named(error)))
        sys.exit(2)
    is_async = inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(type(hook).__call__)
    _send(answers, Ready(is_async=is_async))
    if is_async:
        asyncio.run(_serve_async(hook, asks, answers))
    else:
        _serve(hook, asks, answers)


def _end_with(parent: int) -> None:
    """A hook that holds the interpreter lock for ever must not outlive the actor (Linux; elsewhere the pipe's end must do)."""
    die_with_parent()
    adopt_orphans()
    if os.getppid() != parent:
        sys.exit(0)


def _send(answers: BinaryIO, message: Ready | ScoreAnswer) -> None:
    answers.write(frame(message))
    answers.flush()


def _listen(asks: BinaryIO, hand_over: Callable[[ScoreOrder | Cancel], None]) -> None:
    """In a thread: waits for the next frame; the pipe's end ends the process, also in the middle of a hook."""

    def listen() -> None:
        while (body := read_frame(asks)) is not None:
            hand_over(decode_to_verifier(body))
        os._exit(0)

    threading.Thread(target=listen, daemon=True, name="questions").start()


def _serve(hook: Hook, asks: BinaryIO, answers: BinaryIO) -> None:
    """One question at a time; waits for the next, woken by the listening thread."""
    inbox: SimpleQueue[ScoreOrder | Cancel] = SimpleQueue()
    _listen(asks, inbox.put)
    while True:
        message = inbox.get()
        if isinstance(message, ScoreOrder):
            _send(answers, _score(hook, message))


def _score(hook: Hook, ask: ScoreOrder) -> ScoreAnswer:
    try:
        value = hook(ask.sample)
        if inspect.isawaitable(value):
            value = asyncio.run(awaited(value))
        return ScoreAnswer(ask.number, plain(value))
    except BaseException as error:  # noqa: BLE001 - what a hook raises is its answer
        return _raised(ask, error)


async def _serve_async(hook: Hook, asks: BinaryIO, answers: BinaryIO) -> None:
    """Many questions at once; waits for the next, woken by the listening thread. Cancelled ones are answered as such."""
    inbox: asyncio.Queue[ScoreOrder | Cancel] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    _listen(asks, lambda message: _hand_over(loop, inbox, message))
    running: dict[int, asyncio.Task[None]] = {}

    async def one(ask: ScoreOrder) -> None:
        try:
            with contained():
                answer = ScoreAnswer(ask.number, plain(await hook(ask.sample)))
        except asyncio.CancelledError:
            _send(answers, ScoreAnswer(ask.number, error="cancelled at its deadline"))
            raise
        except Exception as error:  # noqa: BLE001 - what a hook raises is its answer
            answer = _raised(ask, error)
        finally:
            running.pop(ask.number, None)
        _send(answers, answer)

    async with asyncio.TaskGroup() as tasks:
        while True:
            message = await inbox.get()
            if isinstance(message, ScoreOrder):
                running[message.number] = tasks.create_task(one(message))
            elif message.number in running:
                running[message.number].cancel()


def _hand_over(loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[ScoreOrder | Cancel], message: ScoreOrder | Cancel) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has just ended, and the process with it
        loop.call_soon_threadsafe(inbox.put_nowait, message)


def _raised(ask: ScoreOrder, error: BaseException) -> ScoreAnswer:
    """Error and where in the hook it was raised, for the operator."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    trace = "".join(traceback.format_exception(error))[-4000:]
    return ScoreAnswer(ask.number, error=f"{named(error)}{where}", trace=printable(trace))


if __name__ == "__main__":
    main()
