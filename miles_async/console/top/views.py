"""The views with rows: samples, knobs and their log, dead letters, events, the doctor.

Reads  the state that the hub gives, and what the console's verbs read    Writes  what the verbs write, after asking
"""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import Any

from textual.binding import Binding

from miles_async.cli.samples import as_text
from miles_async.cli.tune import parse_patch
from miles_async.console.lines import LEVEL_STYLE
from miles_async.console.text import duration, shorten
from miles_async.console.top.listing import Listing, ListRow
from miles_async.settings.errors import SettingsError

ORDERS = ("worst", "best", "as kept")
LEVELS = ("info", "warning", "error")


def clock(wall: float) -> str:
    """Local time of day, with the date where it is not today's."""
    when = datetime.fromtimestamp(wall)
    return when.strftime("%H:%M:%S" if when.date() == datetime.now().date() else "%m-%d %H:%M")


class Samples(Listing):
    """What the model wrote, with turns and rewards."""

    COLUMNS = ("reward", "sample", "tokens", "finish", "answer")
    EMPTY = "no sample is kept yet: the first ones come with the first trained step"
    BINDINGS = [
        Binding("o", "order", "worst/best"),
        Binding("comma", "step(1)", "older step", key_display=","),
        Binding("full_stop", "step(-1)", "newer step", key_display="."),
    ]

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._order = ORDERS[0]
        self._step: int | None = None  # the newest
        self._steps: list[int] = []

    def stamp(self, state: dict[str, Any]) -> object:
        return (self._order, self._step, state["counts"]["samples"] if self._step is None else None)

    async def rows(self, state: dict[str, Any]) -> list[ListRow]:
        found = await self.app.verbs.samples(step=self._step, order=self._order)
        self._steps = found["steps"]
        shown = found["samples"][0]["step"] if found["samples"] else "-"
        self.border_title = f"step {shown}, {self._order} first, {found['all']} samples; kept at {len(self._steps)} steps"
        return [
            ListRow(f"{s['step']}/{s['sample']}", (f"{s['reward']:.4g}", s["sample"], str(s.get("tokens", "")), s.get("finish", ""),
                shorten(str(s.get("response", "")), 120)), as_text(s))
            for s in found["samples"]
        ]  # fmt: skip

    def action_order(self) -> None:
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self.stale(anew=True)

    def action_step(self, further: int) -> None:
        if self._steps:
            at = self._steps.index(self._step) if self._step is not None and self._step in self._steps else 0
            at = min(len(self._steps) - 1, at + further)
            self._step = self._steps[at] if at > 0 else None
            self.stale(anew=True)


class KnobList(Listing):
    """Every live setting and what may be typed; the log of changes. Enter changes one, or goes back to an epoch."""

    COLUMNS = ("knob", "value", "permitted", "takes effect at", "epoch")
    EMPTY = "no knobs yet: the launcher writes them at start"
    BINDINGS = [Binding("l", "log", "log/knobs"), Binding("e", "change", "change it")]

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._log = False

    def stamp(self, state: dict[str, Any]) -> object:
        return (self._log, state["counts"]["knob_epoch"])

    async def rows(self, state: dict[str, Any]) -> list[ListRow]:
        found = await self.app.verbs.knobs()
        if self._log:
            self.border_title = f"log of changes, now at epoch {found['epoch']}; Enter goes back to an epoch"
            return [self._change_row(change) for change in found["log"]]
        self.border_title = f"knobs at epoch {found['epoch']}; Enter changes one"
        return [
            ListRow(name, (name, knob["shown"], f"follows {knob['follows']}" if knob["follows"] else knob["range"],
                "" if knob["follows"] else knob["applies"], str(knob["changed_at"])), _meaning(name, knob),
                "dim" if knob["follows"] else "", knob)
            for name, knob in found["knobs"].items()
        ]  # fmt: skip

    @staticmethod
    def _change_row(change: dict[str, Any]) -> ListRow:
        values = ", ".join(f"{k}={v}" if k else v for k, v in change["values"].items()) or "values of the settings"
        when = clock(change["wall"]) if change["wall"] else "-"
        cells = (f"epoch {change['epoch']}", shorten(values, 60), change["author"], when, shorten(change["reason"], 60))
        whole = f"epoch {change['epoch']} at {when} by {change['author'] or '-'}: {values}\nwhy: {change['reason'] or '-'}"
        return ListRow(f"epoch {change['epoch']}", cells, whole, data=change)

    def action_log(self) -> None:
        self._log = not self._log
        self.stale(anew=True)

    def on_data_table_row_selected(self) -> None:
        self.action_change()

    def action_change(self) -> None:
        row = self.chosen
        if row is None:
            return
        if self._log:
            epoch = row.data["epoch"]
            title = f"Back to the values of epoch {epoch}, as a new epoch."
            return self.ask(title, [("why (kept in the log)", "")], lambda said: self._tune({}, said[0], epoch))
        label = "the patch: name=value, several apart by spaces are applied together"
        fields = [(label, f"{row.key}={row.data['shown']}"), ("why (kept in the log)", "")]
        self.ask(row.whole, fields, lambda said: self._tune(parse_patch(_words(said[0])), said[1]))

    async def _tune(self, values: dict[str, Any], why: str, back_to: int | None = None) -> str:
        if not values and back_to is None:
            raise SettingsError("nothing to change", remedy="Write name=value.")
        made = await self.app.verbs.tune(values, why, back_to=back_to)
        return f"epoch {made['epoch']}: " + ", ".join(f"{k} = {v}" for k, v in made["values"].items())


