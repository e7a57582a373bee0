"""What the trainer holds: samples that are ready, and samples trained but not yet in a durable checkpoint.

Invariant: every sample of an entry of `groups` that was delivered to the trainer is in exactly one of `ready` and `uncommitted`. An
entry is acknowledged by one commit that books all its samples, once the last of them is durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import msgspec

from actors.runtime.consume import Consumer
from actors.runtime.content import header_tokens
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.trainer.accounts import Trained, booked, inside_of, remaining
from actors.trainer.checkpoint import Consumed, merged
from actors.trainer.cut import Part
from actors.trainer.lending import Arrivals
from bus import Commit, Entry, Out, ledger
from bus.asides import fetched
from bus.errors import Poison
from bus.inspect import wall_of
from bus.messages.groups import GroupKept, OpenGroup, Turned
from bus.messages.policy import ALREADY_TRAINED, Checkpointed, GroupsGivenUp
from bus.messages.reasons import DropReason
from bus.topology import GROUPS, POLICY

ACKS_PER_COMMIT = 200
SETTLED_KEPT = 512  # entries at least, and those of the newest checkpoint; more than a second's worth


class GivenUpGroups(msgspec.Struct):
    """What is given up for one reason. A group is named once, however many parts of it there are; those whose `prompts` start again
    come first."""

    groups: dict[str, None] = {}
    prompts: list[str] = []
    samples: list[str] = []

    def told(self, reason: DropReason) -> GroupsGivenUp:
        return GroupsGivenUp(
            groups=tuple((group, reason) for group in self.groups),
            prompts=tuple(self.prompts),
            reissue=bool(self.prompts),
            samples=tuple(self.samples),
        )


class Intake:
    """Entries of `groups` between delivery and acknowledgement."""

    def __init__(self, context: Context, vocabulary: int = 0) -> None:
        self._context = context
        # One trainer exists: nobody else claims these entries, so they need no renewal.
        self._consumer = Consumer(
            context, [GROUPS], "trainer", on_dead=self._on_dead, holds=True, name="trainer", vocabulary=vocabulary
        )
        self.reader = self._consumer.reader
        self.ready: dict[str, Part] = {}
        self.arrivals = Arrivals()  # when they came
        self.turned = -1  # newest version of ours up to which the filter has released what is on its last turn
        self._entries: dict[str, Entry] = {}  # by key, until all samples of the entry are trained
        self._trained: dict[str, list[Trained]] = {}  # by key
        self._settled: dict[str, Consumed] = {}  # the newest entries inside durable checkpoints

    async def fetch(self, count: int, block_s: float, *, step: int) -> int:
        """Read more; returns how many entries came. One that is here already, or inside a checkpoint, is settled at once. `step`:
        number of the step whose batch they may be in first."""
        bus = self._context.bus
        entries = await self._consumer.take(count, block_s)
        for entry in entries:
            group = await self._consumer.readable(entry)
            if group is None:
                continue
            if isinstance(group, Turned):
                self.turned = max(self.turned, group.version)
                await bus.commit(Commit(ack=(entry,)))
                self.reader.forget([entry])
                continue
            if entry.asides:
                group = await fetched(bus, group)
            settled = inside_of(group, self._settled)
            if settled is not None and not settled.covers(group):
                # Some of its samples are inside a checkpoint, and it was not here when that was loaded.
                if settled is self._settled.get(group.key):
                    del self._settled[group.key]
                self._hold(Trained(step=0, entry=entry, consumed=settled))  # before any step of ours: in a checkpoint already
                self.ready[group.key] = Part.of(group, came=step, at=wall_of(entry.id), without=frozenset(settled.members))
                self._entries[group.key] = entry
                # The sampler issued them again: their credits are free now, not when the rest is trained, for which it may be they
                # that are missing.
                twice = tuple(f"{group.group_id}/{i}" for i in settled.members)
                await bus.append([Out(POLICY, _known(group.group_id, twice))], repeatable=True)
                continue
            if settled is not None or self._held(group.key) is not None:
                await self._came_again(entry, group.key, settled)
                continue
            opened = await self._listed(group.key)
            if opened is None or not _is(group, opened):
                why = "other samples are open under it" if opened else "it is closed, or was never issued"
                await self._consumer.bury(entry, group, Poison(f"the run does not wait for {group.key!r}: {why}"))
                continue
            self.ready[group.key] = Part.of(group, came=step, at=wall_of(entry.id))
            self._entries[group.key] = entry
            knobs = self._context.knobs
            batch = int(knobs.rollout_batch_size) * int(knobs.n_samples_per_prompt)
            self.arrivals.add(wall_of(entry.id), len(group.samples), batch)
        return len(entries)

    def _held(self, key: str) -> Entry | None:
        """The entry under which a group or part is here."""
        if key in self._trained:
            return self._trained[key][0].entry
        return self._entries.get(key)

    @property
    def uncommitted(self) -> list[Trained]:
        """What is trained and not yet durable; what an entry has of it stands together."""
        return list(chain.from_iterable(self._trained.values()))

    def _hold(self, trained: Trained) -> None:
        self._trained.setdefault(trained.consumed.group_id, []).append(trained)

    async def _came_again(self, entry: Entry, key: str, consumed: Consumed | None) -> None:
        """A server that lost its last second may forget deliveries, acknowledgements and entries that this process knows.

        An acknowledgement that was forgotten is given again, with its accounts if they were forgotten too. A group whose
        entry was forgotten was judged again: it goes on under the new entry.
        """
        bus = self._context.bus
        self._context.count("duplicates")
        if consumed is not None:
            listed = await self._listed(key)
            again = Trained(step=0, entry=entry, consumed=consumed)
            # The sampler may have issued it again from a cursor that fell back.
            samples = listed.sample_ids if listed else ()
            append = (Out(POLICY, _known(entry.fields.get("group", key), samples)),) if samples else ()
            accounts = booked([again]) if listed else {}
            await bus.commit(Commit(ack=(entry,), append=append, close_groups=(key,), ledger=accounts))
            self.reader.forget([entry])
            return
        held = self._held(key)
        if held is None or held.id == entry.id:
            return
        if held.id not in await self.reader.renew([held]):
            await bus.commit(Commit(ack=(entry,)))
            self.reader.forget([entry])
            return
        if key in self._entries:
            self._entries[key] = entry
        if key in self._trained:
            self._trained[key] = [msgspec.structs.replace(t, entry=entry) for t in self._trained[key]]

    async def _listed(self, key: str) -> OpenGroup | None:
        """What the run lists as open under a key."""
        return await self._context.bus.open_group(key)

    async def _on_dead(self, entry: Entry, message: Any, error: str) -> Commit:
        """What the run lists under the entry's key is given up: the sampler hears of it, and the accounts close."""
        key = message.key if isinstance(message, GroupKept) else entry.fields.get("id", "")
        opened = await self._listed(key) if key else None
        if opened is None or self._held(key) is not None or (isinstance(message, GroupKept) and not _is(message, opened)):
            return Commit()
        given_up = GroupsGivenUp(groups=((opened.group_id, DropReason.MALFORMED),), samples=opened.sample_ids)
        return Commit(
            append=(Out(POLICY, given_up),),
            close_groups=(key,),
            ledger=ledger.dropped(DropReason.MALFORMED, len(opened.indexes), header_tokens(entry)),
        )

    async def give_up(self, drops: tuple[tuple[str, DropReason], ...], *, reissue: bool) -> None:
        """Drop ready parts for good, with their reason; the sampler may start the prompts of whole groups again. Of a part of
        which some samples are trained, the others wait for its acknowledgement as dropped."""
        whole = {key for key, _ in drops if not self.ready[key].group.part and key not in self._trained}
        at_once: list[Trained] = []
        said: dict[DropReason, GivenUpGroups] = {}
        for key, reason in sorted(drops, key=lambda drop: drop[0] not in whole):
            part = self.ready.pop(key)
            left = [part.group.samples[at] for at in part.left]
            given_up = said.setdefault(reason, GivenUpGroups())
            given_up.groups[part.group.group_id] = None
            given_up.samples += [s.sample_id for s in left]
            given_up.prompts += [part.group.prompt_id] if reissue and key in whole else []
            tokens = sum(s.rollout.n_made for s in left)
            members = tuple(s.rollout.task.index for s in left)
            consumed = Consumed(key, 0, 0, 0, 0, members=members, aged={reason: (len(left), tokens)})
            entry = self._entries.pop(key)
            if key in self._trained:
                self._hold(Trained(step=max(t.step for t in self._trained[key]), entry=entry, consumed=consumed))
            else:
                at_once.append(Trained(step=-1, entry=entry, consumed=consumed))  # of no step: it is dropped whole
        await self._context.bus.commit(
            Commit(
                ack=[t.entry for t in at_once],
                append=tuple(Out(POLICY, given_up.told(reason)) for reason, given_up in said.items()),
                close_groups=[t.consumed.group_id for t in at_once],
                ledger=booked(at_once),
            )
        )
        self.reader.forget([t.entry for t in at_once])
        self._context.count("groups_given_up", len(drops))

    def trained(self, consumed: Iterable[Consumed], step: int) -> None:
        """Move samples from ready to uncommitted, with their accounts."""
        for item in consumed:
            part, gone = self.ready[item.group_id], set(item.members)
            entry = self._entries[item.group_id]
            left = tuple(at for at in part.left if part.group.samples[at].rollout.task.index not in gone)
            if left:
                part.left = left
            else:
                del self.ready[item.group_id], self._entries[item.group_id]
            self._hold(Trained(step=step, entry=entry, consumed=item))

    async def acknowledge(self, step: int, checkpoint: Checkpointed | None) -> None:
        """Everything trained up to `step` is durable: acknowledge, close and book the entries of which no sample is left.
        Repeatable after a crash."""
        by_key = {key: of for key, of in self._trained.items() if key not in self.ready and all(t.step <= step for t in of)}
        keys = list(by_key)
        for start in range(0, len(keys), ACKS_PER_COMMIT):
            part = keys[start : start + ACKS_PER_COMMIT]
            while part:
                fault_point(self._context.name, "before_ack")
                result = await self._context.bus.commit(
                    Commit(
                        ack=[by_key[key][0].entry for key in part],
                        close_groups=part,
                        ledger=booked([t for key in part for t in by_key[key]]),
                        state={"saved": str(step)},
                    )
                )
                fault_point(self._context.name, "after_ack")
                if result.done:
                    break
                # Entries that the server forgot: their groups come again, and are settled then.
                part = [key for key in part if by_key[key][0].entry.id not in result.moved]
        if not keys:  # recorded batches, or parts alone: the bus must know of this checkpoint all the same, or it seems older
            await self._context.bus.commit(Commit(state={"saved": str(step)}))
        self.reader.forget([of[0].entry for of in by_key.values()])
        self._settle([t.consumed for of in by_key.values() for t in of])
        self._trained = {key: of for key, of in self._trained.items() if key not in by_key}
        if checkpoint is not None:
            await self._context.bus.append([Out(POLICY, checkpoint)])

    def _settle(self, consumed: Iterable[Consumed]) -> None:
        items = list(consumed)
        merged(self._settled, items)
        for key in list(self._settled)[: -max(SETTLED_KEPT, len(items))]:
            del self._settled[key]

    async def inside_but_open(self) -> tuple[str, ...]:
        """Samples inside the checkpoint that the bus still lists as open: not acknowledged yet, or it forgot that."""
        inside: dict[str, set[int]] = {}
        for item in [*self._settled.values(), *(t.consumed for t in self.uncommitted)]:
            inside.setdefault(item.group_id, set()).update(item.members)
        listed = await self._context.bus.hash_of(self._context.bus.keys.open_groups) if inside else {}
        found: list[str] = []
        for key, members in inside.items():
            if key in listed:
                opened = self._context.bus.group_of(key, listed[key])
                found += [f"{opened.group_id}/{i}" for i in opened.indexes if i in members]
        return tuple(found)

    def still_open(self, listed: Mapping[str, bytes]) -> dict[str, bytes]:
        """What of the run's open groups no step of ours has trained: what a checkpoint made now keeps as open."""
        return remaining(listed, self.uncommitted)

    def elsewhere(self, listed: Mapping[str, bytes]) -> dict[int, int]:
        """Open samples that are not here yet, by the step of their issue."""
        here = self.ready.keys() | self._trained.keys()
        found: dict[int, int] = {}
        for key, raw in listed.items():
            if key not in here:
                group = self._context.bus.group_of(key, raw)
                found[group.step] = found.get(group.step, 0) + len(group.indexes)
        return found

    @property
    def n_ready(self) -> int:
        """Samples ready."""
        return sum(len(part.left) for part in self.ready.values())

    def adopt(self, consumed: tuple[Consumed, ...], step: int) -> None:
        """At a start: samples that the loaded checkpoint already holds, delivered again, only wait for their
        acknowledgement; those that are not here may still come, from a server that lost its last second."""
        inside = merged({}, consumed)
        here = {key: found for key, part in self.ready.items() if (found := inside_of(part.group, inside)) is not None}
        self._settle(item for key, item in inside.items() if here.get(key) is not item)
        self.trained(here.values(), step)


def _is(group: GroupKept, opened: OpenGroup) -> bool:
    """Whether a group or part is what the run lists under its key."""
    tasks = [s.rollout.task for s in group.samples]
    named = {task.group_id for task in tasks} | {group.group_id}
    return named == {opened.group_id} and {task.index for task in tasks} == set(opened.indexes)


def _known(group_id: str, samples: tuple[str, ...]) -> GroupsGivenUp:
    """That these came again and are inside a checkpoint."""
    return GroupsGivenUp(groups=((group_id, ALREADY_TRAINED),), samples=samples)
