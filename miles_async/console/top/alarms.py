"""Alarms that stay until somebody has seen them (pure).

What the doctor finds now and every warning and error on record since the view began. One that has gone by itself stays, with its
time, until it is acknowledged; one that comes again after that is new.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LEVELS = ("error", "warning")


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


class Alarms:
    """Give each state's `alarms` and `events` to `see`."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str], Alarm] = {}
        self._had: set[tuple[float, str, str]] | None = None  # events of the look before

    def see(self, alarms: Iterable[dict[str, Any]], events: Iterable[dict[str, Any]]) -> None:
        """Take in one look. On the first one the newest faults on record count, later ones all that are new."""
        present = set()
        for one in alarms:
            if one["now"]:
                key = (str(one["who"]), str(one["about"]))
                present.add(key)
                known = self._all.get(key)
                if known is None or not known.now:
                    self._all[key] = Alarm(key[0], one["level"], one["text"], one["wall"], now=True)
                else:
                    known.level, known.text = one["level"], one["text"]
            elif self._had is None:
                self._told(str(one["who"]), one)
        for key, alarm in list(self._all.items()):
            alarm.now = key in present
            if alarm.seen and not alarm.now:
                del self._all[key]
        told = {(e["wall"], str(e["what"]), str(e["text"])): e for e in events if e["level"] in LEVELS}
        if self._had is not None:
            for fresh in sorted(told.keys() - self._had):
                self._told(fresh[1], told[fresh])
        self._had = set(told)

    def _told(self, who: str, record: dict[str, Any]) -> None:
        known = self._all.get((who, "on record"))
        times = known.times + 1 if known is not None and not known.seen else 1
        self._all[who, "on record"] = Alarm(
            who, record["level"], record["text"], record["wall"], now=False, times=times
        )

    def open(self) -> list[Alarm]:
        """Those nobody has acknowledged: errors first, then the newest."""
        return sorted((a for a in self._all.values() if not a.seen), key=lambda a: (LEVELS.index(a.level), -a.since))

    def known(self) -> int:
        """How many still hold although they were acknowledged."""
        return sum(a.seen for a in self._all.values())

    def acknowledge(self, alarms: Iterable[Alarm]) -> None:
        """Somebody has seen these; one that no longer holds is gone, one that does is quiet until it has gone and come again."""
        for alarm in alarms:
            alarm.seen = True
        self._all = {key: a for key, a in self._all.items() if a.now or not a.seen}
