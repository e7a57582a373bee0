"""Labels that the rule of their row cannot read: no answer to such a prompt earns anything, and nothing else would say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actors.reward.rules import readable_label
from actors.runtime.parts import BadRow, parts_of
from actors.runtime.rows import PlacedRow


def unread(head: Sequence[PlacedRow], rule: str | None, keys: Mapping[str, str | None], over: Mapping[str, Any]) -> tuple[int, str]:
    """How many of these rows have a label that their rule cannot read, and the first of them in words. `rule`: of rows whose
    metadata names none; `keys`: the columns by setting, as `parts_of` has them; `over`: laid over each row's metadata."""
    found = list(_unread(head, rule, keys, over))
    return len(found), found[0] if found else ""


def _unread(head: Iterable[PlacedRow], rule: str | None, keys: Mapping[str, str | None], over: Mapping[str, Any]) -> Iterable[str]:
    for at, number, given, padded in head:
        try:
            row = parts_of(given, keys, chat=True, supervised=True, padded=padded, objects=True)
        except BadRow:
            continue  # refused elsewhere
        own = str(over.get("rm_type") or row.metadata.get("rm_type") or rule or "")
        if own and not readable_label(own, row.label):
            yield f"{at}, row {number}: {row.label[:60]!r} under {own}"
