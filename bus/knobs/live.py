"""The knobs stream: checked patches as numbered epochs, read by every actor.

Reads and writes  knobs    Owns  state field `knob_epoch`
The first entry holds all values; each later one what it changed. The stream is the truth: a rerun of the same run keeps
what was tuned. Two patches at once cannot both take an epoch: the loser is checked again against the winner's result.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from bus.errors import BadMessage, BusRefused, InvariantBroken, KnobRejected
from bus.knobs.table import check_patch, check_whole
from bus.messages.control import KnobPatch
from bus.streams.entry import Commit, Entry, Guard, Out
from bus.streams.reader import Tail
from bus.streams.redis import Bus
from bus.topology import KNOBS as STREAM

STATE_FIELD = "knob_epoch"
_TRIES = 32


class KnobValues(msgspec.Struct, frozen=True):
    """All values under one epoch; take one snapshot per decision. `values.lr` and `snapshot.lr` are the same."""

    epoch: int
    values: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"no knob {name!r} in the initial values of this run") from None


class KnobDifference(msgspec.Struct, frozen=True):
    """A live value that stays although the settings say otherwise."""

    name: str
    live: Any
    given: Any
    epoch: int

    def __str__(self) -> str:
        return f"{self.name} stays {self.live!r} (knob epoch {self.epoch}), the settings say {self.given!r}"


def fold(current: KnobValues | None, patch: KnobPatch) -> KnobValues:
    """Values after a patch (pure). A patch of an epoch already passed changes nothing; KnobRejected for one that does
    not hold, whoever wrote it: the values stay."""
    if current is not None and patch.epoch <= current.epoch:
        return current
    merged = {**(current.values if current is not None else {}), **patch.values}
    return KnobValues(patch.epoch, MappingProxyType(check_whole(merged, other_release=True)))


def values_at(history: Sequence[KnobPatch], epoch: int) -> KnobValues:
    """Values under an epoch, for replay; KnobRejected when the history does not reach back to it."""
    current: KnobValues | None = None
    for patch in history:
        if patch.epoch <= epoch:
            current = fold(current, patch)
    if current is None or current.epoch != epoch:
        known = f"{history[0].epoch} to {history[-1].epoch}" if history else "none"
        raise KnobRejected(knob="epoch", value=epoch, rule=f"known epochs are {known}", remedy="Choose one of them.")
    return current


async def read_history(bus: Bus) -> list[KnobPatch]:
    """All patches in order, the initial values first; what is no valid patch is left out."""
    history: list[KnobPatch] = []
    current: KnobValues | None = None
    for entry in await bus.scan_all(STREAM):
        try:
            patch = await bus.message(entry)
            after = fold(current, patch)
        except (BadMessage, KnobRejected):
            continue
        if after is not current:
            current = after
            history.append(patch)
    return history


async def publish_initial(
    bus: Bus, values: Mapping[str, object], *, epoch: int = 0, author: str = "launcher"
) -> list[KnobDifference]:
    """Write all values once per run, before any actor starts. A rerun keeps what is live and returns where it differs.

    `epoch` is above 0 when a checkpoint's values are written to a fresh bus. Values that the run does not know yet (of
    a newer release) are added. KnobRejected when the values themselves do not hold.
    """
    given = check_whole(values)
    for _ in range(_TRIES):
        history = await read_history(bus)
        if history:
            live = values_at(history, history[-1].epoch)
            new = {name: value for name, value in given.items() if name not in live.values}
            if not new:
                return [
                    KnobDifference(name, live.values[name], value, live.epoch)
                    for name, value in given.items()
                    if live.values[name] != value
                ]
            patch = KnobPatch(epoch=live.epoch + 1, values=new, author=author, reason="new in this release")
        else:
            patch = KnobPatch(epoch=epoch, values=given, author=author, reason="initial", wall=bus.clock.wall())
        await _append(bus, patch)
    raise InvariantBroken(f"knobs of run {bus.config.run} could not be published: the stream changes all the time")


async def propose(bus: Bus, patch: Mapping[str, object], *, author: str, reason: str = "") -> KnobPatch:
    """Check a patch against the present whole and append it; the epoch it got is in the result.

    KnobRejected changes nothing: unknown name, wrong type, out of range, a rule between knobs, or nothing would change.
    """
    if not patch:
        raise KnobRejected(knob="(none)", value="", rule="the patch is empty", remedy="Write name=value.")
    for _ in range(_TRIES):
        history = await read_history(bus)
        if not history:
            raise BusRefused(_no_knobs(bus))
        live = values_at(history, history[-1].epoch)
        changes = check_patch(live.values, patch)
        if not changes:
            name, value = next(iter(patch.items()))
            raise KnobRejected(knob=name, value=value, rule="it has this value already", remedy="Give another value.")
        made = KnobPatch(epoch=live.epoch + 1, values=changes, author=author, reason=reason, wall=bus.clock.wall())
        if await _append(bus, made):
            return made
    raise InvariantBroken(f"knobs of run {bus.config.run} change faster than a patch can be checked; try again")


async def revert(bus: Bus, epoch: int, *, author: str, reason: str = "") -> KnobPatch:
    """A new epoch with the values of an earlier one."""
    history = await read_history(bus)
    if not history:
        raise BusRefused(_no_knobs(bus))
    then, live = values_at(history, epoch), values_at(history, history[-1].epoch)
    back = {name: value for name, value in then.values.items() if live.values[name] != value}
    back.pop("global_batch_size", None)  # follows
    if not back:
        raise KnobRejected(knob="epoch", value=epoch, rule="its values are live", remedy="Choose another epoch.")
    return await propose(bus, back, author=author, reason=reason or f"back to epoch {epoch}")


async def _append(bus: Bus, patch: KnobPatch) -> bool:
    """Append if the run's epoch is still the one before; False when somebody else was faster."""
    before = await bus.state(STATE_FIELD)
    epoch_before = int(before.partition(":")[0]) if before else -1
    if before and epoch_before >= patch.epoch:
        return False
    # The value is unique to this call: two different patches for one epoch must not be taken for a repetition.
    guard = Guard(STATE_FIELD, before, f"{patch.epoch}:{uuid.uuid4().hex[:12]}")
    try:
        await bus.commit(Commit(append=(Out(STREAM, patch),), guard=guard))
    except InvariantBroken:
        if await bus.state(STATE_FIELD) == before:
            raise
        return False
    return True


