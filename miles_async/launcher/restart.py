"""What to do when a process ended (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actors.runtime.run import EXIT_BUS_BACK, EXIT_CRASHED, EXIT_DONE, EXIT_REFUSED, EXIT_RUN_ENDS

QUICK_S = 60.0  # failures closer together than this count as one crash loop
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0  # after a crash loop of an actor that the run can miss for a while


@dataclass(frozen=True, slots=True)
class Verdict:
    """`restart` after `after_s`, `pause` for as long and then restart, `done`, or `give_up`; the last and `pause` have a
    reason."""

    action: Literal["restart", "pause", "done", "give_up"]
    after_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an actor ended. `at`: seconds on the launcher's clock; `code`: None = unknown; `furthest`: the
    last training step that the run had ever made then; `pause_s`: for how long it was left alone afterwards."""

    at: float
    code: int | None
    furthest: int
    pause_s: float = 0.0


def judge_exit(
    name: str, ending: Ending, former: Sequence[Ending], budget: int, *, steps: bool = False, spared: bool = False
) -> Verdict:
    """What follows `ending`. `steps`: this actor is the one that makes the training steps. `spared`: others do its work
    meanwhile, so that the run can go on without it for a while.

    A refusal is final, and so is a run that an actor ended: the same start would come to the same. Failures within
    QUICK_S of each other use up the budget; an actor that ran well in between starts afresh. Crashes of the trainer
    before the same step use it up too, however far apart: a batch that ends it would end it for ever. One that is spared is
    not given up: it is tried again after a pause, twice as long each time that it fails at once again.
    """
    if ending.code == EXIT_DONE:
        return Verdict("done")
    if ending.code == EXIT_REFUSED:
        return Verdict("give_up", reason=f"{name} refused to start")
    if ending.code == EXIT_RUN_ENDS:
        return Verdict("give_up", reason=f"{name} cannot go on")
    if ending.code == EXIT_BUS_BACK:
        return Verdict("give_up", reason="the bus was lost")
    last_pause_s = former[-1].pause_s if former else 0.0
    if spared and last_pause_s and ending.at - former[-1].at - last_pause_s < QUICK_S:
        return Verdict("pause", min(LONGEST_PAUSE_S, 2 * last_pause_s), f"{name} failed again")
    recent = [f for f in former if ending.at - f.at < QUICK_S]
    if len(recent) >= budget:
        reason = f"{name} failed {len(recent) + 1} times within {QUICK_S:.0f} s"
        return Verdict("pause", FIRST_PAUSE_S, reason) if spared else Verdict("give_up", reason=reason)
    stuck = [f for f in former if f.code == EXIT_CRASHED and f.furthest == ending.furthest]
    if steps and ending.code == EXIT_CRASHED and len(stuck) >= budget:
        return Verdict("give_up", reason=f"{name} crashed {len(stuck) + 1} times before step {ending.furthest + 1}")
    return Verdict("restart", after_s=0.0 if not recent else min(10.0, 0.25 * 2 ** len(recent)))


def describe_exit(code: int | None) -> str:
    """Exit status in words."""
    if code is None:
        return "ended with a status that nobody could tell"
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
