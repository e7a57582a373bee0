"""What to do when a process ended (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from actors.runtime.run import EXIT_DONE, EXIT_REFUSED, EXIT_RUN_ENDS

QUICK_S = 60.0  # failures closer together than this count as one crash loop


@dataclass(frozen=True, slots=True)
class Verdict:
    """`restart` after `after_s`, `done`, or `give_up` with the reason."""

    action: Literal["restart", "done", "give_up"]
    after_s: float = 0.0
    reason: str = ""


def judge_exit(name: str, code: int | None, failures: Sequence[float], now: float, budget: int) -> Verdict:
    """`code` None = unknown (an adopted process); `failures`: times of former failures, seconds on the clock of `now`.

    A refusal is final, and so is a run that an actor ended: the same start would come to the same. Failures within
    QUICK_S of each other use up the budget; an actor that ran well in between starts afresh.
    """
    if code == EXIT_DONE:
        return Verdict("done")
    if code == EXIT_REFUSED:
        return Verdict("give_up", reason=f"{name} refused to start")
    if code == EXIT_RUN_ENDS:
        return Verdict("give_up", reason=f"{name} cannot go on")
    recent = [t for t in failures if now - t < QUICK_S]
    if len(recent) >= budget:
        return Verdict("give_up", reason=f"{name} failed {len(recent) + 1} times within {QUICK_S:.0f} s")
    return Verdict("restart", after_s=0.0 if not recent else min(10.0, 0.25 * 2 ** len(recent)))


def describe_exit(code: int | None) -> str:
    """Exit status in words."""
    if code is None:
        return "ended (status unknown: started by an earlier launcher)"
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


__all__ = ("Verdict", "describe_exit", "judge_exit")
