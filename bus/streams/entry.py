"""Values of the bus: what was read, what is to be written, what one commit does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from bus.messages.base import Message
from bus.topology import Stream


class Entry(msgspec.Struct, frozen=True):
    """One entry read from a stream. `body` is decoded by `Bus.message`, never before: bad bytes must be addressable."""

    id: str
    stream: Stream
    readers: str
    fields: Mapping[str, str]
    body: bytes
    size: int  # accounted bytes: body, or blob size, and what its body names beside it
    blob: str = ""
    deliveries: int = 1

    @property
    def asides(self) -> list[str]:
        """References to what moves on with its body."""
        return self.fields.get("asides", "").split()


class Out(msgspec.Struct, frozen=True):
    """One message to append."""

    stream: Stream
    message: Message


class Guard(msgspec.Struct, frozen=True):
    """Compare-and-set on a field of the state hash: the commit takes effect only if the field holds `expect`.

    A commit repeated after an unknown outcome finds `value` already there and is reported as done.
    """

    field: str
    expect: str
    value: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One atomic step. All acknowledgements must still be pending, or nothing at all happens."""

    ack: Sequence[Entry] = ()
    append: Sequence[Out] = ()
    ledger: Mapping[str, int] = {}
    open_groups: Mapping[str, bytes] = {}
    close_groups: Sequence[str] = ()
    delete_prefixes: Sequence[str] = ()
    guard: Guard | None = None
    state: Mapping[str, str] = {}
    bounded: bool = False  # wait while a target stream is over its byte bound


class CommitResult(msgspec.Struct, frozen=True):
    """`done`: this call or an identical earlier one took effect. `moved`: ids that were no longer pending."""

    done: bool
    moved: tuple[str, ...] = ()
    entry_ids: tuple[str, ...] = ()


class RunSnapshot(msgspec.Struct, frozen=True):
    """A run's small state at one instant."""

    state: dict[str, str]
    ledger: dict[str, int]
    open_groups: dict[str, bytes]
