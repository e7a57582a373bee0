"""How many groups may start now (pure). The staleness bound holds by construction here; the trainer's mask only guards it.

A group is open from its issue until it is dropped, dead, or trained *and* the version that holds it is active on an
engine. If batches are cut oldest first and at most (bound + 1) * groups_per_step groups are open, a group waits for at
most `bound` steps of older groups, so no token of it is more than `bound` steps old when it is trained. A slot is freed
by activation and not by announcement, or groups are born stale.
"""

from __future__ import annotations


def open_limit(*, groups_per_step: int, max_staleness: int, lookahead: int = 0) -> int:
    """Most groups that may be open.

    `lookahead` W > 0 (staleness policy `wait`) lets the trainer pass over up to W groups, which may age a group by
    ceil((W - 1) / groups_per_step) more steps; admission gives up as many steps, but never below one batch.
    """
    allowed = max_staleness
    if lookahead > 0:
        allowed -= -(-(lookahead - 1) // groups_per_step)
    return (max(0, allowed) + 1) * groups_per_step


def free_slots(*, open_groups: int, in_generation: int, limit: int, over_sampling: int, still_needed: int) -> int:
    """Groups that may be issued now, >= 0.

    `in_generation`: issued and not yet judged. `over_sampling`: how many of those are wanted at once. `still_needed`:
    groups that the rest of the run can use, so that the end leaves little behind.
    """
    return max(0, min(limit - open_groups, over_sampling - in_generation, still_needed - open_groups))


__all__ = ("free_slots", "open_limit")
