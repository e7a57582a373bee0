"""Numbers as functions of the user's give them (pure): of Python, numpy and torch alike."""

from __future__ import annotations

from typing import Any


def number_of(value: object) -> float | None:
    """A number, or an array's only one, as a float; None for anything else, texts among them."""
    try:
        only: Any = value.item() if hasattr(value, "item") else value
        return None if isinstance(only, str | bytes | bytearray) else float(only)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def listed(values: Any) -> Any:
    """An array as a list, anything else as it is."""
    return values.tolist() if getattr(values, "ndim", 0) and hasattr(values, "tolist") else values
