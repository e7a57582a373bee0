"""What the governor stands at, as status and doctor read it: apart from what decides, which loads far more than they need."""

from __future__ import annotations

from typing import Literal

import msgspec

from bus import Bus
from bus.errors import UNREADABLE
from miles_async.console.text import plural

STATE_FIELD = "governor"


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that has an envelope. `hand`: who has set it since, so that it is left alone; else empty."""

    name: str
    value: int
    low: int
    high: int
    envelope: str  # name of the setting
    hand: str

    def holds(self, value: int) -> bool:
        return self.low <= value <= self.high


NoteKind = Literal["hand", "edge", "unusable", "refused"]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator is told once, as an event `governor/KIND`."""

    kind: NoteKind
    about: str
    text: str


class GovernorStanding(msgspec.Struct, frozen=True, kw_only=True):
    """What the governor stands at after its newest decision. `due`: the step that it was made after; `last`: its newest change in
    words; `changes`, `taken_back`: so far; `notes`: what holds it up now."""

    due: int
    knobs: tuple[Knob, ...]
    last: str = ""
    changes: int = 0
    taken_back: int = 0
    notes: tuple[Note, ...] = ()

    def text(self) -> str:
        """One line: knobs with their envelopes, what was changed, what holds it up."""
        knobs = ", ".join(
            f"{k.name} {k.value} of {k.low}:{k.high}" + (f" (left to {k.hand})" if k.hand else "") for k in self.knobs
        )
        done = plural(self.changes, "change") + (f", {self.taken_back} taken back" if self.taken_back else "")
        held = "".join(f"; {note.text}" for note in self.notes if note.kind == "edge")
        return f"governor: {knobs}; {done}" + (f", the last {self.last}" if self.last else "") + held


async def read_standing(bus: Bus) -> GovernorStanding | None:
    """None where no governor has decided anything."""
    try:
        return msgspec.json.decode(await bus.state(STATE_FIELD) or b"", type=GovernorStanding)
    except UNREADABLE:
        return None
