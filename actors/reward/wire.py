"""What pool and verifier process say to each other: msgpack frames over pipes, a 4-byte little-endian length before each.

The pool asks, the verifier answers; numbers tell the questions apart. Nothing is pickled in either direction.
"""

from __future__ import annotations

from typing import Any

import msgspec

from actors.runtime.hooks import framed
from actors.runtime.numbers import listed, number_of
from bus.errors import printable

MAX_FRAME_BYTES = 256 << 20

Scalar = float | str | None
Plain = Scalar | dict[str, Scalar] | list[Scalar | dict[str, Scalar]]
"""A hook's answer as it travels: numbers as floats; anything that is no number as a short text that says what it was."""


class Ready(msgspec.Struct, tag="ready"):
    """First frame of a verifier: the hook is loaded, or why it is not."""

    is_async: bool = False
    error: str = ""


class ScoreOrder(msgspec.Struct, tag="ask"):
    """Score this sample (a dict for the hook), or all samples of a group."""

    number: int
    sample: dict[str, Any] | list[dict[str, Any]]


class Cancel(msgspec.Struct, tag="cancel"):
    """The question's deadline has passed; answer that it was cancelled."""

    number: int


class ScoreAnswer(msgspec.Struct, tag="answer"):
    """What the hook returned, or the one-line error and the trace of what it raised."""

    number: int
    value: Plain = None
    error: str = ""
    trace: str = ""


ToVerifier = ScoreOrder | Cancel
FromVerifier = Ready | ScoreAnswer

_encoder = msgspec.msgpack.Encoder()
decode_to_verifier = msgspec.msgpack.Decoder(ToVerifier).decode
decode_from_verifier = msgspec.msgpack.Decoder(FromVerifier).decode


def frame(message: ToVerifier | FromVerifier) -> bytes:
    """Message to bytes with their length in front."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return framed(body)


def plain(value: object) -> Plain:
    """A hook's answer in terms that travel, of a group a list, which may be an array. Tables keep their keys; numpy and torch
    scalars become floats."""
    if isinstance(value, dict):
        return {printable(str(key)): _scalar(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]  # type: ignore[misc]
    if number_of(value) is None and isinstance(found := listed(value), list):
        return plain(found)
    return _scalar(value)


def _scalar(value: object) -> Scalar:
    if value is None:
        return None
    if isinstance(value, str):
        return printable(value[:200])
    number = number_of(value)
    return f"<{type(value).__name__}>" if number is None else number
