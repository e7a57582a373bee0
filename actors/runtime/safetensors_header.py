"""What a safetensors file says of its tensors, read by its header alone: the standard library does, no tensor is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

MOST_BYTES = 100 << 20  # the format's own limit


class BadHeader(ValueError):
    """It is no safetensors file, or cut in its header; why, as the rest of a sentence about it."""


class SafetensorsHeader(NamedTuple):
    """`shapes`: of its tensors, by name; `need`: bytes that the whole file has."""

    shapes: dict[str, tuple[int, ...]]
    need: int


def header_of(file: Path) -> SafetensorsHeader:
    """Raises OSError and BadHeader. A file that is cut behind its header is no error here: compare its size with `need`.

    >>> header_of(Path("model.safetensors")).shapes["model.norm.weight"]
    (1024,)
    """
    with file.open("rb") as opened:
        size, first = file.stat().st_size, opened.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(MOST_BYTES, size - 8):
            raise BadHeader(f"is no safetensors file, or is cut: it has {size} bytes")
        text = opened.read(length)
    try:
        facts = {name: one for name, one in json.loads(text).items() if name != "__metadata__"}
        shapes = {name: tuple(int(n) for n in one["shape"]) for name, one in facts.items()}
        return SafetensorsHeader(shapes, 8 + length + max((int(one["data_offsets"][1]) for one in facts.values()), default=0))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise BadHeader("is no safetensors file: its header is damaged") from None
