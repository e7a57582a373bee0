"""(pure) Rules of the governor: an envelope is possible, and holds the present value. With those of the slots that it moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from miles_async.settings import slots, staleness
from miles_async.settings.errors import SettingsError, refusal
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
    for error in _broken(s):
        raise error


def _broken(s: Flat) -> Iterator[SettingsError]:
    given = {name: text for name in GOVERNED if (text := getattr(s, name)) is not None}
    for name, text in given.items():
        knob, least, most = GOVERNED[name]
        if (ends := envelope(text)) is None:
            yield refusal(name, text, "not an envelope", "Write LOW:HIGH in whole numbers, as 1:6.")
            continue
        low, high = ends
        if low > high or low < least or high > most:
            rule = "its low end is above its high end" if low > high else f"{knob} goes from {least} to {most} here"
            yield refusal(name, text, rule, "Write LOW:HIGH with LOW at most HIGH.")
        elif s.governor and not low <= (present := getattr(s, knob)) <= high:
            word = {"over_sampling_batch_size": "what the bound admits", "sglang_server_concurrency": "auto"}.get(knob)
            shown = f"{present} ({word})" if present == 0 and word else present
            yield refusal(name, text, f"{knob} = {shown} lies outside", f"Change {knob} or the envelope.")
        elif s.governor:
            yield from _ends(s, name, knob, ends)
    if s.governor and not given:
        remedy = "Give --governor-staleness LOW:HIGH, or another envelope."
        yield refusal("governor", True, "no setting has an envelope, so that there is nothing to move", remedy)
    if s.governor and s.colocate:
        rule = "with colocate engines and trainer take turns, and neither waits for the other's speed"
        yield refusal("governor", True, rule, "Leave one of the two out.")


def _ends(s: Flat, name: str, knob: str, ends: tuple[int, int]) -> Iterator[SettingsError]:
    """What a rule of asynchrony that holds for the present value says of the envelope's ends."""
    for rule in (*staleness.RULES, *slots.RULES):
        if _said(rule, s) is not None:
            continue
        for end in dict.fromkeys(ends):
            if (error := _said(rule, s.changed({knob: end}))) is not None:
                yield refusal(
                    name, getattr(s, name), f"its end {end} is refused: {error}", "Write a narrower envelope."
                )


def _said(rule: Callable[[Flat], None], s: Flat) -> SettingsError | None:
    try:
        rule(s)
    except SettingsError as error:
        return error
    return None


RULES = (*slots.RULES, envelopes_are_possible)
