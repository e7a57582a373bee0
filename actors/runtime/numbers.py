"""Numbers as functions of the user's give them (pure): of Python, numpy and torch alike."""

from __future__ import annotations

import math
from typing import Any


def number_of(value: object) -> float | None:
    """A number, or an array's only one, as a float (too large a one is infinite); None for anything else, texts among them."""
    try:
        only: Any = value.item() if hasattr(value, "item") else value
        if isinstance(only, str | bytes | bytearray):
            return None
        try:
            return float(only)
        except OverflowError:  # of Python's whole numbers
            return math.inf if only > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def listed(values: Any) -> Any:
    """An array as a list, anything else as it is."""
    return values.tolist() if getattr(values, "ndim", 0) and hasattr(values, "tolist") else values
