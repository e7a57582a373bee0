"""(pure) What a live value must be, as the stream's first entry says it: type, bounds, choices. Rules between values are not
known here; who proposes a patch brings them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bus.errors import KnobRejected
from bus.messages.control import Kind

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def range_text(kind: Kind) -> str:
    """The permitted values in words."""
    if kind.choices:
        text = "one of " + ", ".join(kind.choices)
    else:
        bounds = (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
        text = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None) or _WORDS[kind.type]
    return f"{text}; none turns it off" if kind.optional else text


def checked(name: str, value: Any, kinds: Mapping[str, Kind]) -> Any:
    """The value, a whole number as float where the kind is one; KnobRejected if it is none of the kind."""
    kind = kinds.get(name)
    if kind is None:
        raise KnobRejected(knob=name, value=value, rule="fixed for the whole run", remedy="Set it for a new run.")
    if value is None and kind.optional:
        return None
    right = isinstance(value, _TYPES[kind.type]) and (kind.type == "bool" or not isinstance(value, bool))
    if right and kind.type == "float":
        value = _as_float(value)
    if not right or (isinstance(value, float) and not math.isfinite(value)):
        remedy = f"Give {_WORDS[kind.type]}, {range_text(kind)}."
        raise KnobRejected(knob=name, value=value, rule=f"not {_WORDS[kind.type]}", remedy=remedy)
    if not _permitted(kind, value):
        raise KnobRejected(knob=name, value=value, rule="out of range", remedy=f"Give {range_text(kind)}.")
    return value


def _as_float(value: float) -> float:
    """The nearest one; infinite for a whole number beyond them all."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _permitted(kind: Kind, value: Any) -> bool:
    if kind.choices:
        return value in kind.choices
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )
