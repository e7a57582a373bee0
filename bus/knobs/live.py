"""The knobs stream: all settings of a run, then checked patches of the live ones as numbered epochs, read by every actor.

Reads and writes  knobs    Owns  state field `knob_epoch`
The first entry holds all settings and the kinds of those that are live; each later one what it changed. The stream is the
truth: a rerun keeps what was tuned, but for settings that its operator has changed since the last start. Two patches at once
cannot both take an epoch: the loser is checked again against the winner's result. A plan (plans.py) waits on the stream until
the trainer begins its step: nothing that is proposed may make it impossible.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from bus.errors import BadMessage, BusRefused, InvariantBroken, KnobRejected
from bus.knobs.kinds import checked
from bus.messages.control import Kind, KnobPatch
from bus.streams.entry import Commit, Entry, Guard, Out
from bus.streams.reader import Tail
from bus.streams.redis import Bus
from bus.topology import KNOBS as STREAM

STATE_FIELD = "knob_epoch"
_TRIES = 32
Check = Callable[[Mapping[str, Any], Mapping[str, object]], Mapping[str, Any]]
"""(present values, patch) -> what the patch really changes, or an error that says why it may not."""


class KnobValues(msgspec.Struct, frozen=True, dict=True):
    """All settings under one epoch; take one snapshot per decision. `values["lr"]` and `snapshot.lr` are the same. `kinds` are
    those of the live ones."""

    epoch: int
    values: Mapping[str, Any]
    kinds: Mapping[str, Kind] = {}

    def __post_init__(self) -> None:
        self.__dict__.update(self.values)  # rooms look at some for each sample

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no setting {name!r} in the initial values of this run")

    @property
    def live(self) -> dict[str, Any]:
        """Values of the live settings alone."""
        return {name: self.values[name] for name in self.kinds if name in self.values}


class KnobDifference(msgspec.Struct, frozen=True):
    """A live value that stays although the settings say otherwise."""

    name: str
    live: Any
    given: Any
    epoch: int

    def __str__(self) -> str:
        return f"{self.name} stays {self.live!r} (knob epoch {self.epoch}), the settings say {self.given!r}"


def fold(current: KnobValues | None, patch: KnobPatch) -> KnobValues:
    """Values after a patch (pure). A patch of an epoch already passed changes nothing; KnobRejected for one that holds what is
    no value of a live setting, whoever wrote it: the values stay."""
    if current is not None and patch.epoch <= current.epoch:
        return current
    before: Mapping[str, Any] = current.values if current is not None else {}
    if isinstance(patch.kinds, dict) or current is None:  # a launcher's
        kinds = patch.kinds if isinstance(patch.kinds, dict) else {}
        merged = {**before, **patch.values}
        merged |= {name: checked(name, merged[name], kinds) for name in kinds if name in merged}
        return KnobValues(patch.epoch, MappingProxyType(merged), MappingProxyType(kinds))
    for name, value in (patch.planned or {}).items():
        checked(name, value, current.kinds)
    changes = {name: checked(name, value, current.kinds) for name, value in patch.values.items()}
    return KnobValues(patch.epoch, MappingProxyType({**before, **changes}), current.kinds)


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


def pending(history: Sequence[KnobPatch]) -> list[KnobPatch]:
    """Plans that are neither due nor cancelled (pure), in the order in which they are to hold."""
    ended = {patch.plan for patch in history}
    return sorted((p for p in history if p.planned and p.epoch not in ended), key=lambda p: (p.from_step, p.epoch))


def leaves_plans(
    values: Mapping[str, Any], plans: Sequence[KnobPatch], check: Check | None, asked: Mapping[str, object] | None = None
) -> None:
    """KnobRejected when a plan could not hold any more, were these the values (pure). `asked`: what would make them so."""
    for plan in plans if check is not None else ():
        assert check is not None and plan.planned
        try:
            values = {**values, **check(values, plan.planned)}
        except (KnobRejected, ValueError) as error:
            named = asked or plan.planned
            name = next((name for name in named if name in str(error)), next(iter(named)))
            rule = f"the plan for step {plan.at_step} (epoch {plan.epoch}) would then be refused: {error}"
            remedy = f"Cancel it first: miles-async tune --cancel {plan.epoch}"
            raise KnobRejected(knob=name, value=named[name], rule=rule.rstrip("."), remedy=remedy) from error


async def read_history(bus: Bus) -> list[KnobPatch]:
    """All patches in order, the initial values first; what is no valid patch is left out."""
    history: list[KnobPatch] = []
    await _take_up(bus, None, history, await bus.scan_all(STREAM))
    return history


async def _take_up(
    bus: Bus, current: KnobValues | None, history: list[KnobPatch], entries: Sequence[Entry]
) -> tuple[KnobValues | None, list[str]]:
    """The values after these entries, whose patches are added to `history`; and which of them were no valid patch."""
    rejected: list[str] = []
    for entry in entries:
        try:
            patch = await bus.message(entry)
            after = fold(current, patch)
        except (BadMessage, KnobRejected) as error:
            rejected.append(f"{entry.id}: {error}")
            continue
        if after is not current:
            current = after
            history.append(patch)
    return current, rejected


async def publish_initial(
    bus: Bus,
    values: Mapping[str, Any],
    kinds: Mapping[str, Kind],
    *,
    epoch: int = 0,
    author: str = "launcher",
    changed: Collection[str] = (),
) -> list[KnobDifference]:
    """Write all settings, and the kinds of the live ones, before any actor starts. A rerun keeps what is live and returns where
    it differs; settings that are fixed for a run are as this start gives them, and so are the live ones named in `changed`.

    `epoch` is above 0 when a checkpoint's values are written to a fresh bus. KnobRejected when a value is none of its kind.
    """
    for _ in range(_TRIES):
        taken = await _taken(bus)
        history = await read_history(bus)
        if history:
            live = values_at(history, history[-1].epoch)
            kept = {name for name in kinds if name in live.values and _holds(name, live.values[name], kinds)} - set(changed)
            new = {n: v for n, v in _plain(values).items() if n not in kept and live.values.get(n, STREAM) != v}
            if not new and live.kinds == kinds:
                return [
                    KnobDifference(name, live.values[name], values[name], live.epoch)
                    for name in kinds
                    if live.values[name] != values[name]
                ]
            next_one = max(live.epoch, taken) + 1
            patch = KnobPatch(epoch=next_one, values=new, author=author, reason="settings of this start")
        else:
            patch = KnobPatch(epoch=max(epoch, taken + 1), values=_plain(values), author=author, reason="initial")
        patch = msgspec.structs.replace(patch, kinds=dict(kinds), wall=bus.clock.wall())
        fold(None, msgspec.structs.replace(patch, values=dict(values)))
        await _append(bus, patch)
    raise InvariantBroken(f"knobs of run {bus.config.run} could not be published: the stream changes all the time")


def _holds(name: str, value: Any, kinds: Mapping[str, Kind]) -> bool:
    try:
        checked(name, value, kinds)
    except KnobRejected:  # of another release
        return False
    return True


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As they come back from the stream: lists for tuples."""
    plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(dict(values)))
    return plain


async def propose(bus: Bus, patch: Mapping[str, object], *, author: str, reason: str = "", check: Check | None = None) -> KnobPatch:
    """Check a patch against the present whole and append it; the epoch it got is in the result. `check` knows names, text and
    the rules between settings; without it values have only to be of their kind.

    An error of `check`, or KnobRejected, changes nothing.
    """
    refuse_empty(patch)

    def make(history: list[KnobPatch], live: KnobValues) -> KnobPatch:
        changes = changed(live, patch, check)
        leaves_plans({**live.values, **changes}, pending(history), check, patch)
        return KnobPatch(epoch=0, values=changes, author=author, reason=reason)

    return await append_made(bus, make)


def refuse_empty(patch: Mapping[str, object]) -> None:
    """KnobRejected when there is nothing in it."""
    if not patch:
        raise KnobRejected(knob="(none)", value="", rule="the patch is empty", remedy="Write name=value.")


def changed(live: KnobValues, patch: Mapping[str, object], check: Check | None) -> dict[str, Any]:
    """What a patch changes in these values (pure); KnobRejected when that is nothing, or what `check` raises."""
    wanted = patch if check is None else check(live.values, patch)
    changes = {name: checked(name, value, live.kinds) for name, value in wanted.items()}
    changes = {name: value for name, value in changes.items() if live.values.get(name, STREAM) != value}
    if not changes:
        name, given = next(iter(patch.items()))
        raise KnobRejected(knob=name, value=given, rule="it has this value already", remedy="Give another value.")
    return changes


