"""What all messages share: frozen, map-keyed, tagged, numbered.

Rules that keep old bytes readable for ever: add fields at the end with a default; never rename, retype or remove one;
unknown fields are ignored (rolling upgrades). `schema` is raised only when a message means something else than an older reader
takes it for; that reader then refuses it as content it cannot judge. Golden bytes of every number lie in tests/wire.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec

SCHEMA = 2


class Header(msgspec.Struct, frozen=True):
    """What an operator reads beside the body with `redis-cli XRANGE`; empty fields are left out."""

    id: str = ""
    group: str = ""
    version: int = -1
    tokens: int = -1
    knob: int = -1
    note: str = ""
    plan: str = ""  # a blob that the body names, which is kept as long as the entry
    asides: str = ""  # blobs that the body names and that move on with it, references with blanks between them
    inputs: str = ""  # blobs that several entries name and whoever wrote them deletes, likewise

    def fields(self) -> list[str | int]:
        """Flat field list [name, value, ...]."""
        flat: list[str | int] = []
        if self.id:
            flat += ["id", self.id]
        if self.group:
            flat += ["group", self.group]
        if self.version >= 0:
            flat += ["version", self.version]
        if self.tokens >= 0:
            flat += ["tokens", self.tokens]
        if self.knob >= 0:
            flat += ["knob", self.knob]
        if self.note:
            flat += ["note", self.note]
        if self.plan:
            flat += ["plan", self.plan]
        if self.asides:
            flat += ["asides", self.asides]
        if self.inputs:
            flat += ["inputs", self.inputs]
        return flat


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of everything that travels."""

    schema: int = SCHEMA

    def header(self) -> Header:
        """Readable fields of the stream entry."""
        return Header()


# Packed little-endian arrays stay views into the body they were decoded from: no copy between the socket and torch.
Packed = memoryview
EMPTY: Packed = memoryview(b"")

if sys.byteorder != "little":
    raise ImportError("miles_async packs arrays little-endian and runs on little-endian machines only")


def pack_ints(values: Iterable[int]) -> Packed:
    """Token ids as packed int32."""
    return memoryview(array("i", values).tobytes())


def pack_floats(values: Iterable[float]) -> Packed:
    """Log-probabilities as packed float32."""
    return memoryview(array("f", values).tobytes())


def join(parts: Iterable[Packed]) -> Packed:
    """Packed arrays of one type, one after the other."""
    return memoryview(b"".join(parts))


def unpack_ints(data: bytes | memoryview) -> list[int]:
    """int32 bytes to a list of ints."""
    out = array("i")
    out.frombytes(data)
    return out.tolist()


def unpack_floats(data: bytes | memoryview) -> list[float]:
    """float32 bytes to a list of floats."""
    out = array("f")
    out.frombytes(data)
    return out.tolist()
