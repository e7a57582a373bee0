"""A program under examination: runs in a process of its own and answers what its examiner (`examiner.py`) asks of it, by a channel.

Nothing here is relied on by the examiner: the program may change all of it. Standard library only.
"""

from __future__ import annotations

import asyncio
import builtins
import inspect
import json
import operator
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from actors.runtime.plain import Word, decode, encode, handed

MOST_BYTES = 64 << 20  # of one message


class ProgramGone(BaseException):
    """The program's process has ended, or said what is no answer."""


class ExaminerChannel:
    """One end of the channel: asks, and answers what the other side asks meanwhile."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.mine: dict[int, Any] = {}  # what the other side knows by number
        self._numbers: dict[int, int] = {}
        self._one_at_a_time = threading.RLock()  # threads of a test; not what is asked in answer to a question

    def number(self, value: Any) -> int:
        """Of an object of ours; the same for the same object, which is kept."""
        if (found := self._numbers.get(id(value))) is None:
            found = self._numbers[id(value)] = len(self.mine) + 1
            self.mine[found] = value
        return found

    def send(self, word: Word) -> None:
        body = json.dumps(word).encode()
        data = memoryview(len(body).to_bytes(4, "little") + body)
        try:
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            raise ProgramGone("the other side has ended") from error

    def receive(self) -> Word:
        size = int.from_bytes(self._exactly(4), "little")
        if size > MOST_BYTES:
            raise ProgramGone(f"a message of {size:,} bytes")
        try:
            return json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise ProgramGone("what came is no message") from error

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                more = os.read(self._handle, min(size - len(data), 1 << 20))
            except OSError as error:
                raise ProgramGone("the other side has ended") from error
            if not more:
                raise ProgramGone("the program has ended")
            data += more
        return bytes(data)

    def ask(self, question: list[Word], serve: Callable[[list[Word]], Word]) -> list[Word]:
        """The reply; `serve` answers what is asked in between."""
        with self._one_at_a_time:
            self.send(["ask", *question])
            while True:
                said = self.receive()
                if isinstance(said, list) and said[:1] == ["ask"]:
                    self.send(["say", serve(said[1:])])
                elif isinstance(said, list) and len(said) == 2 and said[0] == "say" and isinstance(said[1], list) and said[1]:
                    return said[1]
                else:
                    raise ProgramGone("what came is no reply")


def answer(handle: int, space: dict[str, Any]) -> None:
    """Answer the examiner until it ends."""
    program = _Program(ExaminerChannel(handle), space)
    program.line.send(["say", [name for name in space if not name.startswith("__")]])
    while True:
        try:
            said = program.line.receive()
        except ProgramGone:
            return
        program.line.send(["say", program.served(said[1:])])


class _Theirs:
    """An object of the examiner's, in the program: called, and asked for its public attributes."""

    def __init__(self, program: _Program, number: int) -> None:
        self.__dict__["_asked"] = lambda *question: program.asked([question[0], number, *question[1:]])
        self.__dict__["_number"] = number

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._asked("call", list(args), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._asked("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._asked("set", name, value)


_BUILTINS = ("next", "len", "bool", "str", "repr", "round", "int", "float")


class _Program:
    def __init__(self, line: ExaminerChannel, space: dict[str, Any]) -> None:
        self.line, self._space = line, space

    def asked(self, question: list[Any]) -> Any:
        verb, number, *rest = question
        reply = self.line.ask([verb, number, handed(rest, self._word, _Theirs)], self.served)
        if reply[0] == "raised":
            kind = getattr(builtins, str(reply[1]), RuntimeError)
            raise kind(reply[2])
        return self._value(reply[1])

    def _word(self, value: Any) -> Word:
        if isinstance(value, _Theirs):
            return ["yours", value.__dict__["_number"]]
        kind, base = "object", ""
        if isinstance(value, type) and issubclass(value, BaseException):
            kind, base = "exception", builtin_of(value)
        elif inspect.iscoroutinefunction(value):
            kind = "async"
        elif isinstance(value, ModuleType):
            return ["import", value.__name__, "", self.line.number(value)]
        elif callable(value):
            home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
            if isinstance(home, str) and home != "__main__" and getattr(sys.modules.get(home), name, None) is value:
                return ["import", home, name, self.line.number(value)]
        return ["mine", self.line.number(value), kind, str(getattr(value, "__name__", type(value).__name__)), base]

    def _value(self, word: Word) -> Any:
        def other(kind: str, rest: list[Word]) -> Any:
            return self.line.mine[rest[0]] if kind == "yours" else _Theirs(self, rest[0])

        return decode(word, other)

    def served(self, question: list[Word]) -> Word:
        try:
            verb, number, words = question
            args = self._value(words)
            target = self._space[number] if verb == "name" else self.line.mine[number]
            if verb == "name":
                return ["gave", self._word(target) if isinstance(target, ModuleType) else encode(target, self._word), []]
            value = self._done(verb, target, args)
            changed = [encode(one, self._word) if type(one) in (list, dict, set, bytearray) else None for one in args[0]]
            return ["gave", encode(value, self._word), changed if verb == "call" else []]
        except BaseException as error:  # noqa: BLE001 - it is the test's to judge
            return ["raised", builtin_of(type(error)), str(error), self.line.number(type(error)), type(error).__name__]

    @staticmethod
    def _done(verb: str, target: Any, args: list[Any]) -> Any:
        given = args[0]
        match verb:
            case "call":
                value = target(*given, **args[1])
                return asyncio.run(value) if inspect.iscoroutine(value) else value
            case "get":
                return getattr(target, given[0])
            case "set":
                return setattr(target, given[0], given[1])
            case "iter":
                return iter(target)
            case "isinstance":
                return isinstance(given[0], target)
        return getattr(builtins if verb in _BUILTINS else operator, verb)(target, *given)


def builtin_of(kind: type[BaseException]) -> str:
    """The nearest class that the other side knows too."""
    return next(one.__name__ for one in kind.__mro__ if getattr(builtins, one.__name__, None) is one)