def _no_knobs(bus: Bus) -> str:
    return (
        f"run {bus.config.run} has no knobs at {bus.link.shown}: it was never started there. Start it with miles-async "
        "train, or correct --name and --bus-url."
    )


class LiveKnobs:
    """One process's view of the knobs: `open`, then `follow` in a task of its own, `snapshot` anywhere.

    `rejected` keeps the last entries of the stream that were no valid patch; they change nothing.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tail = Tail(bus, [STREAM])
        self._current: KnobValues | None = None
        self._history: list[KnobPatch] = []
        self._restarts_seen = 0
        self.rejected: list[str] = []

    async def open(self, *, deadline_s: float = 20.0) -> None:
        """Read all epochs so far; waits for the first until the deadline (woken by the blocking read), or BusRefused."""
        until = self._bus.clock.monotonic() + deadline_s
        try:
            await self._reload()
            while self._current is None:
                if self._bus.clock.monotonic() > until:
                    raise BusRefused(_no_knobs(self._bus))
                await self._read(min(0.5, deadline_s))
        except BaseException:
            await self._tail.close()
            raise

    def snapshot(self) -> KnobValues:
        """The present values; they do not change under the caller."""
        if self._current is None:
            raise InvariantBroken("knobs read before open()")
        return self._current

    def history(self) -> list[KnobPatch]:
        """All patches seen, the initial values first."""
        return list(self._history)

    async def follow(self, until: asyncio.Event) -> None:
        """Keep the values current until the event; woken by the blocking read, which is never cancelled."""
        try:
            while not until.is_set():
                await self._read(0.5)
        finally:
            await self._tail.close()

    async def close(self) -> None:
        """For who opened without following."""
        await self._tail.close()

    async def _reload(self) -> None:
        """From the beginning: a server that lost its last second may have lost a patch that was applied here. The old
        values stay visible until the new ones are complete."""
        self._restarts_seen = self._bus.link.server_restarts
        await self._tail.open()
        current: KnobValues | None = None
        history: list[KnobPatch] = []
        while entries := await self._tail.read(0.0):
            current = await self._fold(current, history, entries)
        if current is not None:
            self._current, self._history = current, history

    async def _read(self, block_s: float) -> None:
        if self._restarts_seen != self._bus.link.server_restarts:
            await self._reload()
        entries = await self._tail.read(block_s)
        self._current = await self._fold(self._current, self._history, entries)

    async def _fold(
        self, current: KnobValues | None, history: list[KnobPatch], entries: Sequence[Entry]
    ) -> KnobValues | None:
        for entry in entries:
            try:
                patch = await self._bus.message(entry)
                after = fold(current, patch)
            except (BadMessage, KnobRejected) as error:
                self.rejected = [*self.rejected[-19:], f"{entry.id}: {error}"]
                continue
            if after is not current:
                current = after
                history.append(patch)
        return current


__all__ = (
    "STATE_FIELD",
    "KnobDifference",
    "KnobValues",
    "LiveKnobs",
    "fold",
    "propose",
    "publish_initial",
    "read_history",
    "revert",
    "values_at",
)
