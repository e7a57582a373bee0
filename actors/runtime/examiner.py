"""The examiner of a program: runs the tests' text in a confined process of its own, to which the program speaks in plain data only.

A name that the text does not define itself, and that is no builtin, is the program's: calls of it go to the program's process with
their arguments, and what comes back is decoded into plain values. Always true: what a test compares with stays in the examiner, and
so does the verdict, which is that its text came to its end.

What is no plain value (an instance of a class of the program's) stays where it is, and is a `Remote` here: calls, attributes, items
and iteration are asked of the program, and so is what two such objects make of each other. One that is compared or calculated with
a value of the test's is unequal, or an error: the program would only have to say "equal", or "no difference".

What a program can still do: see the arguments that it is called with, count its calls, change arguments that are lists, and answer
as it likes where a test takes its word: a plain `True`, an object's truth, or what two objects of its own make of each other.
Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, NoReturn

from actors.runtime.examined import ExaminerChannel, ProgramGone, builtin_of
from actors.runtime.plain import Unsendable, Word, decode, encode, handed

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
_SHORT = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "pytest": "pytest"}
_ORDERS = ("lt", "le", "gt", "ge")
_ALONE = ("neg", "pos", "abs", "invert")
_TRUE_OR_FALSE = {
    name for kind in (str, bytes, set, float) for name in dir(kind) if name.startswith("is") or name.endswith("swith")
} | {"equals", "all", "any"}  # methods of plain values: of an object in their place they would take the program's word


class Remote:
    """An object of the program's."""

    def __init__(self, space: Space, number: int, name: str) -> None:
        self.__dict__.update(_Remote__space=space, _Remote__number=number, _Remote__name=name)

    def __ask(self, verb: str, *given: Any, named: dict[str, Any] | None = None) -> Any:
        return self.__space.asked(verb, self.__number, [list(given), named or {}])

    def __of_both(self, verb: str, other: Any, what: str) -> Any:
        if not isinstance(other, Remote):
            raise TypeError(f"{what} of an object of the program's ({self.__name}) and a value of the test's is the program's word")
        return self.__ask(verb, other)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__ask("call", *args, named=named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _TRUE_OR_FALSE:
            raise TypeError(f"{name} of an object of the program's ({self.__name}) is the program's word")
        return self.__ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask("set", name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and (self.__number == number_of(other) or self.__ask("eq", other) is True)

    def __hash__(self) -> int:
        return hash((Remote, self.__number))

    def __contains__(self, value: Any) -> NoReturn:
        raise TypeError(f"whether an object of the program's ({self.__name}) contains a value is the program's word")

    def __iter__(self) -> Any:
        found = self.__ask("iter")
        return found if isinstance(found, Remote) else iter(found)

    def __next__(self) -> Any:
        return self.__ask("next")

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self.__ask("delitem", key)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self.__ask("isinstance", value) is True

    def __enter__(self) -> Any:
        return self.__ask("get", "__enter__")()

    def __exit__(self, *exc: object) -> bool:
        return self.__ask("get", "__exit__")(None, None, None) is True

    def __len__(self) -> int:
        return _exactly(self.__ask("len"), int)

    def __bool__(self) -> bool:
        return _exactly(self.__ask("bool"), bool)

    def __str__(self) -> str:
        return _exactly(self.__ask("str"), str)

    def __repr__(self) -> str:
        return _exactly(self.__ask("repr"), str)

    def __int__(self) -> int:
        return _exactly(self.__ask("int"), int)

    def __float__(self) -> float:
        return _exactly(self.__ask("float"), float)

    def __round__(self, *digits: int) -> Any:
        return self.__ask("round", *digits)


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the program gave a {type(value).__name__} where Python gives a {kind.__name__}")
    return value


def number_of(remote: Remote) -> int:
    return int(remote.__dict__["_Remote__number"])


def _give_operators() -> None:
    def both(verb: str) -> Callable[[Remote, Any], Any]:
        return lambda self, other: self._Remote__of_both(verb, other, verb.strip("_"))

    def alone(verb: str) -> Callable[[Remote], Any]:
        return lambda self: self._Remote__ask(verb)

    for verb in _OPERATORS:
        setattr(Remote, f"__{verb.strip('_')}__", both(verb))
        setattr(Remote, f"__r{verb.strip('_')}__", both(verb))  # comes to be asked with a value of the test's only
    for verb in _ORDERS:
        setattr(Remote, f"__{verb}__", both(verb))
    for verb in _ALONE:
        setattr(Remote, f"__{verb}__", alone(verb))


_give_operators()


def _is_helper(name: str) -> bool:
    """Whether tests may use this name to say what they expect: a builtin, a module of Python's library, ..."""
    return hasattr(builtins, name) or name in sys.stdlib_module_names or name in _SHORT or name == "isclose"


def _shadows(tests: str, names: set[str]) -> set[str]:
    """Helpers' names that are the program's all the same. It may define `sum` because that is what is asked for; or `abs`, or
    `math`, because the tests use it. The first has no other name in the tests, and is the only one called by such a name."""
    nodes = list(ast.walk(ast.parse(tests)))
    holders = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}  # the `math` of `math.isclose`
    used = {node.id for node in nodes if isinstance(node, ast.Name)} & names
    if any(not _is_helper(name) for name in used):
        return set()
    found = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in holders} & names
    return found if len(found) == 1 else set() if found else names  # named by none: asked for by its text


