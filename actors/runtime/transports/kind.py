"""What a way of weights to engines is: one record, which three rooms and the settings ask.

A version is whole files, which a worker names to its engine, or it is held by the trainer, which makes a plan for the engines that
can take it so, waits until all are ready, and sends or lends it; whoever cannot takes files. `sender` names what the trainer does,
`join` and `load` are what a worker does.

    KIND = Mine(name="mine", told="over my own wire", sender="my_module:open_sender")      --update-weight-transport my_module:KIND
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from actors.kinds import KindRecord

if TYPE_CHECKING:
    from bus.messages.active import Seat
    from bus.messages.weights import Bucket, TensorMeta, WeightPlan

Asks = Literal["files", "tensors", "group"]
"""What an engine can be asked to do: load whole files, map buffers that the trainer exported, receive in a broadcast group."""


class NotCounted(Exception):
    """The engine could not count its tokens and has received nothing."""


class TransportBroken(Exception):
    """What came is not what was sent, or did not come; in one line. The version goes by files."""


class Takes(Protocol):
    """Of an engine (actors/generation/engine.py) what a transport may ask: see there."""

    async def update_weights_from_disk(self, path: str, version: str) -> None: ...

    async def update_weights_from_tensor(self, handles: Sequence[str], version: str | None, quick: Sequence[str] = ()) -> None: ...

    async def init_weights_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None: ...

    async def update_weights_from_distributed(self, tensors: Sequence[TensorMeta], group: str, version: str | None) -> None: ...

    async def destroy_weights_update_group(self, group: str) -> None: ...

    async def receive(self, buckets: Sequence[Bucket], group: str, version: str, before: str | None = None) -> bool: ...


class SendingTo(NamedTuple):
    """What a sender is made of. `seats`: engines that it is for, and no others; `buffers`: trainer/transports/flat.FlatBuffers, or
    PassingBuckets where nothing is kept; `address`: ours, as engines at the seats reach it (raises GroupBroken where they cannot);
    `name`: of a group, used once; `deadline_s`: longest wait for all engines, and of a broadcast."""

    seats: tuple[Seat, ...]
    buffers: Any
    address: Callable[[], str]
    name: str
    deadline_s: float


class Sender(Protocol):
    """The trainer's side, for the engines it was made for. GroupBroken where it fails: the version goes by files. Called in
    threads."""

    @property
    def is_open(self) -> bool:
        """Whether it can be used; else another is made."""
        ...

    def plan(self, *, whole: str = "") -> WeightPlan:
        """What workers must know to take what the buffers hold. `whole`: see WeightPlan."""
        ...

    def open(self) -> None:
        """Be ready to send, while engines go on with the version before; waits for them, at most the deadline."""
        ...

    def send(self) -> None:
        """All workers said that they are ready: send what the buffers hold. Returns once they hold it (`broadcasts`); else they
        take it themselves, and report."""
        ...

    def close(self) -> None:
        """Use it no more; harmless twice."""
        ...


class TransportKind(KindRecord, frozen=True, kw_only=True):
    """A way of weights."""

    sender: str = ""
    """What makes the trainer's side, by dotted path: (SendingTo) -> Sender. Empty = there is none: the version is whole files."""
    asks: Asks = "files"
    """What an engine must be able to do."""
    on_host: bool = False
    """Only engines on the trainer's host can take it."""
    broadcasts: bool = False
    """Engines are in a group with the trainer, and `send` returns once all hold the version; else they take it themselves."""
    shares: bool = False
    """On a host without GPUs its buffers are files that other processes map."""
    maps_gpu: bool = False
    """Engines on GPUs must see the trainer's GPU too."""
    passes: bool = False
    """It can send from the weights themselves, without a copy (--no-update-weight-copy)."""
    variables: Mapping[str, str] = {}
    """Of the trainer's process, where nothing else is said."""

    def lacks(self) -> str:
        sends_only = self.sender and type(self).load is TransportKind.load
        return "has a sender and no method load, which a worker calls" if sends_only else ""

    @property
    def whole(self) -> bool:
        """Whether versions are whole files; they can then go in waves, one part of the engines after the other."""
        return not self.sender

    def seats(self, seats: Mapping[str, Seat], host: str) -> dict[str, Seat]:
        """Those of `seats` (worker -> its engine) that a trainer on `host` can send to at once (pure)."""
        return {name: seat for name, seat in seats.items() if seat.host == host or not self.on_host}

    def copies_beside(self, lent: bool) -> bool:
        """Whether a copy of the weights lies on a GPU that engines share with the trainer. `lent`: only while it lends it."""
        return False

    async def join(self, engine: Takes, plan: WeightPlan, worker: str, group: str) -> str:
        """Before the trainer sends: the engine takes its place. `group`: where it is already. Where it is now."""
        return group

    async def load(self, engine: Takes, plan: WeightPlan, label: str, before: str | None = None) -> None:
        """All tensors into the paused engine, which states `label` only once it holds all of them. `before`: see Engine.receive;
        NotCounted where it cannot count. Raises TransportBroken for what did not arrive whole, before the engine takes it."""
        raise NotImplementedError(f"transport {self.name} brings whole files alone")
