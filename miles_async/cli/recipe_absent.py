"""What stands in the sandbox for packages and values that are not there, and the list of what a recipe would have started.

Standard library only; it is handed to the sandbox as text (`recipe.py`). Always true: an `Absent` may be named, called and printed,
and decides nothing: where its value matters, NotThere says which.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing

OPEN, CLOSE = "\ue000", "\ue001"  # around the name of what is absent, in a text that it has become part of


class NotThere(Exception):
    """The recipe needs something that is not there."""


class Absent(types.ModuleType):
    """Stands for a package or its value that is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> typing.Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *given: typing.Any, **keywords: typing.Any) -> typing.Any:
        if len(given) == 1 and not keywords and inspect.isfunction(given[0]):
            return given[0]  # a decorator
        return Absent(self.__name__ if self.__name__.endswith("()") else f"{self.__name__}()")

    def __getitem__(self, key: object) -> Absent:
        return Absent(f"{self.__name__}[{key!r}]")

    def __str__(self) -> str:
        return f"{OPEN}{self.__name__}{CLOSE}"

    __repr__ = __str__

    def __format__(self, how: str) -> str:
        return str(self)

    def __enter__(self) -> Absent:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (Stem,)

    def __hash__(self) -> int:
        return id(self)

    def __or__(self, other: object) -> typing.Any:
        return typing.Any  # in an annotation

    __ror__ = __or__

    def _decides(self, *_: object) -> typing.Any:
        raise NotThere(f"{self.__name__} decides, and is not there")

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = _decides
    __eq__ = __ne__ = __contains__ = _decides
    __lt__ = __gt__ = __le__ = __ge__ = __add__ = __radd__ = __mul__ = __sub__ = _decides

    def strip(self, *_: object) -> Absent:
        return self


class Stem:
    """What a class is made from whose base is not there."""


class Launches:
    """What the recipe would have started, as it goes."""

    def __init__(self) -> None:
        self.trains: list[dict[str, typing.Any]] = []
        self.not_run: list[list[object]] = []
        self.asked: dict[str, None] = {}  # whether there is such a file

    def skip(self, what: object, answer: object = None) -> object:
        text = " ".join(map(str, what)) if isinstance(what, list | tuple) else str(what)
        self.not_run.append([text[:200], line_of_recipe()])
        return answer


LAUNCHES = Launches()
RECIPE = [""]


def line_of_recipe() -> int:
    """The line of the recipe that is at work: the outermost one below its module, if there is one."""
    frame = sys._getframe()
    found = 0
    while frame is not None:
        if frame.f_code.co_filename == RECIPE[0]:
            found = frame.f_lineno
            break
        frame = frame.f_back  # type: ignore[assignment]
    return found
