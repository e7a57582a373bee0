"""A stand-in for typer, and for Miles' way to make a command of a dataclass: commands take the words of a command line.

Standard library only; it is handed to the sandbox as text (`recipe.py`). Always true: a word that no command takes raises Usage.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import os
import pathlib
import sys
import types
import typing


class Usage(Exception):
    """The recipe does not take these arguments."""


class Option:
    def __init__(self, default: object = ..., *names: object, **more: object) -> None:
        self.default, self.more = default, more
        self.names = [str(name) for name in names]
        if isinstance(default, str) and default.startswith("-"):
            self.default, self.names = ..., [default, *self.names]


@dataclasses.dataclass
class Parameter:
    name: str
    kind: object
    default: object
    names: list[str]
    variable: str = ""


def plain(kind: object) -> tuple[object, list[object]]:
    """An annotation without Annotated, and what was annotated."""
    if typing.get_origin(kind) is typing.Annotated:
        first, *rest = typing.get_args(kind)
        return first, rest
    return kind, []


def converted(text: str, kind: object, name: str) -> object:
    """The text of an argument as its annotation has it."""
    kind, _ = plain(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        for one in inner:
            if str(one) == text:
                return one
        raise Usage(f"{name} is one of {', '.join(map(str, inner))}, not {text!r}")
    if origin is typing.Union or origin is types.UnionType:
        return converted(text, next(one for one in inner if one is not type(None)), name)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise Usage(f"{name} is true or false, not {text!r}")
        return text.lower() in ("true", "1", "yes")
    try:
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return kind(text)
        return kind(text) if kind in (int, float, pathlib.Path) else text
    except ValueError:
        raise Usage(f"{name} does not take {text!r}") from None


def parameters(function: typing.Callable[..., object]) -> list[Parameter]:
    """What a command takes."""
    ready = getattr(function, "of_a_dataclass", None)
    if ready is not None:
        return list(ready)
    hints = typing.get_type_hints(function, include_extras=True)
    found = []
    for name, one in inspect.signature(function).parameters.items():
        kind, extra = plain(hints.get(name, str))
        option = next((item for item in [one.default, *extra] if isinstance(item, Option)), Option())
        default = option.default if isinstance(one.default, Option) else one.default
        default = ... if default is inspect.Parameter.empty else default
        found.append(Parameter(name, kind, default, option.names))
    return found


def call(function: typing.Callable[..., object], words: list[str]) -> object:
    """Run a command with the words of its command line."""
    taken, rest = {one.name: one for one in parameters(function)}, list(words)
    given: dict[str, object] = {}
    by_name: dict[str, tuple[Parameter, bool]] = {}
    for one in taken.values():
        name = one.name.replace("_", "-")
        for said in one.names or [f"--{name}", f"--no-{name}"]:
            for half, value in zip(said.split("/"), (True, False), strict=False):
                by_name[half.strip()] = (
                    one,
                    value and not (not one.names and said.startswith("--no-") and one.kind is bool),
                )
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if name not in by_name:
            free = [one for one in taken.values() if one.default is ... and one.name not in given]
            if word.startswith("-") or not free:
                raise Usage(f"it takes no {word}; it takes {', '.join(said for said in by_name if not said.startswith('--no-'))}")
            given[free[0].name] = converted(word, free[0].kind, free[0].name)
            continue
        one, value = by_name[name]
        if plain(one.kind)[0] is bool and not equals:
            given[one.name] = value
            continue
        if not equals and not rest:
            raise Usage(f"{name} needs a value")
        given[one.name] = converted(text if equals else rest.pop(0), one.kind, name)
    for one in taken.values():
        if one.name in given:
            continue
        if one.variable and (text_of := os.environ.get(one.variable)) is not None:
            given[one.name] = converted(text_of, one.kind, one.variable)
        elif one.default is ...:
            if getattr(one.kind, "__name__", "") != "Context":
                raise Usage(f"it needs --{one.name.replace('_', '-')}")
            given[one.name] = types.SimpleNamespace(invoked_subcommand=None)
        else:
            given[one.name] = one.default
    return function(**given)


def dataclass_cli(function: typing.Any = None, *, env_var_prefix: str = "MILES_SCRIPT_") -> typing.Any:
    """A command whose one parameter is a dataclass takes that one's fields."""
    if function is None:
        return functools.partial(dataclass_cli, env_var_prefix=env_var_prefix)
    made = typing.get_type_hints(function)[next(iter(inspect.signature(function).parameters))]
    kinds = typing.get_type_hints(made, include_extras=True)
    found = []
    for one in dataclasses.fields(made):
        if not one.init:
            continue
        default: object = one.default if one.default is not dataclasses.MISSING else ...
        if one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        variable = f"{env_var_prefix}{one.name.upper()}" if env_var_prefix else ""
        found.append(Parameter(one.name, kinds[one.name], default, [], variable))

    @functools.wraps(function)
    def wrapped(**fields: object) -> object:
        return function(made(**fields))

    wrapped.of_a_dataclass = found  # type: ignore[attr-defined]
    return wrapped


class Typer:
    def __init__(self, **_: object) -> None:
        self.commands: dict[str, typing.Callable[..., object]] = {}
        self.before: typing.Callable[..., object] | None = None
        self.alone = False

    def command(self, name: str | None = None, **_: object) -> typing.Callable[..., object]:
        def keep(function: typing.Callable[..., object]) -> object:
            self.commands[name or function.__name__.replace("_", "-")] = function
            return function

        return keep

    def callback(self, invoke_without_command: bool = False, **_: object) -> typing.Callable[..., object]:
        def keep(function: typing.Callable[..., object]) -> object:
            self.before, self.alone = function, invoke_without_command
            return function

        return keep

    def __call__(self, *_: object, **__: object) -> None:
        words = sys.argv[1:]
        if words and words[0] in self.commands:
            call(self.commands[words[0]], words[1:])
        elif len(self.commands) == 1:
            call(next(iter(self.commands.values())), words)
        elif self.alone and self.before is not None:
            call(self.before, words)
        else:
            raise Usage(f"it has the commands {', '.join(self.commands)}: name one")


class BadParameter(Exception):
    pass
