"""What to do when a process ended (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actors.runtime.run import EXIT_CRASHED, EXIT_DONE, EXIT_REFUSED, EXIT_RUN_ENDS

QUICK_S = 60.0  # failures closer together than this count as one crash loop


@dataclass(frozen=True, slots=True)
class Verdict:
    """`restart` after `after_s`, `done`, or `give_up` with the reason."""

    action: Literal["restart", "done", "give_up"]
    after_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an actor ended. `at`: seconds on the launcher's clock; `code`: None = unknown; `furthest`: the
    last training step that the run had ever made then."""

    at: float
    code: int | None
    furthest: int


def judge_exit(name: str, ending: Ending, former: Sequence[Ending], budget: int, *, steps: bool = False) -> Verdict:
    """What follows `ending`. `steps`: this actor is the one that makes the training steps.

    A refusal is final, and so is a run that an actor ended: the same start would come to the same. Failures within
    QUICK_S of each other use up the budget; an actor that ran well in between starts afresh. Crashes of the trainer
    before the same step use it up too, however far apart: a batch that ends it would end it for ever.
    """
    if ending.code == EXIT_DONE:
        return Verdict("done")
    if ending.code == EXIT_REFUSED:
        return Verdict("give_up", reason=f"{name} refused to start")
    if ending.code == EXIT_RUN_ENDS:
        return Verdict("give_up", reason=f"{name} cannot go on")
    recent = [f for f in former if ending.at - f.at < QUICK_S]
    if len(recent) >= budget:
        return Verdict("give_up", reason=f"{name} failed {len(recent) + 1} times within {QUICK_S:.0f} s")
    stuck = [f for f in former if f.code == EXIT_CRASHED and f.furthest == ending.furthest]
    if steps and ending.code == EXIT_CRASHED and len(stuck) >= budget:
        return Verdict("give_up", reason=f"{name} crashed {len(stuck) + 1} times before step {ending.furthest + 1}")
    return Verdict("restart", after_s=0.0 if not recent else min(10.0, 0.25 * 2 ** len(recent)))


def describe_exit(code: int | None) -> str:
    """Exit status in words."""
    if code is None:
        return "ended (status unknown: started by an earlier launcher)"
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


__all__ = ("Ending", "Verdict", "describe_exit", "judge_exit")
