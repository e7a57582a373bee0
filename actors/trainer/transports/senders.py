"""What sends a version to engines without files: the group of a broadcast or the handles of buffers, made anew when other engines
are to be reached, and what the bytes come from.

Owns the flat buffers, or nothing but the way to the weights (`passing`).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from actors.kinds import UnknownKind
from actors.runtime.hooks import load_hook
from actors.runtime.host import shared_memory_name
from actors.runtime.run import Refused
from actors.runtime.transports.kind import Sender, SendingTo
from actors.runtime.transports.records import transport_kind
from actors.trainer.spec import CourierSpec
from actors.trainer.transports.flat import FlatBuffers, NamedTensors, PassingBuckets
from actors.trainer.transports.nccl import GroupBroken
from bus import Bus
from bus.messages.active import Seat
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan


class Senders:
    """At most one, of `spec.transport`. `export`: the weights in buckets; `shared`: folder for buffers on a host without GPUs.
    Raises Refused where that transport's sender cannot be had."""

    def __init__(self, bus: Bus, spec: CourierSpec, shared: Path, export: Callable[[], Generator[NamedTensors]]) -> None:
        self._bus = bus
        self._spec = spec
        self._export = export
        try:
            self.kind = transport_kind(spec.transport)
        except UnknownKind as error:
            raise Refused(f"transport {spec.transport} cannot be loaded: {error}") from error
        self._make: Callable[[SendingTo], Sender] | None = None if self.kind.whole else load_hook(self.kind.sender)
        self.buffers = FlatBuffers(shared=shared if self.kind.shares else None)
        self.passing = PassingBuckets(export) if self.kind.passes and not spec.copy else None
        self.sender: Sender | None = None
        self._made_for: tuple[Seat, ...] = ()
        for name, value in self.kind.variables.items():
            os.environ.setdefault(name, value)

    def take(self) -> WeightManifest:
        """In the training's thread: the weights as they are now, into the buffers if there are any."""
        if self.passing is not None:
            self.passing.measure()
        else:
            self.buffers.fill(self._export())
        buckets = (self.passing or self.buffers).buckets
        n_tensors, n_bytes = sum(len(b.tensors) for b in buckets), sum(b.n_bytes for b in buckets)
        return WeightManifest(transport=self._spec.transport, host=shared_memory_name(), n_tensors=n_tensors, n_bytes=n_bytes)

    def plan(self, seats: tuple[Seat, ...], whole: str, *, version: int) -> WeightPlan:
        """For these engines. `whole`: see WeightPlan. Raises GroupBroken where they could not reach us."""
        assert self._make is not None
        if self.sender is None or not self.sender.is_open or self._made_for != seats:
            self.end_group()
            self.sender = self._make(
                SendingTo(
                    seats=seats,
                    buffers=self.passing or self.buffers,
                    address=lambda: self._address(seats),
                    name=f"{self._bus.config.run}-{os.getpid()}-{version}",
                    deadline_s=self._spec.deadline_s,
                )
            )
            self._made_for = seats
        return msgspec.structs.replace(self.sender.plan(whole=whole), transport=self._spec.transport)

    def _address(self, seats: tuple[Seat, ...]) -> str:
        if all(seat.host == shared_memory_name() for seat in seats):
            return "127.0.0.1"
        address = self._bus.link.local_address
        if not address or ipaddress.ip_address(address).is_loopback:
            raise GroupBroken(
                "engines on other hosts cannot reach this one by the address of its bus connection "
                f"({address or 'a socket'}): give --bus-url an address of the network they share"
            )
        return address

    def end_group(self) -> None:
        """Leave the group, if there is one."""
        if self.sender is not None and self.kind.broadcasts:
            self.sender.close()

    def close(self) -> None:
        """Leave the group and free the buffers; harmless twice."""
        if self.sender is not None:
            self.sender.close()
        self.sender = None
        for file in self.buffers.files:
            file.unlink(missing_ok=True)
