"""Numbers that the live view, the web console and the report show, derived from a history and a snapshot (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from actors.recorder.history import History, Step
from actors.recorder.records import Record
from bus.inspect import StreamFacts
from bus.messages.events import EventKind

RECENT = 20
FRESH_S = 600.0  # a restart or an error stays in sight for so long, whatever else is said meanwhile
DROPPED = "dropped/"  # before a reason: groups a step
TRAINER = {
    "loss": "train/loss",
    "grad norm": "train/grad_norm",
    "entropy": "train/entropy_loss",
    "KL to the reference": "train/kl_loss",
    "KL of the update": "train/ppo_kl",
    "clipped": "train/pg_clipfrac",
    "effective samples": "train/ess_ratio",
    "lr": "train/lr",
}
"""What the trainer says of a step, by the words that are shown."""


def time_split(step: Step) -> tuple[float, float, float]:
    """Seconds of one step on the trainer: waiting for rollouts, training, and the rest (publishing, checkpoints). What the
    trainer does not name counts as publishing, but not the time that it was away."""
    wait, train = step.get("perf/wait_s"), step.get("perf/train_s")
    publish = step.metrics.get("perf/publish_s")
    if publish is None:
        publish = max(0.0, step.gap_s - wait - train) if step.gap_s and not step.resumed else 0.0
    return wait, train, float(publish)


def shares(steps: Sequence[Step]) -> tuple[float, float, float]:
    """(waiting, training, publishing) as shares of the time of these steps; zeros without any."""
    wait, train, publish = (sum(part) for part in zip((0.0, 0.0, 0.0), *map(time_split, steps), strict=True))
    total = wait + train + publish
    return (wait / total, train / total, publish / total) if total > 0 else (0.0, 0.0, 0.0)


def throughput(steps: Sequence[Step]) -> float:
    """Response tokens trained per wall second over these steps, the trainer's absence left out; its own figure when there
    is no clock yet."""
    timed = [s for s in steps if s.gap_s > 0 and not s.resumed]
    seconds = sum(s.gap_s for s in timed)
    if seconds > 0:
        return sum(s.get("rollout/tokens") for s in timed) / seconds
    return steps[-1].get("perf/tokens_per_s") if steps else 0.0


def derived(step: Step) -> dict[str, float]:
    """Numbers that a step does not record as such: the split of its time, tokens a second, dropped groups by reason."""
    found = dict(zip(("wait_s", "train_s", "publish_s"), time_split(step), strict=True)) | {"tokens_per_s": throughput([step])}
    return found | {DROPPED + reason: float(n) for reason, n in step.dropped.items()}


def seconds_per_step(history: History) -> float:
    """Typical wall seconds of a recent step: the median, so that one save or restart does not count. 0 = unknown."""
    gaps = [s.gap_s for s in history.steps[-RECENT:] if s.gap_s > 0]
    return median(gaps) if gaps else 0.0


def eta_s(history: History, total_steps: int) -> float | None:
    """Seconds to the last step at the present pace; None when nothing can be said."""
    pace = seconds_per_step(history)
    if not pace or not history.steps or total_steps <= 0:
        return None
    return max(0, total_steps - history.steps[-1].step) * pace


class Lying(msgspec.Struct, frozen=True):
    """Entries of a data stream: all, of these held by a reader, the age of the oldest held one in seconds. `unsaved`: trained
    groups that wait for nothing but a checkpoint, not counted in the others; while there are any they are the oldest, and the age
    of the others is None."""

    depth: int
    held: int
    oldest_s: float | None
    unsaved: int


def lying(facts: StreamFacts, history: History) -> Lying:
    """What lies on a data stream and waits for its readers."""
    oldest = max((r.oldest_age_s for r in facts.readers if r.oldest_id), default=0.0)
    unsaved = min(history.unsaved_groups(), facts.pending) if facts.name == "groups" else 0
    return Lying(facts.length - unsaved, facts.pending - unsaved, None if unsaved else oldest, unsaved)


def alarms(history: History, wall: float, count: int) -> list[Record]:
    """The newest word of each actor on each kind of fault, in the order of time; errors and restarts are not pushed out by
    lesser ones for FRESH_S."""
    newest = {(r["actor"], r["event"]): r for r in history.faults[-200:]}

    def weight(record: Record) -> tuple[bool, float]:
        grave = record["level"] == "error" or record["event"] in (EventKind.RESTART, EventKind.STALL)
        return grave and wall - float(record["wall"]) < FRESH_S, float(record["wall"])

    return sorted(sorted(newest.values(), key=weight)[-count:], key=lambda r: float(r["wall"]))
