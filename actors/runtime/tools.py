"""Tools that ship: a calculator, a search over local texts, Python in the sandbox. What a model may call, and what answers.

Always true: a call gets a text, at most `ANSWER_CHARS` long; whatever is wrong with it is told in that text, for the model. No tool
runs in the worker's own process: what does not end there ends with its process, by a deadline, and nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

import msgspec

from actors.runtime import child
from actors.runtime.child import STDERR, die_with_parent
from actors.runtime.hooks import framed
from actors.runtime.run import Refused
from actors.runtime.sandbox import Sandbox
from actors.runtime.template import as_text

ANSWER_CHARS = 4000
BOOT_S = 60.0  # of the tools' process: it reads the corpus
CALL_S = 5.0  # of one call there
BUSY_S = 240.0  # of a call with its wait for a place, behind the loops that others wrote; then the model is told
TOLD_S = BUSY_S + 60.0  # for who asks: the tool's own word comes first
MOST_ASKED = 20_000  # characters of what the calculator or the search is asked


class Tool(msgspec.Struct, frozen=True):
    """`parameters`: name -> (JSON type, description); all are required."""

    name: str
    description: str
    parameters: dict[str, tuple[str, str]]

    @property
    def spec(self) -> dict[str, Any]:
        """As the OpenAI interface and chat templates describe it."""
        properties = {name: {"type": kind, "description": text} for name, (kind, text) in self.parameters.items()}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }


CALCULATOR = Tool("calculator", "Evaluates an arithmetic expression.", {"expression": ("string", "for example 12*(3+4)")})
SEARCH = Tool("search", "Finds the passages of the corpus that fit a query best.", {"query": ("string", "words to look for")})
PYTHON = Tool("python", "Runs Python code and returns what it prints.", {"code": ("string", "a complete script")})
SHIPPED: Mapping[str, Tool] = {tool.name: tool for tool in (CALCULATOR, SEARCH, PYTHON)}


class Toolbox:
    """The tools of these names, ready to be called. `corpus`: a text or JSONL file for `search`; `weak`: as the sandbox has it. Use
    as `async with`; entering raises Refused for what cannot be."""

    busy_s = BUSY_S

    def __init__(self, names: Sequence[str], *, corpus: str = "", python_deadline_s: float = 10.0, weak: bool = False) -> None:
        unknown = [name for name in names if name not in SHIPPED]
        if unknown:
            raise Refused(f"--tools {','.join(unknown)}: there is no such tool. Tools: {', '.join(SHIPPED)}.")
        self.specs = [SHIPPED[name].spec for name in names]
        self._names, self._corpus, self._python_deadline_s, self._weak = names, corpus, python_deadline_s, weak
        self._calls: dict[str, Callable[..., Awaitable[str]]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if apart := [name for name in self._names if name != "python"]:
            process = await self._stack.enter_async_context(ToolProcess(self._corpus if "search" in apart else None))
            self._calls |= {name: partial(process.call, name) for name in apart}
        if "python" in self._names:
            sandbox = await self._stack.enter_async_context(Sandbox(deadline_s=self._python_deadline_s, weak=self._weak))

            async def python(code: str) -> str:
                ran = await sandbox.run(code, echo=True)
                why = "" if ran.cause in ("ok", "raised") else f"\nended: {ran.cause}"
                return f"{ran.stdout}{ran.stderr}{why}".strip() or "(no output)"

            self._calls["python"] = python
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The answer to a call whose name and arguments fit `specs`."""
        texts = [as_text(value if isinstance(value, str) else json.dumps(value)) for value in arguments.values()]
        try:
            async with asyncio.timeout(self.busy_s):
                answer = as_text(await self._calls[name](*texts))
        except TimeoutError:
            return f"error: {name} was busy for {self.busy_s:g} s; this call was not made"
        return answer if len(answer) <= ANSWER_CHARS else f"{answer[:ANSWER_CHARS]}... ({len(answer)} characters)"


class ToolProcess:
    """The calculator and the search, in a process of their own (tools_child.py), which is started anew when it was ended. Use as
    `async with`; entering raises Refused."""

    def __init__(self, corpus: str | None, *, call_s: float = CALL_S) -> None:
        self._corpus, self._call_s = corpus, call_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        async with self._turn:
            await self._ready()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()

    async def call(self, name: str, argument: str) -> str:
        """A tool's answer; one that does not come in time, or died of the call, is told in its place."""
        if len(argument) > MOST_ASKED:
            return f"error: {name} takes at most {MOST_ASKED} characters, not {len(argument)}"
        async with self._turn:
            try:
                process = await self._ready()
                async with asyncio.timeout(self._call_s):
                    assert process.stdin is not None
                    process.stdin.write(framed(msgspec.msgpack.encode((name, argument))))
                    await process.stdin.drain()
                    return await _said(process)
            except TimeoutError:
                await self._end()
                return f"error: {name} did not answer within {self._call_s:g} s"
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._end()
                return f"error: {name} ended without an answer"
            except BaseException:  # its answer would be taken for the next call's
                await self._end()
                raise

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = process = await asyncio.create_subprocess_exec(
                *(*child.PYTHON, "actors.runtime.tools_child", *([] if self._corpus is None else [self._corpus])),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=STDERR,
                env={key: value for key, value in os.environ.items() if not key.startswith("MILES_ASYNC_")},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            async with asyncio.timeout(BOOT_S):
                refused = await _said(process)
            if refused:
                raise Refused(refused)
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _said(process: asyncio.subprocess.Process) -> str:
    """The next frame. Raises IncompleteReadError at the end of the pipe."""
    assert process.stdout is not None
    size = int.from_bytes(await process.stdout.readexactly(4), "little")
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=str)
