"""Every named failure. The class decides what happens next; the message says what, where, why, what to do.

MilesAsyncError
├── Transient            try again, here or elsewhere
│   └── BusUnreachable   the server does not answer
├── Poison               this item will never work: dead-letter it
│   └── BadMessage       bytes on the bus that are not a message of ours
├── InvariantBroken      stop: going on would corrupt the run
│   ├── NameTaken        another process has this actor's name
│   └── Garbage          a key of the run holds what is none of it
├── BusRefused           the server is there but not fit (version, eviction policy, role)
├── BusWentBack          the server came back without this run, or as it was long ago
├── BusFull              the server refuses writes: out of memory, read-only, disk full
├── KnobRejected         a live patch that fails its check; nothing changed
├── CheckpointRefused    a checkpoint that is damaged or belongs to another run or model
└── DeadlineExceeded     a named wait ran out (also a Transient)

Unknown exceptions are treated as Poison.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it cannot read: of text that is no UTF-8, or nested too deep, no error of its own."""

_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_SHOWN |= {code: f"\\u{code:x}" for code in range(0xD800, 0xE000)}  # halves of a pair, which no message takes


def printable(text: str) -> str:
    """Text for terminals, logs and events, its control characters (but line feed and tab) as backslash, x and two digits, and
    what is no text as its number: hooks, engines and models write what they like, and a terminal would obey it."""
    return text.translate(_SHOWN)


class MilesAsyncError(Exception):
    """Root of the tree; the text is one line meant for the operator."""


class Transient(MilesAsyncError):
    """May work later or elsewhere."""


class Poison(MilesAsyncError):
    """Will never work for this item."""


class InvariantBroken(MilesAsyncError):
    """The process must stop before it serves another entry."""


class NameTaken(InvariantBroken):
    """Another process has this actor's name: it goes on, this one ends."""


class Garbage(InvariantBroken):
    """A key of the run holds what none of its processes wrote there; a restart would meet it again."""

    @classmethod
    def of_hash(cls, key: str, field: str, error: object) -> Garbage:
        """In a field of a hash."""
        return cls(_garbage(f"field {field[:80]!r} of key {key}", error, f"HDEL '{key}' '{field[:80]}'"))

    @classmethod
    def of_key(cls, key: str, error: object) -> Garbage:
        """In a key that is one text."""
        return cls(_garbage(f"key {key}", error, f"DEL '{key}'"))


def _garbage(where: str, error: object, command: str) -> str:
    return (
        f"{where} holds what this run did not write there ({error}). Another program writes on its Redis: end that, take it away "
        f"(redis-cli {command}; a private Redis has ended with the run: move its folder redis away), then give the same command."
    )


class BusUnreachable(Transient):
    """The server does not answer within the deadline."""


class BusRefused(MilesAsyncError):
    """The server answers but must not be used."""


class BusWentBack(MilesAsyncError):
    """What the server holds is not what this run goes on from: it must be given the checkpoint's state first."""


class BusFull(Transient):
    """The server refuses writes; reads and acknowledgements still go through."""


class BadMessage(Poison):
    """Bytes that do not decode to a message of the stream they lie on."""


class DeadlineExceeded(Transient):
    """A wait with a name ran out."""


class KnobRejected(MilesAsyncError):
    """A knob patch that fails its check."""

    def __init__(self, *, knob: str, value: object, rule: str, remedy: str) -> None:
        super().__init__(f"{knob}={value!r} refused: {rule}. {remedy} Live value unchanged.")


class CheckpointRefused(MilesAsyncError):
    """A checkpoint that must not be loaded."""


class CheckpointOfAnother(CheckpointRefused):
    """It is whole, but of another model, library or optimizer, as those beside it will be."""
