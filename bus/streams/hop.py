"""The arguments of commit.lua, and entries of replies (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bus.blobs.api import claimed_bytes
from bus.streams.entry import Commit, Entry, Out
from bus.streams.keys import Keys
from bus.topology import Stream

ACKS = 1000  # ids in one call; Lua takes no more than 8,000 values at once
_pack = msgspec.msgpack.Encoder().encode


class Placed(msgspec.Struct, frozen=True):
    """A message to append with its encoded body: in the entry itself, or aside under `ref`."""

    out: Out
    body: bytes
    ref: str = ""

    def fields(self) -> list[Any]:
        """Flat fields of the entry; those before the body are what an operator reads."""
        kind = self.out.message.__struct_config__.tag
        last: tuple[str, Any] = ("blob", self.ref) if self.ref else ("body", self.body)
        return ["type", kind, *self.out.message.header().fields(), *last]

    def size(self, fields: Sequence[Any]) -> int:
        """Accounted bytes, as of the entry that it becomes with these fields."""
        named = fields[fields.index("asides") + 1].split() if "asides" in fields else ()
        return len(self.body) + (claimed_bytes(*named) if named else 0)


def number_in(text: str, otherwise: int) -> int:
    """A count in a readable field, which a hand may have written; `otherwise` where it is none that a 64-bit number holds."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else otherwise


def text_of(value: bytes | str | int) -> str:
    """A reply's text or number as text; what is no text shows its gaps."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def table_of(flat: Sequence[Any]) -> dict[str, Any]:
    """A reply's [name, value, ...] by name."""
    return {text_of(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def id_key(entry_id: str) -> tuple[int, int]:
    """Entry ids in the order of the stream."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


def hop_args(
    commit: Commit, placed: Sequence[Placed], *, keys: Keys, stream_keys: Mapping[str, str], bound: int
) -> tuple[list[str], list[bytes]]:
    """(keys it names beside the fixed ones, its arguments). `bound`: bytes per data stream, 0 = none."""
    acks: list[Any] = []
    named: list[str] = []
    if len(commit.ack) == 1:  # the common case
        entry = commit.ack[0]
        named.append(stream_keys[entry.stream.name])
        acks.append((named[0], entry.readers, entry.size, (entry.id,)))
    else:
        groups: dict[tuple[str, str], list[Entry]] = {}
        for entry in commit.ack:
            groups.setdefault((entry.stream.name, entry.readers), []).append(entry)
        for (name, readers), group in groups.items():
            named.append(stream_keys[name])
            group.sort(key=lambda entry: id_key(entry.id))
            for start in range(0, len(group), ACKS):
                part = group[start : start + ACKS]
                acks.append((named[-1], readers, sum(e.size for e in part), [e.id for e in part]))
    appends: list[Any] = []
    args = [b""]
    for one in placed:
        stream = one.out.stream
        key, blob_key, size, most = stream_keys[stream.name], "", 0, 0
        named.append(key)
        fields = one.fields()
        if stream.is_data:
            size, most = one.size(fields), bound
        if not one.ref:
            args.append(fields.pop())
        elif one.ref.startswith("redis:"):
            blob_key = keys.blob(one.ref.split(":")[1])
            named.append(blob_key)
        appends.append((key, size, most, blob_key, stream.cap, fields))
    prefixes = [keys.prefix(sample_id) for sample_id in commit.delete_prefixes]
    named += prefixes
    args += commit.open_groups.values()
    guard = commit.guard
    ledger = [word for pair in commit.ledger.items() for word in pair]
    state = [word for pair in commit.state.items() for word in pair]
    held = () if guard is None else (guard.field, guard.expect, guard.value)
    args[0] = _pack((acks, appends, ledger, list(commit.open_groups), commit.close_groups, prefixes, state, held))
    return named, args


_NAMES = {name.encode(): name for name in ("type", "id", "group", "version", "tokens", "knob", "note", "asides")}


def make_entry(stream: Stream, readers: str, raw: Any, deliveries: int = 1) -> Entry:
    """A reply's [id, [field, value, ...]] to an Entry."""
    entry_id, pairs = raw
    fields: dict[str, str] = {}
    body, blob = b"", ""
    each = iter(pairs)
    for name, value in zip(each, each, strict=True):
        if name == b"body":
            body = value
        elif name == b"blob":
            blob = text_of(value)
        else:
            fields[_NAMES.get(name) or text_of(name)] = value.decode("utf-8", "replace")
    size = claimed_bytes(blob) if blob else len(body)
    if "asides" in fields:
        size += claimed_bytes(*fields["asides"].split())
    return Entry(
        id=text_of(entry_id),
        stream=stream,
        readers=readers,
        fields=fields,
        body=body,
        size=size,
        blob=blob,
        deliveries=deliveries,
    )
