"""What records of kinds share: engines, transports, training backends, launchers, trackers.

A kind is one frozen record, which with the adapters that it opens is all there is of it. Everything else asks the record: nobody
outside its folder knows its name. Records need msgspec and the standard library alone, since settings read them: what is heavy
is imported in the method that opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec


class RuleBroken(NamedTuple):
    """A setting that a kind cannot work with: its name, its value, why, and what to do instead."""

    field: str
    value: object
    why: str
    remedy: str


class Lack(NamedTuple):
    """Something of a host, before a start. `level`: ok, note or wrong; `text`: the fact, where something is amiss also what it
    costs and the remedy."""

    level: str
    what: str
    text: str


class HostFacts(NamedTuple):
    """What a record may ask of this host before a start. `version`: of an installed package, empty without it; `shown`: bytes as
    an operator reads them; `gpus`: how many a process started here sees."""

    version: Callable[[str], str]
    shown: Callable[[float], str]
    gpus: int


class UnknownKind(ValueError):
    """No record has this name, and it is not the path of one; in one line."""


class KindRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record. `settings`: anything with the run's settings as attributes."""

    name: str
    """What a user calls it; of a user's own, anything."""
    told: str = ""
    """What --help says of it."""
    extra: str = ""
    """`pip install miles-async[EXTRA]` brings what it needs; empty = nothing is missing."""

    def lacks(self) -> str:
        """What a record must have and this one has not, as the rest of a sentence; empty = it is whole."""
        return ""

    def rules(self, settings: Any) -> Iterator[RuleBroken]:
        """What a run must not say with it; the first is told (pure)."""
        yield from ()

    def notes(self, settings: Any) -> Iterator[str]:
        """What a run may say with it and should know, one line each (pure)."""
        yield from ()

    def findings(self, settings: Any, host: HostFacts) -> Iterator[Lack]:
        """What of it this host has. Reads versions, files and variables; loads no library, starts nothing."""
        yield from ()


K = TypeVar("K", bound=KindRecord)


def help_of(kinds: Mapping[str, KindRecord]) -> str:
    """What --help says of all that ship."""
    return "; ".join(f"{name}: {kind.told}" for name, kind in kinds.items())


@cache
def own_kind(path: str, kind: type[K]) -> K:
    """The record of the user's own at a dotted path (my.module:KIND, my.module.KIND or file.py:KIND). Raises UnknownKind."""
    from actors.runtime.hooks import load_named

    try:
        found = load_named(path)
    except Exception as error:  # whatever a module of the user's raises when it is loaded
        raise UnknownKind(" ".join(str(error).split())) from error
    if not isinstance(found, kind):
        raise UnknownKind(f"{path} is a {type(found).__name__}, no {kind.__name__}")
    if lacks := found.lacks():
        raise UnknownKind(f"{path} {lacks}")
    return found
