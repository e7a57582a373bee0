"""(pure) Rules of the governor: an envelope is possible, and holds the present value. With those of the slots that it moves."""

from __future__ import annotations

import re
from collections.abc import Callable

from miles_async.settings import slots, staleness
from miles_async.settings.errors import SettingsError
from miles_async.settings.flat import Flat

GOVERNED: dict[str, tuple[str, int, int]] = {
    "governor_staleness": ("max_weight_staleness", 0, 1024),
    "governor_oversampling": ("over_sampling_batch_size", 1, 1 << 30),
    "governor_concurrency": ("sglang_server_concurrency", 1, 1 << 30),
}
"""Envelope -> the setting that it bounds, and the least and most that an envelope may name."""


def envelope(text: str) -> tuple[int, int] | None:
    """(low, high) of `LOW:HIGH`; None where it is not of this form."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", text)
    return (int(found[1]), int(found[2])) if found else None


def envelopes_are_possible(s: Flat) -> None:
    given = {name: text for name in GOVERNED if (text := s.values[name]) is not None}
    for name, text in given.items():
        knob, least, most = GOVERNED[name]
        if (ends := envelope(text)) is None:
            raise s.refusal(name, "not an envelope", "Write LOW:HIGH in whole numbers, as 1:6.")
        low, high = ends
        if low > high or low < least or high > most:
            why = "its low end is above its high end" if low > high else f"{knob} goes from {least} to {most} here"
            raise s.refusal(name, why, "Write LOW:HIGH with LOW at most HIGH.")
        if s.governor and not low <= (present := s.values[knob]) <= high:
            word = {"over_sampling_batch_size": "what the bound admits", "sglang_server_concurrency": "auto"}.get(knob)
            shown = f"{present} ({word})" if present == 0 and word else present
            raise s.refusal(name, f"{knob} = {shown} lies outside", f"Change {knob} or the envelope.")
        if s.governor:
            _ends_keep_the_rules(s, name, knob, ends)
    if s.governor and not given:
        remedy = "Give --governor-staleness LOW:HIGH, or another envelope."
        raise s.refusal("governor", "no setting has an envelope, so that there is nothing to move", remedy)
    if s.governor and s.colocate:
        why = "with colocate engines and trainer take turns, and neither waits for the other's speed"
        raise s.refusal("governor", why, "Leave one of the two out.")


def _ends_keep_the_rules(s: Flat, name: str, knob: str, ends: tuple[int, int]) -> None:
    """A rule of asynchrony that holds for the present value holds at both ends of its envelope."""
    for rule in (*staleness.RULES, *slots.RULES):
        if _said(rule, s) is not None:
            continue
        for end in dict.fromkeys(ends):
            if (error := _said(rule, s.changed({knob: end}))) is not None:
                raise s.refusal(name, f"its end {end} is refused: {error}", "Write a narrower envelope.")


def _said(rule: Callable[[Flat], None], s: Flat) -> SettingsError | None:
    try:
        rule(s)
    except SettingsError as error:
        return error
    return None


RULES = (*slots.RULES, envelopes_are_possible)
