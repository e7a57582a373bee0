"""A message as plain values (pure). Packed arrays become numbers by the name of their field; nothing is executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bus.messages.base import unpack_floats, unpack_ints

_INTS = ("tokens", "prompt_tokens")
_FLOATS = ("logprobs", "teacher_logprobs")
_BYTES_PER_ITEM = 4
SHOWN_ITEMS = 12


def plain(value: Any, name: str = "") -> Any:
    """Structs to dicts, packed arrays to lists of numbers, other bytes to their repr."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        head = {"type": tag} if tag is not None else {}
        return head | {field: plain(getattr(value, field), field) for field in value.__struct_fields__}
    if isinstance(value, bytes | memoryview):
        return _array(bytes(value), name)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _array(data: bytes, name: str) -> Any:
    if name in _INTS and len(data) % _BYTES_PER_ITEM == 0:
        return unpack_ints(data)
    if name in _FLOATS and len(data) % _BYTES_PER_ITEM == 0:
        return unpack_floats(data)
    if name == "loss_mask":
        return list(data)
    return repr(data[:200]) + (f" … {len(data)} bytes" if len(data) > 200 else "")


def outline(value: Any, name: str = "", depth: int = 0) -> Iterator[str]:
    """Indented lines of plain values; long lists of numbers are cut, with their length."""
    pad = "  " * depth
    if isinstance(value, dict):
        if name:
            yield f"{pad}{name}:" if value else f"{pad}{name}: (empty)"
        for key, item in value.items():
            yield from outline(item, key, depth + bool(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield f"{pad}{name}: {len(value)} items"
        for i, item in enumerate(value):
            yield from outline(item, f"[{i}]", depth + 1)
    elif isinstance(value, list):
        yield f"{pad}{name}: {_row(value)}"
    elif isinstance(value, str) and "\n" in value:
        yield f"{pad}{name}: |"
        yield from (f"{pad}  {line}" for line in value.splitlines())
    else:
        yield f"{pad}{name}: {_scalar(value)}"


def _row(items: list[Any]) -> str:
    if not items:
        return "(empty)"
    shown = " ".join(_scalar(item) for item in items[:SHOWN_ITEMS])
    return shown + (f" … ({len(items)} in all)" if len(items) > SHOWN_ITEMS else "")


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "[" + " ".join(_scalar(item) for item in value[:SHOWN_ITEMS]) + "]"
    return "" if value is None else str(value)
