"""JSON that a model wrote, as far as everybody can take it who handles a call (pure).

Always true: what is read holds no half of a character, no NaN or infinity, no integer beyond 64 bits, and at most MOST_DEPTH tables
and lists in each other, which templates and encoders walk by recursion. Time is linear in the text.
"""

from __future__ import annotations

import json
import math
from typing import Any

MOST_DEPTH = 64


def _number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{_short(digits)} is too large a number")
    return number


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(f"an integer of {len(digits)} characters is too large; give it as a text")
    return number


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_decoder = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_no_number)


def read(text: str) -> Any:
    """JSON that all who handle a call can take. Raises ValueError."""
    try:
        value = _decoder.decode(text)
        if depth_of(value) > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} tables and lists in each other")
        if "\\u" in text or not text.isascii():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"more than {MOST_DEPTH} tables and lists in each other") from None
    except UnicodeEncodeError:
        raise ValueError("half of a character (a surrogate that stands alone)") from None
    return value


def depth_of(value: Any) -> int:
    """How many tables and lists of a JSON value stand in each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def end_of(text: str, at: int) -> int:
    """Where the JSON value ends that begins there; the end of the text where none does, which `read` says with its cause."""
    try:
        return int(_decoder.raw_decode(text, at)[1])
    except (ValueError, RecursionError):
        return len(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
