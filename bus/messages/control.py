"""Knobs, vitals, faults, dead letters and evaluation results."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bus.messages.base import Header, Message
from bus.messages.events import Level
from bus.messages.waits import Wait

ActorState = Literal["starting", "running", "waiting", "draining", "stalled", "stopped", "failed"]
STEP_BEGAN = "step_began"
"""Counter in a trainer's vitals while it trains: when the step began, by the clock of their `wall`."""


class Kind(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the value of a live setting must be. `ge` and `le` are inclusive bounds, `gt` and `lt` exclusive ones; `optional`: it
    may be None; `choices` of a text, empty = any."""

    type: Literal["int", "float", "str", "bool"]
    optional: bool = False
    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


class KnobPatch(Message, frozen=True, kw_only=True, tag="knob.patch"):
    """New values of settings, by name. `epoch` numbers it. With `kinds` a launcher says all settings of the run, and which of
    them are live; without, it is a checked patch of live ones. A plan has no values: `planned` are to hold from training step
    `at_step` on. What ends a plan names its epoch in `plan`: as due, with its values and the step that is the first under them,
    or with neither, as cancelled."""

    epoch: int
    values: dict[str, Any]
    author: str = ""
    reason: str = ""
    wall: float = 0.0
    kinds: dict[str, Kind] | msgspec.UnsetType = msgspec.UNSET
    planned: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    at_step: int | msgspec.UnsetType = msgspec.UNSET
    plan: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def from_step(self) -> int:
        """The training step that it holds from; 0 = it does not say."""
        return 0 if self.at_step is msgspec.UNSET else self.at_step

    def header(self) -> Header:
        shown = f"{len(self.values)} values" if self.kinds else ",".join(f"{k}={v}" for k, v in self.values.items())
        if self.planned:
            shown = f"at step {self.at_step}: " + ",".join(f"{k}={v}" for k, v in self.planned.items())
        return Header(id=f"epoch{self.epoch}", knob=self.epoch, note=shown)


class Vitals(Message, frozen=True, kw_only=True, tag="event.vitals"):
    """An actor is alive: what it does, what it waits for and since when (wall seconds)."""

    actor: str
    role: str
    pid: int
    host: str  # its name, for people: two hosts may have one name
    state: ActorState
    wall: float
    version: int = -1
    waits_for: str = ""
    waits_since: float = 0.0
    in_flight: int = 0
    counters: dict[str, float] = {}
    note: str = ""
    slots: int = 0  # samples that a generation worker takes at once
    memory: str = ""  # of one name: they see the same files in shared memory
    depot: str = ""  # where a worker serves versions to other hosts
    received: int = 0  # bytes of versions that came from other hosts
    processes: str = ""  # of one name: they see each other's process ids
    takes: int = -1  # version that a worker fetches from other hosts now
    release: str = ""  # of miles_async; empty = it did not say
    ranks: str | msgspec.UnsetType = msgspec.UNSET  # of a trainer with several: process ids of the others, by host

    @property
    def wait(self) -> Wait | None:
        """The kind of what it waits for; None where it waits for nothing, or for something that only another release knows."""
        return Wait.of(self.waits_for)

    def header(self) -> Header:
        return Header(id=self.actor, version=self.version, note=self.state)


class Event(Message, frozen=True, kw_only=True, tag="event.note"):
    """Something an operator should be able to find later."""

    actor: str
    kind: str
    text: str
    wall: float
    level: Level = "info"
    data: dict[str, Any] = {}

    def header(self) -> Header:
        return Header(id=self.actor, note=self.kind)


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead.letter"):
    """An entry that failed for good, as it was."""

    stream: str
    entry_id: str
    actor: str
    error: str
    traceback: str = ""
    deliveries: int = 0
    fields: dict[str, str] = {}
    body: bytes = b""
    wall: float = 0.0
    sample_id: str = ""
    group_id: str = ""

    @property
    def blob(self) -> str:
        """Reference to the body that it keeps; empty when that is in the letter."""
        return self.fields.get("blob", "")

    @property
    def kept(self) -> list[str]:
        """References to all that it keeps."""
        return [self.blob, *self.fields.get("asides", "").split()]

    def header(self) -> Header:
        return Header(id=self.sample_id or self.entry_id, group=self.group_id, note=f"{self.stream}: {self.error[:80]}")


class EvalDone(Message, frozen=True, kw_only=True, tag="eval.done"):
    """Result of one evaluation. Accuracy etc. are means over samples. `version` and its `step` made most of the tokens; where all
    samples were lost, there is no score in `metrics`."""

    name: str
    version: int
    step: int
    metrics: dict[str, float]
    n_samples: int
    wall: float = 0.0
    duration_s: float = 0.0
    versions: dict[int, int] | msgspec.UnsetType = msgspec.UNSET  # version id -> tokens that it made
    asked: int | msgspec.UnsetType = msgspec.UNSET  # step of the version that it was issued for
    error: str | msgspec.UnsetType = msgspec.UNSET  # how many samples were lost, and why

    def header(self) -> Header:
        return Header(id=f"{self.name}@{self.step}", version=self.version)
