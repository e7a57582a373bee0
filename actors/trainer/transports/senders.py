"""What sends a version to engines without files: the group of a broadcast or the handles of buffers, made anew when other engines
are to be reached, and what the bytes come from.

Owns the flat buffers, or nothing but the way to the weights (`passing`).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Generator
from pathlib import Path

from actors.runtime.host import shared_memory_name
from actors.trainer.spec import CourierSpec
from actors.trainer.transports.flat import FlatBuffers, NamedTensors, PassingBuckets
from actors.trainer.transports.ipc import IpcSender
from actors.trainer.transports.nccl import GroupBroken, NcclSender
from bus import Bus
from bus.messages.active import Seat
from bus.messages.policy import WeightManifest
from bus.messages.weights import WeightPlan


class Senders:
    """At most one, of `spec.transport`. `export`: the weights in buckets; `shared`: folder for buffers on a host without GPUs."""

    def __init__(self, bus: Bus, spec: CourierSpec, shared: Path, export: Callable[[], Generator[NamedTensors]]) -> None:
        self._bus = bus
        self._spec = spec
        self._export = export
        self.buffers = FlatBuffers(shared=shared if spec.transport == "ipc" else None)
        self.passing = PassingBuckets(export) if spec.transport == "nccl" and not spec.copy else None
        self.nccl: NcclSender | None = None
        self._ipc: IpcSender | None = None
        self._made_for: tuple[Seat, ...] = ()
        if spec.transport == "nccl":
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # read when NCCL starts; engines run with it, and both must

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
        deadline_s = self._spec.deadline_s
        if self._spec.transport == "ipc":
            if self._ipc is None or self._made_for != seats:
                self._ipc, self._made_for = IpcSender(tp_size=seats[0].gpus, buffers=self.buffers), seats
            workers = tuple(seat.worker for seat in seats)
            return self._ipc.plan(workers=workers, deadline_s=deadline_s, whole=whole)
        if self.nccl is None or not self.nccl.is_open or self._made_for != seats:
            self.end_group()
            source = self.passing or self.buffers
            self.nccl = NcclSender(
                {seat.worker: seat.gpus for seat in seats},
                name=f"{self._bus.config.run}-{os.getpid()}-{version}",
                address=self._address(seats),
                backend="nccl" if source.device.type == "cuda" else "gloo",
                deadline_s=deadline_s,
                buffers=source,
            )
            self._made_for = seats
        return self.nccl.plan(whole=whole)

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
        if self.nccl is not None:
            self.nccl.close()

    def close(self) -> None:
        """Leave the group and free the buffers; harmless twice."""
        self.end_group()
        if self._ipc is not None:
            self._ipc.close()
        self.nccl, self._ipc = None, None
        for file in self.buffers.files:
            file.unlink(missing_ok=True)