def _module(name: str) -> ModuleType:
    """As `import` gives it. Raises ProgramGone for one that would end this process (`idlelib.idle`, `unittest.__main__`)."""
    try:
        return importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - the program chose what is imported
        raise ProgramGone(f"the program names a module that cannot be imported: {type(error).__name__}") from None


class MainModule(ModuleType):
    """The module `__main__` of the tests, where `unittest.main` looks for them."""

    def __init__(self, space: Space) -> None:
        super().__init__("__main__")
        self.__dict__["_space"] = space

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_space"]:
            return self.__dict__["_space"][name]
        raise AttributeError(name)

    def __dir__(self) -> list[str]:
        return list(self.__dict__["_space"])


class Space(dict[str, Any]):
    """The names that tests see: their own, builtins, and those of the program. Raises ProgramGone when that did not load."""

    def __init__(self, handle: int, tests: str) -> None:
        super().__init__(__name__="__main__")
        self._line = ExaminerChannel(handle)
        said = self._line.receive()
        names = said[1] if isinstance(said, list) and len(said) == 2 and isinstance(said[1], list) else []
        self._names = {name for name in names if isinstance(name, str)}
        self._raised: dict[int, type[Exception]] = {}
        self._shadows = _shadows(tests, self._names)

    def __missing__(self, name: str) -> Any:
        if _is_helper(name) and name not in self._shadows:
            if name in self._names and not hasattr(builtins, name):
                return math.isclose if name == "isclose" else importlib.import_module(_SHORT.get(name, name))
            raise KeyError(name)  # it is looked up among the builtins then
        if name not in self._names:
            raise KeyError(name)
        return self.asked("name", name, [[]])

    def asked(self, verb: str, number: int | str, args: list[Any]) -> Any:
        reply = self._line.ask([verb, number, handed(args, self._word, Remote)], self._served)
        try:
            if reply[0] == "raised":
                error = self._error(*reply[1:])
                if isinstance(error, StopIteration) and verb != "next":  # it would end the test's own loop
                    raise RuntimeError("the program raised StopIteration")
                raise error
            value = self._value(reply[1], str(number) if verb == "name" else "")
            for mine, word in zip(args[0], reply[2], strict=False):
                if word is not None:
                    _become(mine, self._value(word, ""))
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            if reply[0] == "raised":
                raise
            raise ProgramGone(f"what the program gave is no value: {error}") from None
        return value

    def _word(self, value: Any) -> Word:
        if isinstance(value, Remote):
            return ["yours", number_of(value)]
        if callable(value) or type(value).__module__ == "__main__":
            return ["mine", self._line.number(value)]
        raise Unsendable(f"a test hands the program a {type(value).__name__}, which is no plain value")

    def _value(self, word: Word, asked_for: str) -> Any:
        def other(kind: str, rest: list[Word]) -> Any:
            if kind == "yours":
                return self._line.mine[rest[0]]
            if kind == "import":
                return self._imported(asked_for, *rest)
            if kind == "mine" and isinstance(rest[0], int):
                number, what, name, base = rest
                if what == "exception":
                    return self._error_class(number, str(name), str(base))
                found = Remote(self, number, str(name)[:80])
                return _coroutine_function(found) if what == "async" else found
            raise ValueError(f"no kind {str(kind)[:40]!r}")

        return decode(word, other)

    def _imported(self, asked_for: str, module: str, name: str, number: int) -> Any:
        """What the program imported from Python's own library or, with a short name for it, as a module: as we import it."""
        if name and name == asked_for and module.partition(".")[0] in sys.stdlib_module_names:
            return getattr(_module(module), name)
        if not name and asked_for and (asked_for == module or importlib.util.find_spec(asked_for) is None):
            return _module(module)
        return Remote(self, number, name or module)

    def _error_class(self, number: int, name: str, base: str) -> type[Exception]:
        kind = getattr(builtins, base, None)
        kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception
        if kind.__name__ == name:
            return kind
        return self._raised.setdefault(number, type(name, (kind,), {}))

    def _error(self, base: str, text: str, number: int, name: str) -> Exception:
        kind = self._error_class(number, str(name), str(base))
        try:
            return kind(str(text))
        except TypeError:  # some of Python's own want more than a text
            return RuntimeError(f"{name}: {text}")

    def _served(self, question: list[Word]) -> Word:
        """What the program asks of an object that a test handed it: a call, or an attribute of a class of the test's own."""
        try:
            verb, number, words = question
            target, args = self._line.mine[number], self._value(words, "")
            if verb == "call":
                return ["gave", encode(target(*args[0], **args[1]), self._word)]
            name = str(args[0])
            if name.startswith("_") or isinstance(target, type) or type(target).__module__ != "__main__":
                raise AttributeError(name)
            if verb == "set":
                setattr(target, name, args[1])
                return ["gave", None]
            return ["gave", encode(getattr(target, name), self._word)]
        except ProgramGone:
            raise
        except BaseException as error:  # noqa: BLE001 - told where it was asked; that a test handed over `sys.exit` ends no test
            return ["raised", builtin_of(type(error)), str(error)]


def _become(mine: Any, now: Any) -> None:
    """What a call did to an argument: lists and the like are changed in place."""
    if type(mine) is not type(now) or type(mine) not in (list, dict, set, bytearray) or mine == now:
        return
    mine.clear()
    (mine.extend if isinstance(mine, list | bytearray) else mine.update)(now)


def _coroutine_function(found: Remote) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(*args: Any, **named: Any) -> Any:
        return found(*args, **named)

    return call
