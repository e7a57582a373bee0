"""(pure) Rules on the samples that engines take at once, for patches; miles_async/settings/slots.py holds settings to the same.

Each looks at the values by the names of the knobs and returns what is wrong, or None. What is not known is not held against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Broken(NamedTuple):
    """A rule that does not hold, in the words of KnobRejected."""

    knob: str
    value: Any
    rule: str
    remedy: str


def broken_rule(v: Mapping[str, Any]) -> Broken | None:
    """The first rule that does not hold."""
    return _bounds(v) or _masked_share(v) or _tail_lane(v)


def _bounds(v: Mapping[str, Any]) -> Broken | None:
    low, high = v.get("sglang_concurrency_min", 1), v.get("sglang_concurrency_max", 0)
    if not high or low <= high:
        return None
    remedy = f"Set sglang_concurrency_min <= {high}, or both at once."
    return Broken("sglang_concurrency_min", low, f"above sglang_concurrency_max = {high}", remedy)


def _masked_share(v: Mapping[str, Any]) -> Broken | None:
    share, fixed = v.get("max_masked_fraction", 0), v["sglang_server_concurrency"]
    if not share or not fixed:
        return None
    rule = f"sglang_server_concurrency is fixed at {fixed}, so nothing would keep to it"
    return Broken("max_masked_fraction", share, rule, "Set sglang_server_concurrency to auto as well, or leave it out.")


def _tail_lane(v: Mapping[str, Any]) -> Broken | None:
    slots, after = v.get("tail_slots", 0), v.get("tail_after_tokens", 0)
    if not slots and not after:
        return None
    if not after:
        return Broken("tail_slots", slots, "nothing says which samples are the tail", "Set tail_after_tokens as well.")
    if not slots:
        return Broken("tail_after_tokens", after, "no slots are kept for the tail", "Set tail_slots as well.")
    if why := v.get("no_tail_lane", ""):
        return Broken("tail_slots", slots, why, "Leave tail_slots and tail_after_tokens out, or change that in a new run.")
    longest = v.get("rollout_max_response_len", 0)
    if longest and after >= longest:
        rule = f"no sample outlives it with rollout_max_response_len = {longest}"
        return Broken("tail_after_tokens", after, rule, f"Set it below {longest}.")
    each = v["sglang_server_concurrency"] or v.get("sglang_concurrency_max", 0)
    workers = v.get("num_generation_workers", 0)
    if workers == 1:
        rule = "the run has one worker, whose batch would be no smaller for it"
        return Broken("tail_slots", slots, rule, "Start two workers or more, or leave it out with tail_after_tokens.")
    if workers and each and slots > (workers - 1) * each:
        rule = f"{workers} workers of {each} slots must leave one worker for what is not the tail"
        return Broken("tail_slots", slots, rule, f"Set it to {(workers - 1) * each} or less.")
    return None


__all__ = ("Broken", "broken_rule")
