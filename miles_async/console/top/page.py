"""What a hub says of a run, gathered for drawing: `miles-async top` and the launcher's live view draw from it.

Owns  which alarms were seen    Always true: it asks the hub, and nobody else.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from miles_async.console.figures import FRESH_S
from miles_async.console.top import parts
from miles_async.console.top.alarms import FILE, Alarm, Alarms, read_seen, write_seen
from miles_async.console.web.hub import Hub

FEW, MANY, TALL = 2, 6, 36  # alarms shown on small and on tall screens; rows from which a screen is tall
LOW = 12  # rows up to which one alarm must do: where none are left for a view, it cannot be opened


class Page:
    """Enter it, `follow` in a loop, draw after each. `state` is empty until the first look. `note`: what to say below the head.
    `seen_in`: the run's folder, which keeps the alarms that were acknowledged."""

    def __init__(self, hub: Hub, note: str = "", seen_in: Path | None = None) -> None:
        self._file = seen_in / FILE if seen_in is not None and seen_in.is_dir() else None
        self.hub, self.alarms, self.note = hub, Alarms(read_seen(self._file)), note
        self.state: dict[str, Any] = {}
        self.shown: list[Alarm] = []  # alarms that the newest drawing has
        self._seen = 0
        self._columns: tuple[int, dict[str, Any]] = (-1, {"step": [], "columns": {}})

    def __enter__(self) -> Page:
        self.hub.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.hub.leave()

    async def follow(self, wait_s: float) -> None:
        """Take in the next look, or go on without it after a while, since times go on."""
        self._seen, news = await self.hub.news(self._seen, wait_s)
        self.state |= {name: msgspec.json.decode(body) for name, body in news.items()}
        if "run" in self.state:
            self.alarms.see(self.state["alarms"], self.state["events"])

    def acknowledge(self) -> None:
        """The alarms of the newest drawing were seen."""
        self.alarms.acknowledge(self.shown)
        write_seen(self._file, self.alarms.was_seen)

    @property
    def wall(self) -> float:
        return max(self.hub.wall, 0.0)

    def head(self, width: int) -> Text:
        """The run in one line; before the first look what is waited for."""
        if "run" in self.state:
            return parts.head(self.state, self.wall, width, self.note)
        if silent := self.state.get("silent"):
            return Text(f"the bus has not answered for {silent} s; trying again", style="bold red")
        return Text("waiting for the bus", style="dim")

    def alarm_lines(self, width: int, height: int, stay_s: float = inf) -> Text:
        """Empty where nothing is wrong. `stay_s`: of those that no longer hold, where nobody can say that they were seen."""
        most = MANY if height >= TALL else FEW if height > LOW else 1
        found = [one for one in self.alarms.open() if one.now or self.wall - one.since < stay_s]
        lines, self.shown = parts.alarm_lines(found, self.alarms.known(), self.wall, width, most)
        return lines

    def overview(self, width: int, height: int, *, cut: bool = False) -> RenderableType:
        """Needs a look. The columns of its curves are made again when there is a new step. `cut`: see `parts.overview`."""
        step, tall = self.state["run"]["step"], height >= TALL
        if self._columns[0] != step:
            self._columns = (step, self.hub.curves.since(0))
        curves, said = self._columns[1], self.hub.word.wall
        columns, steps = curves["columns"], curves["step"]
        return parts.overview(self.state, columns, steps, self.wall, width, tall=tall, said=said, cut=cut)

    def whole(self, width: int, height: int) -> RenderableType:
        """Head, alarms and overview on one screen; on a tall one every actor too."""
        if "run" not in self.state:
            return self.head(width)
        alarms, tall = self.alarm_lines(width, height, FRESH_S), height >= TALL
        actors = [Text(), parts.engines(self.state, self.wall, width)] if tall else []
        overview = self.overview(width, height, cut=not tall)
        return Group(self.head(width), *([alarms] if alarms else []), overview, *actors)
