"""The transports that ship, by name, and how any is found by what `--update-weight-transport` says."""

from __future__ import annotations

from actors.kinds import own_kind
from actors.runtime.transports.ipc import IPC
from actors.runtime.transports.kind import TransportKind
from actors.runtime.transports.nccl import NCCL

DISK = TransportKind(name="disk", told="disk through files in shared memory", on_host=True)
NETWORK = TransportKind(name="network", told="whole files, fetched from another host")
"""What files become for who cannot read them where they lie; no setting names it."""
TRANSPORTS: dict[str, TransportKind] = {kind.name: kind for kind in (DISK, IPC, NCCL)}
FILES = (DISK.name, NETWORK.name)

__all__ = ("DISK", "FILES", "IPC", "NCCL", "NETWORK", "TRANSPORTS", "transport_kind", "way_of")


def transport_kind(name: str) -> TransportKind:
    """The record of a transport that a setting names: shipped, or of the user's own at a dotted path. Raises UnknownKind."""
    return TRANSPORTS.get(name) or own_kind(name, TransportKind)


def way_of(name: str, own: str) -> TransportKind | None:
    """The record of a transport that a message names; None = unknown here. `own`: what this run's settings name, which alone may be
    loaded."""
    return TRANSPORTS.get(name) or (transport_kind(name) if name == own else None)
