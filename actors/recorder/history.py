"""A run's past, folded from records (pure): the surviving steps, evaluations, drops, pauses and faults.

Steps after a restore point are a lost future: they leave `steps` and are counted in `lost_steps`. Who follows a living run holds a
bounded history, however long the run is; who reads a file for a report holds all of it.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from actors.recorder.records import Parts, Record

REWARD = "rollout/raw_reward"
LOSS = "train/loss"
AVG_STALENESS = "rollout/fully_async/avg_staleness"
MAX_STALENESS = "rollout/fully_async/max_staleness"
MOST_SAMPLES = 64
FIRST, NEWEST = 200, 1000  # of each kind that a bounded history holds, and between them fewer and fewer from further back
MOST_DROPS = 200
MOST_SHARED = 256  # sets of names
NEEDED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "fault": {"wall": float, "actor": str, "event": str, "text": str, "level": str},
    "dead": {"wall": float, "stream": str, "error": str},
    "knob": {"wall": float, "epoch": int, "values": dict},
    "activated": {"wall": float, "step": int, "actor": str, "pause_s": float, "total_s": float},
    "checkpoint": {"wall": float, "step": int},
    "restored": {"wall": float, "step": int},
}
"""What readers of a history take from its records, which lie in it as they are."""
SYSTEM_S, MOST_OF_SYSTEM = 10.0, 4
Held = TypeVar("Held")


class Numbers(Mapping[str, float]):
    """Read-only numbers by name. Steps that have the same names share them: a step of 90 metrics takes 1 kB, not 20."""

    __slots__ = ("_at", "_values")
    _shared: ClassVar[dict[tuple[str, ...], dict[str, int]]] = {}

    def __init__(self, numbers: Mapping[str, float]) -> None:
        names = tuple(numbers)
        if names not in self._shared:
            if len(self._shared) >= MOST_SHARED:
                self._shared.clear()
            self._shared[names] = {name: at for at, name in enumerate(names)}
        self._at = self._shared[names]
        self._values = array("d", numbers.values())

    def __getitem__(self, name: str) -> float:
        return self._values[self._at[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


@dataclass(slots=True)
class Step:
    """One training step of the surviving lineage. `gap_s`: wall seconds since the step before it, 0 for the first.
    `resumed`: the first after a restart, so that its gap is mostly the trainer's absence. `dropped`: groups by reason since the
    step before; `thrown`: samples and tokens of those that the filter dropped."""

    step: int
    wall: float
    metrics: Mapping[str, float]
    n_groups: int
    gap_s: float = 0.0
    resumed: bool = False
    dropped: dict[str, int] = field(default_factory=dict)
    knob_epoch: int = -1
    thrown: tuple[int, int] = (0, 0)

    def get(self, name: str, default: float = 0.0) -> float:
        return float(self.metrics.get(name, default))


@dataclass(slots=True)
class Eval:
    """One evaluation; `score` is its main metric, the mean reward (accuracy for 0/1 rewards)."""

    step: int
    wall: float
    name: str
    score: float
    metrics: Mapping[str, float]

    @property
    def share(self) -> float:
        """Of its tokens, those that the version of `step` made."""
        return self.metrics.get(f"eval/{self.name}/version_share", 1.0)


@dataclass(slots=True)
class History:
    """Fold records into it, oldest first. `bounded`: at most FIRST + 2 * NEWEST of a kind are held, but for changes of knobs;
    `counts` knows how many records of each kind there were."""

    bounded: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    steps: list[Step] = field(default_factory=list)
    evals: list[Eval] = field(default_factory=list)
    failed_evals: dict[str, Record] = field(default_factory=dict)  # by name, where the newest one measured nothing
    drops: Counter[str] = field(default_factory=Counter)  # groups by reason
    newest_drops: deque[Record] = field(default_factory=lambda: deque(maxlen=MOST_DROPS))
    dead: list[Record] = field(default_factory=list)
    faults: list[Record] = field(default_factory=list)
    knobs: list[Record] = field(default_factory=list)
    activations: list[Record] = field(default_factory=list)
    checkpoints: list[Record] = field(default_factory=list)
    restores: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)  # texts; of many, fewer and fewer from further back
    system: dict[str, Record] = field(default_factory=dict)  # the newest of each host and of Redis
    ledger: dict[str, int] = field(default_factory=dict)
    first_wall: float = 0.0
    last_wall: float = 0.0
    lost_steps: int = 0
    furthest: int = 0  # the last step ever made, lost ones included
    finished: bool = False
    left_out: int = 0  # records that could not be taken in
    _resumed: bool = False
    _dropped: Counter[str] = field(default_factory=Counter)  # since the last step
    _thrown: tuple[int, int] = (0, 0)  # since then
    _parts: Parts = field(default_factory=Parts)

    def fold(self, record: Record) -> None:
        """Take in one record; unknown kinds change only the clock, and a line that lacks something, changed by hand or written by
        another release, is left out."""
        try:
            self._take(record)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            self.left_out += 1

    def _take(self, record: Record) -> None:
        for name, kind in NEEDED.get(record.get("kind", ""), {}).items():
            kind(record[name])
        wall = float(record.get("wall", 0.0))
        self.first_wall = min(self.first_wall, wall) if self.first_wall else wall
        self.last_wall = max(self.last_wall, wall)
        self.counts[str(record.get("kind"))] += 1
        match record.get("kind"):
            case "step":
                self._step(record, wall)
            case "eval":
                self._eval(record, wall)
            case "restored":
                self._restored(record)
            case "drop":
                if "tokens" in record:  # the filter's; what the trainer gives up is told without
                    samples, tokens = self._thrown
                    self._thrown = (samples + int(record.get("samples", 0)), tokens + int(record["tokens"]))
                if self._parts.is_new(record):
                    self._drop(str(record["reason"]))
                self.newest_drops.append(record)
            case "dead":
                self._hold(self.dead, record)
            case "fault":
                self._hold(self.faults, record)
            case "knob":
                self.knobs.append(record)
            case "activated":
                self._hold(self.activations, record)
            case "checkpoint":
                self._hold(self.checkpoints, record)
            case "ledger":
                self.ledger = {str(k): int(v) for k, v in record["accounts"].items()}
            case "sample":
                self.samples.append(record)
                if len(self.samples) > MOST_SAMPLES:
                    del self.samples[: MOST_SAMPLES // 2 : 2]
            case "system":
                self.system[str(record["source"])] = {**record, "values": {str(k): float(v) for k, v in record["values"].items()}}
            case "finished":
                self.finished = True

    def wants(self, record: Record) -> bool:
        """False for the use of hosts where it is told more often than a record should hold: of all of them together at most
        MOST_OF_SYSTEM lines in SYSTEM_S."""
        if record.get("kind") != "system":
            return True
        last = self.system.get(str(record.get("source")))
        apart = SYSTEM_S * max(1.0, len(self.system) / MOST_OF_SYSTEM)
        return last is None or float(record["wall"]) - float(last["wall"]) > 0.9 * apart

    def _step(self, record: Record, wall: float) -> None:
        number = int(record["step"])
        self.furthest = max(self.furthest, number)
        if self.steps and number <= self.steps[-1].step:
            # The trainer says `restored` before it repeats a step; without that word the line is a repetition.
            return
        gap = wall - self.steps[-1].wall if self.steps else 0.0
        metrics = Numbers(_finite(record))
        n_groups = len(record.get("groups", ()))
        for _, reason in record.get("dropped", ()):
            self._drop(str(reason))
        resumed, dropped, self._dropped = self._resumed and gap > 0, dict(self._dropped), Counter()
        epoch = int(record.get("knob_epoch", -1))
        thrown, self._thrown = self._thrown, (0, 0)
        self._hold(self.steps, Step(number, wall, metrics, n_groups, max(0.0, gap), resumed, dropped, epoch, thrown))
        self._resumed = False

    def _drop(self, reason: str) -> None:
        self.drops[reason] += 1
        self._dropped[reason] += 1

    def _eval(self, record: Record, wall: float) -> None:
        name, metrics = str(record["name"]), _finite(record)
        score = metrics.get(f"eval/{name}")
        if score is None:
            self.failed_evals[name] = {"error": "nothing was measured", **record}
            return
        self.failed_evals.pop(name, None)
        self._hold(self.evals, Eval(int(record["step"]), wall, name, score, Numbers(metrics)))

    def _restored(self, record: Record) -> None:
        step = int(record["step"])
        kept = [s for s in self.steps if s.step <= step]
        self.lost_steps += self.steps[-1].step - max(step, 0) if len(self.steps) > len(kept) else 0
        self.steps = kept
        self.evals = [e for e in self.evals if e.step <= step]
        self._hold(self.restores, record)
        self.finished = False
        self._resumed = True

    def _hold(self, kept: list[Held], one: Held) -> None:
        kept.append(one)
        if self.bounded and len(kept) > FIRST + 2 * NEWEST:
            del kept[FIRST:-NEWEST:2]

    @property
    def supervised(self) -> bool:
        """Whether the data's own responses are learned, which earn nothing."""
        return bool(self.knobs) and self.knobs[0]["values"].get("policy_loss") == "nll"

    def unsaved_groups(self) -> int:
        """Groups trained since the newest checkpoint."""
        saved = int(self.checkpoints[-1]["step"]) if self.checkpoints else 0
        return sum(s.n_groups for s in self.steps if s.step > saved)

    def eval_names(self) -> list[str]:
        """Names of evaluation sets, in order of appearance."""
        return list(dict.fromkeys(e.name for e in self.evals))

    def evals_of(self, name: str) -> list[Eval]:
        """Evaluations of one set by step; of one done twice, the later."""
        return sorted({e.step: e for e in self.evals if e.name == name}.values(), key=lambda e: e.step)


def _finite(record: Record) -> dict[str, float]:
    """Its metrics. A NaN, or an infinity, which JSON does not have, is null in the file and missing here, whoever reads what."""
    found = {str(k): float(v) for k, v in record.get("metrics", {}).items() if v is not None}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def history_of(records: Iterable[Record]) -> History:
    """Fold all records."""
    history = History()
    for record in records:
        history.fold(record)
    return history