def _meaning(name: str, knob: dict[str, Any]) -> str:
    text = " ".join(str(knob["help"]).split()) + (f" Unit: {knob['unit']}." if knob["unit"] else "")
    return f"{name}: {text}\npermitted: {knob['range']}; takes effect at {knob['applies']}"


def _words(patch: str) -> list[str]:
    try:
        return shlex.split(patch)
    except ValueError as error:
        raise SettingsError(f"{patch!r} cannot be read: {error}", remedy="Write name=value.") from None


class Dead(Listing):
    """What failed for good, and why."""

    COLUMNS = ("when", "stream", "sample", "actor", "tries", "error")
    EMPTY = "no dead letters"
    BINDINGS = [Binding("r", "bury('retry')", "retry"), Binding("d", "bury('drop')", "drop")]

    def stamp(self, state: dict[str, Any]) -> object:
        return state["counts"]["dead"]

    async def rows(self, state: dict[str, Any]) -> list[ListRow]:
        self.border_title = f"{state['counts']['dead']} dead letters, newest first"
        rows = []
        for d in await self.app.verbs.letters():
            when, who = clock(d["wall"]) if d["wall"] else "-", d["sample"] or d["group"] or d["entry_id"]
            cells = (when, d["stream"], who, d["actor"], str(d["deliveries"]), shorten(d["error"], 120))
            rows.append(ListRow(d["id"], cells, f"{d['id']} of {d['stream']} {d['entry_id']}: {d['error']}\n\n{d['traceback']}"))
        return rows

    def action_bury(self, act: str) -> None:
        row = self.chosen
        if row is None:
            return
        what = "Put back where it failed" if act == "retry" else "Drop for good"
        self.ask(f"{what}: {row.cells[1]} {row.cells[2]}?", [], lambda _: self.app.verbs.bury(row.key, act))


class Events(Listing):
    """Faults, dead letters, knobs, checkpoints and restores, newest first."""

    COLUMNS = ("when", "level", "what", "text")
    BINDINGS = [Binding("f", "level", "all/warnings/errors")]

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._from = LEVELS[0]

    def stamp(self, state: dict[str, Any]) -> object:
        events = state["events"]
        return (self._from, len(events), events[0] if events else None)

    async def rows(self, state: dict[str, Any]) -> list[ListRow]:
        least = LEVELS.index(self._from)
        self.border_title = "all events" if not least else f"events from {self._from} on"
        found = [e for e in state["events"] if LEVELS.index(e["level"]) >= least]
        rows = []
        for i, e in enumerate(found):
            whole = f"{datetime.fromtimestamp(e['wall']):%Y-%m-%d %H:%M:%S}  {e['level']}  {e['what']}\n{e['text']}"
            cells = (clock(e["wall"]), e["level"], e["what"], shorten(e["text"], 160))
            rows.append(ListRow(f"{e['wall']}{e['what']}{len(found) - i}", cells, whole, LEVEL_STYLE.get(e["level"], "")))
        return rows

    def action_level(self) -> None:
        self._from = LEVELS[(LEVELS.index(self._from) + 1) % len(LEVELS)]
        self.stale(anew=True)


class Doctor(Listing):
    """What is wrong, gravest first; then a sentence for each actor."""

    COLUMNS = ("level", "for", "about", "what")
    EMPTY = "the doctor is looking"

    def stamp(self, state: dict[str, Any]) -> object:
        return self.app.hub.word.wall

    async def rows(self, state: dict[str, Any]) -> list[ListRow]:
        word = self.app.hub.word
        wrong = sum(f.level != "info" for f in word.findings)
        self.border_title = f"the doctor at {clock(word.wall)}: {wrong or 'nothing'} wrong" if word.wall else "the doctor"
        found = []
        for i, f in enumerate(word.findings):
            cells = (f.level, duration(f.since_s) if f.since_s else "", f.about, f.text)
            found.append(ListRow(f"{f.rule}/{f.about}/{i}", cells, f"{f.rule}: {f.text}", LEVEL_STYLE.get(f.level, "")))
        return found + [ListRow(a, ("", "", a, text), f"{a} {text}", "dim") for a, text in word.actors.items()]
