"""User code by dotted path, `package.module.function` or `file.py:function`, taken from settings only, never from messages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, TypeVar

import msgspec

from actors.runtime.contained import lose_prints
from actors.runtime.refusals import Refused

M = TypeVar("M", bound=msgspec.Struct)


def load_hook(path: str) -> Any:
    """The function named by `path`; Refused names what is missing."""
    hook = load_named(path)
    if not callable(hook):
        raise Refused(f"hook {path!r} is a {type(hook).__name__}, not a function.")
    return hook


def load_named(path: str) -> Any:
    """What `path` names. Its bytecode is not kept: Python would take it for a file that was changed in the same second without
    growing. Raises Refused."""
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last: what lies there by the name of a package of ours is not ours
        if ".py:" in path:
            file, _, name = path.rpartition(":")
            module = _module_of(file)
        else:
            module_name, _, name = path.replace(":", ".").rpartition(".")
            module = importlib.import_module(module_name)
        return getattr(module, name)
    except (ImportError, AttributeError, ValueError, OSError, SystemExit) as error:
        raise Refused(f"hook {path!r} not loaded: {_why(error)}. Give package.module.function or file.py:function.") from error
    finally:
        sys.dont_write_bytecode = kept


def _module_of(file: str) -> ModuleType:
    """A file's module, known by a name of its own: dataclasses, pickle and type hints look up the module of what they are given."""
    name = f"hook_{Path(file).stem}_{zlib.crc32(os.path.abspath(file).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def copies(messages: Iterable[M]) -> list[M]:
    """Messages as a function of the user's is shown them: what it does to their tables stays its own, else what no message takes
    would come to light where nobody would look for the function."""
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=type(one)) for one in messages]


def own_stdout() -> BinaryIO:
    """Standard output for ourselves: what code of the user's prints, and what it starts prints, goes to stderr from here on."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return kept


def own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output for ourselves: what code of the user's prints goes to stderr, and what it, or what it starts, reads
    is nothing."""
    asks = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    answers = own_stdout()
    lose_prints()
    return asks, answers


def framed(body: bytes) -> bytes:
    """With its length in front, as `read_frame` wants it."""
    return len(body).to_bytes(4, "little") + body


def read_frame(pipe: BinaryIO) -> bytes | None:
    """One frame's body from a blocking pipe; None at its end."""
    head = pipe.read(4)
    body = pipe.read(size := int.from_bytes(head, "little")) if len(head) == 4 else b""
    return body if len(head) == 4 and len(body) == size else None


def _why(error: BaseException) -> str:
    return f"it calls sys.exit({error.code!r}) while it is loaded" if isinstance(error, SystemExit) else str(error)


async def awaited(value: Any) -> Any:
    """What came of a hook's awaitable, as a coroutine: a loop runs no other kind to its end."""
    return await value
