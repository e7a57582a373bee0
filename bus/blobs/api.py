"""Claim checks: bodies too large for a stream entry lie elsewhere and only a reference travels.

A reference is "<store>:<id>:<bytes>", for example "file:3f2a...:2400000". The life of a blob is tied to its entry: it is
written before the entry that names it and deleted after the acknowledgement of that entry. What a crash leaves behind in
between is an orphan, which `bus.sweep` finds by comparing with the references that the streams still hold.
"""

from __future__ import annotations

from typing import Protocol

from bus.errors import BadMessage


class BlobStore(Protocol):
    """Where large bodies lie. `full`: what a body waits for; empty = none waits."""

    full: str

    async def put(self, body: bytes) -> str:
        """Store and return the reference. The body is complete when this returns."""
        ...

    async def get(self, ref: str) -> bytes:
        """The body; Transient when the store does not answer, BadMessage when the body is gone or cut."""
        ...

    async def delete(self, refs: list[str]) -> None:
        """Forget bodies; unknown references are not an error."""
        ...

    async def list_ids(self) -> list[tuple[str, float]]:
        """All bodies with the seconds since they were written or read, for `sweep_orphans`. Store and id of a reference are true;
        its size is not asked for."""
        ...


def parse_ref(ref: str, store: str) -> tuple[str, int]:
    """Reference to (id, bytes); BadMessage when it is not one of `store`."""
    kind, _, rest = ref.partition(":")
    blob_id, _, size = rest.partition(":")
    sound = ref.isascii() and blob_id.isalnum() and size.isdecimal() and len(ref) <= 100
    if kind != store or not sound:
        raise BadMessage(f"blob reference {ref!r} is not one of the {store} store")
    return blob_id, int(size)


def claimed_bytes(*refs: str) -> int:
    """Accounted bytes of references, 0 for one that is none: whoever reads the message finds out."""
    sizes = (ref.rpartition(":")[2] for ref in refs)
    return sum(int(size) for size in sizes if size.isascii() and size.isdecimal() and len(size) <= 12)


def ids_of(refs: list[str], store: str) -> list[str]:
    """Blob ids of those references that are of `store`; what else an entry may claim names nothing of ours."""
    ids: list[str] = []
    for ref in refs:
        try:
            ids.append(parse_ref(ref, store)[0])
        except BadMessage:
            continue
    return ids
