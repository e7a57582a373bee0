"""What a user did wrong in a settings file, a flag or the outside world, as one line.

A SettingsError ends the command with exit status 2 and no traceback: it is raised only before a run starts.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

_NO_VALUE = object()
P = ParamSpec("P")
R = TypeVar("R")


def parsed(read: Callable[[str], Any], text: str) -> Any:
    """What a parser of TOML or JSON makes of a text. ValueError also for what is nested deeper than it goes."""
    try:
        return read(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class SettingsError(ValueError):
    """A setting that must not be used. The text is one line: field, value, rule, remedy."""

    exit_status = 2

    def __init__(self, problem: str, *, field: str = "", value: object = _NO_VALUE, remedy: str = "") -> None:
        self.field = field
        shown = "" if value is _NO_VALUE else f" = {show(value)}"
        head = f"{field}{shown}: " if field else ""
        tail = f" {remedy}" if remedy else ""
        super().__init__(" ".join(f"{head}{problem.rstrip('.')}.{tail}".split("\n")))
        self.each: tuple[SettingsError, ...] = (self,)


class SeveralErrors(SettingsError):
    """Several refusals at once, one line each. `field` is that of the first."""

    def __init__(self, each: Sequence[SettingsError]) -> None:
        ValueError.__init__(self, "\n".join(map(str, each)))
        self.field = each[0].field
        self.each = tuple(each)


class Refusals:
    """Collects what is wrong, so that an operator hears all of it at once."""

    def __init__(self) -> None:
        self.found: list[SettingsError] = []

    def attempt(self, check: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What `check` returns; None where it refused."""
        try:
            return check(*args, **kwargs)
        except SettingsError as error:
            self.found += error.each
            return None

    def raise_all(self) -> None:
        """SettingsError if anything was refused."""
        if found := list({str(error): error for error in self.found}.values()):  # two checks may look at one thing
            raise found[0] if len(found) == 1 else SeveralErrors(found)


def refusal(field: str, value: object, problem: str, remedy: str) -> SettingsError:
    """The error of a rule that a field's value breaks."""
    return SettingsError(problem, field=field, value=value, remedy=remedy)


def show(value: object) -> str:
    """A value as the user would write it, cut to one readable piece."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "(unset)"
    text = repr(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def nearest(name: str, valid: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A sentence with the valid name closest to `name`; empty when none is close. `cutoff`: how alike they are at least, 1 = the
    same."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f"Did you mean {close[0]}?" if close else ""


def listing(names: Iterable[str]) -> str:
    """`a, b or c`."""
    items = list(names)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} or {items[-1]}"
