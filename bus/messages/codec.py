"""One encoder, one decoder per stream's union.

Decoding never executes anything: msgspec builds only the types named in the union, and any other bytes raise BadMessage.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from bus.errors import UNREADABLE, BadMessage
from bus.messages.base import SCHEMA, Message

MAX_BODY_BYTES = 1 << 30

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Message to msgpack bytes."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decoder of one stream's tagged union."""

    def __init__(self, union: Any, stream: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self._stream = stream

    def decode(self, body: bytes | memoryview) -> M:
        """Bytes to a message; BadMessage names the stream and the reason."""
        if len(body) > MAX_BODY_BYTES:
            raise BadMessage(f"message of {len(body)} bytes on stream {self._stream} exceeds {MAX_BODY_BYTES}")
        try:
            message = self._decoder.decode(body)
        except UNREADABLE as error:
            reason = str(error).encode("unicode_escape").decode()  # it may quote the sender's bytes: one line, no control codes
            raise BadMessage(f"undecodable message on stream {self._stream}: {reason}") from error
        if (schema := getattr(message, "schema", SCHEMA)) > SCHEMA:
            raise BadMessage(
                f"message on stream {self._stream} is of schema {schema}, this release reads up to {SCHEMA}: update it here"
            )
        return message
