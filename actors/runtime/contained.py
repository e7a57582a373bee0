"""What code of the user's raises stays an Exception, whatever it was; what it prints is nobody's failure."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from bus.errors import printable


class HookRaised(Exception):
    """A function of the user's raised what would end its process, or look as if somebody had cancelled it; the text names it."""


@contextmanager
def contained() -> Iterator[None]:
    """Around code of the user's, and of libraries that it brings: whatever it raises is an Exception, so that it costs what it was
    asked about. `sys.exit` in it would end the process as if its work were done, and a CancelledError of its own would end a task
    without a word. A cancellation that was asked for passes."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        told = as_exception(error)
        if told is error:
            raise
        raise told from None


def as_exception(error: BaseException) -> Exception:
    """The error itself, or one that names it where it is no Exception, means something else to a coroutine or a future, or cannot
    say what it is: who tells it to the operator would fail by it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration) and _text(error) is not None:
        return error
    raised = HookRaised(named(error))
    raised.__traceback__ = error.__traceback__
    return raised


def named(error: BaseException) -> str:
    """An error's type and what it says, in one line that every message takes."""
    return text_of(error) if isinstance(error, HookRaised) else f"{type(error).__name__}: {text_of(error)}".rstrip(": ")


def text_of(error: BaseException) -> str:
    """What an error says, in one line of at most 300 characters that every message takes."""
    text = _text(error)
    return "its text cannot be made" if text is None else printable(" ".join(text.split())[:300])


def _text(error: BaseException) -> str | None:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - it is a method of the user's
        return None


def _is_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0


class _Lossy:
    """A text stream whose disk may be full: what it cannot take is lost, and nobody fails by it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lose_prints() -> None:
    """From here on a print fails by no full disk, where the log lies: a reward that printed cost its sample, and that its group."""
    sys.stdout, sys.stderr = cast(TextIO, _Lossy(sys.stdout)), cast(TextIO, _Lossy(sys.stderr))
