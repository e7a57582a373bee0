"""Who is to serve which version, and who does. Stream `active`, which the publisher writes."""

from __future__ import annotations

import msgspec

from bus.messages.base import Header, Message
from bus.messages.policy import WeightManifest
from bus.messages.versions import PolicyVersion
from bus.messages.weights import Parcel


class Seat(msgspec.Struct, frozen=True):
    """An engine that can be sent to: its GPUs (ranks in a broadcast group), its host, and which incarnation it is: an engine
    that was away is in no group any more."""

    worker: str
    gpus: int = 1
    host: str = ""
    stint: str = ""


class Send(Message, frozen=True, kw_only=True, tag="active.send"):
    """Bring this version to these engines. publisher -> trainer, which answers `WeightsReady` or `SendFailed`.

    `transport` disk: write whole files, anew where `attempt` is higher than that of those written. nccl, ipc: said once for a
    version, and again with those that are left when an engine was lost; a trainer that has begun to send goes on with the rest.
    """

    version: PolicyVersion
    transport: str
    seats: tuple[Seat, ...] = ()
    attempt: int = 0

    def header(self) -> Header:
        return Header(id=f"send{self.version.id}", version=self.version.id, note=self.transport)


class Activate(Message, frozen=True, kw_only=True, tag="active.order"):
    """Serve this version. publisher -> generation. `workers` empty = all. Transport network: fetch the `parcel` from the first
    of `sources` that has it; a source without a host is on that of the bus. `delta`: files that make it of the parcel `base`, for
    who has that (actors/runtime/delta.py)."""

    version: PolicyVersion
    manifest: WeightManifest
    mode: str = "retract"
    workers: tuple[str, ...] = ()
    parcel: Parcel | None = None
    sources: tuple[str, ...] = ()
    delta: Parcel | None = None
    base: str = ""

    def header(self) -> Header:
        number = self.version.id
        return Header(id=f"activate{number}", version=number, note=self.mode, plan=self.manifest.plan)


class PolicyActive(Message, frozen=True, kw_only=True, tag="active.state"):
    """Who serves what. publisher -> sampler, evaluator, generation. Written whenever it changes, by more than a tenth in the
    case of `slots`."""

    version: PolicyVersion  # newest version active on at least one engine
    serving: dict[str, int] = {}  # worker -> version id
    slots: dict[str, int] = {}  # worker -> samples it takes at once; a worker that is missing takes the knob's number
    masked_fraction: float = 0.0  # of the tokens of batch `masked_step`, those over the staleness bound
    masked_step: int = -1  # newest training step done; -1 = none yet

    def header(self) -> Header:
        return Header(id=f"active{self.version.id}", version=self.version.id, note=f"engines={len(self.serving)}")
