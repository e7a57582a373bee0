"""The arguments of commit.lua, section by section in its order (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bus.streams.entry import Commit, Entry, Out
from bus.streams.keys import Keys

ACKS = 1000  # ids in one call; Lua takes no more than 8,000 values at once


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


def text_of(value: bytes | str | int) -> str:
    """A reply's text or number as text; what is no text shows its gaps."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def id_key(entry_id: str) -> tuple[int, int]:
    """Entry ids in the order of the stream."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


def hop_args(
    commit: Commit, placed: Sequence[Placed], *, keys: Keys, stream_keys: Mapping[str, str], bound: int
) -> tuple[list[str], list[Any]]:
    """(keys it names beside the fixed ones, its sections). `bound`: bytes per data stream, 0 = none."""
    named: list[str] = []
    guard = commit.guard
    args: list[Any] = [0] if guard is None else [1, guard.field, guard.expect, guard.value]
    if len(commit.ack) == 1:  # the common case
        entry = commit.ack[0]
        named.append(stream_keys[entry.stream.name])
        args += (1, named[0], entry.readers, entry.size, 1, entry.id)
    else:
        groups: dict[tuple[str, str], list[Entry]] = {}
        for entry in commit.ack:
            groups.setdefault((entry.stream.name, entry.readers), []).append(entry)
        args.append(sum(-(-len(group) // ACKS) for group in groups.values()))
        for (name, readers), group in groups.items():
            named.append(stream_keys[name])
            group.sort(key=lambda entry: id_key(entry.id))
            for start in range(0, len(group), ACKS):
                part = group[start : start + ACKS]
                args += (named[-1], readers, sum(e.size for e in part), len(part))
                args += [e.id for e in part]
    args.append(len(placed))
    for one in placed:
        stream = one.out.stream
        key = stream_keys[stream.name]
        blob_key = keys.blob(one.ref.split(":")[1]) if one.ref.startswith("redis:") else ""
        named += (key, blob_key) if blob_key else (key,)
        held = len(one.body) if stream.is_data else 0
        fields = one.fields()
        args += (key, held, bound if stream.is_data else 0, blob_key, stream.cap, len(fields))
        args += fields
    if not (commit.ledger or commit.open_groups or commit.close_groups or commit.delete_prefixes or commit.state):
        args.append(0)
        return named, args
    args.append(1)
    for pairs in (commit.ledger, commit.open_groups):
        args.append(len(pairs))
        for name, value in pairs.items():
            args += (name, value)
    args += (len(commit.close_groups), *commit.close_groups)
    prefixes = [keys.prefix(sample_id) for sample_id in commit.delete_prefixes]
    named += prefixes
    args += (len(prefixes), *prefixes, len(commit.state))
    for name, text in commit.state.items():
        args += (name, text)
    return named, args
