"""Alarms that stay until somebody has seen them (pure, but for the file of what was seen).

What the doctor finds now and every warning and error on record since the view began. One that has gone by itself stays, with its
time, until it is acknowledged; one that comes again after that is new. The next view of the run knows what was acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bus.errors import UNREADABLE

LEVELS = ("error", "warning")
FILE = "alarms_seen.json"  # in the run's folder
MOST_KEPT = 500
SAME_S = 5.0  # beginnings so close together are one: they are found as "now" less "for so long"
Seen = dict[str, tuple[float, str]]
"""Who and about what, in one line -> when the alarm that was acknowledged began, and its text."""


def read_seen(file: Path | None) -> Seen:
    """What earlier views acknowledged; nothing where there is no file, or it is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Seen) if file is not None else {}
    except (OSError, *UNREADABLE):
        return {}


def write_seen(file: Path | None, seen: Seen) -> None:
    """Whole or not at all. A folder that may not be written to costs only that the next view asks again."""
    with suppress(OSError):
        if file is not None:
            new = file.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(seen))
            new.replace(file)


@dataclass(slots=True)
class Alarm:
    """`since`: wall seconds at which it began, of a fault on record when it was told last. `now`: it still is so. `times`:
    how often it was told."""

    who: str
    level: str
    text: str
    since: float
    now: bool
    times: int = 1
    seen: bool = False
    rank: int = 0  # among what holds now: the doctor's order, causes before what follows from them


class Alarms:
    """Give each state's `alarms` and `events` to `see`. `was_seen`: of earlier views; `acknowledge` adds to it."""

    def __init__(self, was_seen: Seen | None = None) -> None:
        self.was_seen = dict(was_seen or {})
        self._all: dict[tuple[str, str], Alarm] = {}
        self._had: set[tuple[float, str, str]] | None = None  # events of the look before

    def see(self, alarms: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]]) -> None:
        """Take in one look. On the first one the newest faults on record count, later ones all that are new."""
        present = set()
        for rank, one in enumerate(alarms):
            if one["now"]:
                key = (str(one["who"]), str(one["about"]))
                present.add(key)
                known = self._all.get(key)
                if known is None or not known.now:
                    fresh = Alarm(key[0], one["level"], one["text"], one["wall"], now=True)
                    fresh.seen = self._acknowledged(key, fresh)
                    self._all[key] = fresh
                else:
                    known.level, known.text = one["level"], one["text"]
                self._all[key].rank = rank
            elif self._had is None:
                self._told(str(one["who"]), one)
        for key, alarm in list(self._all.items()):
            alarm.now = key in present
            if alarm.seen and not alarm.now:
                del self._all[key]
                self.was_seen.pop(_name(key), None)
        told = {(e["wall"], str(e["what"]), str(e["text"])): e for e in events if e["level"] in LEVELS}
        if self._had is not None:
            for event in sorted(told.keys() - self._had):
                self._told(event[1], told[event])
        self._had = set(told)

    def _told(self, who: str, record: dict[str, Any]) -> None:
        known = self._all.get((who, "on record"))
        times = known.times + 1 if known is not None and not known.seen else 1
        fresh = Alarm(who, record["level"], record["text"], record["wall"], now=False, times=times)
        if not self._acknowledged((who, "on record"), fresh):
            self._all[who, "on record"] = fresh

    def _acknowledged(self, key: tuple[str, str], alarm: Alarm) -> bool:
        """Whether an earlier view has: this one, and not a later one of its kind. Some have no beginning but now; a text tells."""
        since, text = self.was_seen.get(_name(key), (float("-inf"), ""))
        return alarm.since <= since + (SAME_S if alarm.now else 0.0) or (alarm.now and alarm.text == text)

    def open(self) -> list[Alarm]:
        """Those nobody has acknowledged: errors first; of them what holds now, as the doctor orders it, then the newest."""
        found = (alarm for alarm in self._all.values() if not alarm.seen)
        return sorted(found, key=lambda a: (LEVELS.index(a.level), not a.now, a.rank if a.now else -a.since))

    def known(self) -> int:
        """How many still hold although they were acknowledged."""
        return sum(a.seen for a in self._all.values())

    def acknowledge(self, alarms: Iterable[Alarm]) -> None:
        """Somebody has seen these; one that no longer holds is gone, one that does is quiet until it has gone and come again."""
        for alarm in alarms:
            alarm.seen = True
        for key, alarm in self._all.items():
            if alarm.seen:
                self.was_seen[_name(key)] = (alarm.since, alarm.text)
        self.was_seen = dict(sorted(self.was_seen.items(), key=lambda item: item[1][0])[-MOST_KEPT:])
        self._all = {key: a for key, a in self._all.items() if a.now or not a.seen}


def _name(key: tuple[str, str]) -> str:
    return " | ".join(key)
