"""Whose slots are kept for the tail (pure): samples that outlived `tail_after_tokens` go on where few run, and decode faster.

One engine gains nothing by a kept share of its slots, since all its requests share one batch. So the lane is as few workers as
possible, in the order of their names, and one worker at least is left for the rest. Every worker finds the same ones, from the
publisher's word on who serves and the knobs; when one of them goes, the next name takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable


def lane_of(serving: Iterable[str], *, tail_slots: int, each: int) -> dict[str, int]:
    """Worker -> samples it runs at once, for the workers of the lane; empty without a lane or with less than two workers.

    serving: workers that serve a version. each: slots of a worker outside of the lane, 0 = not limited.
    """
    names = sorted(serving)
    lane: dict[str, int] = {}
    for name in names[:-1]:
        if tail_slots <= 0:
            break
        lane[name] = min(tail_slots, each or tail_slots)
        tail_slots -= lane[name]
    return lane