async def append_made(bus: Bus, make: Callable[[list[KnobPatch], KnobValues], KnobPatch]) -> KnobPatch:
    """Append what `make` says of the present history and values, under the next epoch; asked again when somebody was faster."""
    for _ in range(_TRIES):
        taken = await _taken(bus)
        history = await read_history(bus)
        if not history:
            raise BusRefused(_no_knobs(bus))
        live = values_at(history, history[-1].epoch)
        made = msgspec.structs.replace(make(history, live), epoch=max(live.epoch, taken) + 1, wall=bus.clock.wall())
        _refuse_unreadable(made)
        if await _append(bus, made):
            return made
    raise InvariantBroken(f"knobs of run {bus.config.run} change faster than a patch can be checked; try again")


async def revert(bus: Bus, epoch: int, *, author: str, reason: str = "", check: Check | None = None) -> KnobPatch:
    """A new epoch with the live values of an earlier one."""
    history = await read_history(bus)
    if not history:
        raise BusRefused(_no_knobs(bus))
    then, now = values_at(history, epoch), values_at(history, history[-1].epoch)
    back = {name: then.values[name] for name, value in now.live.items() if then.values.get(name, value) != value}
    if not back:
        raise KnobRejected(knob="epoch", value=epoch, rule="its values are live", remedy="Choose another epoch.")
    return await propose(bus, back, author=author, reason=reason or f"back to epoch {epoch}", check=check)


def _refuse_unreadable(patch: KnobPatch) -> None:
    """KnobRejected for who and why that are no text: no reader could decode the patch."""
    for name, text in (("author", patch.author), ("reason", patch.reason)):
        if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
            raise KnobRejected(knob=name, value=text, rule="it is not UTF-8 text", remedy="Say it in words.")


def _epoch(state: str) -> int:
    return int(state.partition(":")[0]) if state else -1


async def _taken(bus: Bus) -> int:
    """The last epoch that was taken, -1 = none. Read before the history: what that lacks of it are patches that nobody can read."""
    return await bus.state_as(STATE_FIELD, _epoch)


async def _append(bus: Bus, patch: KnobPatch) -> bool:
    """Append if the run's epoch is still the one before; False when somebody else was faster."""
    before = await bus.state(STATE_FIELD)
    if _epoch(before) >= patch.epoch:
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

    `rejected` keeps the last entries of the stream that were no valid patch; they change nothing. `step`: the training step that
    is made here, for who makes them: one that is made again has the values of then, without plans that became due later.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tail = Tail(bus, [STREAM])
        self._current: KnobValues | None = None
        self._history: list[KnobPatch] = []
        self._restarts_seen = 0
        self._heard = asyncio.Event()
        self._before: tuple[int, int, KnobValues] | None = None  # epoch, step, values without what is planned for later
        self.rejected: list[str] = []
        self.step = 0

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
        if not self.step or all(patch.plan is msgspec.UNSET for patch in self._history):
            return self._current
        key = (self._current.epoch, self.step)
        if self._before is None or self._before[:2] != key:
            current: KnobValues | None = None
            for patch in self._history:
                if patch.plan is msgspec.UNSET or patch.from_step <= self.step:
                    current = fold(current, patch)
            assert current is not None
            self._before = (*key, current)
        return self._before[2]

    async def reach(self, epoch: int, *, deadline_s: float = 30.0) -> None:
        """Wait until an epoch was heard of; woken by `follow`. InvariantBroken at the deadline: a failover may have lost it."""
        try:
            async with asyncio.timeout(deadline_s):
                while self._current is None or self._current.epoch < epoch:
                    await self._heard.wait()
        except TimeoutError:
            raise InvariantBroken(
                f"knob epoch {epoch} was said and not heard for {deadline_s:g} s: the bus lost it. Whoever waits starts again."
            ) from None

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

    async def _fold(self, current: KnobValues | None, history: list[KnobPatch], entries: Sequence[Entry]) -> KnobValues | None:
        current, rejected = await _take_up(self._bus, current, history, entries)
        self.rejected = [*self.rejected, *rejected][-20:]
        self._heard.set()
        self._heard = asyncio.Event()
        return current
