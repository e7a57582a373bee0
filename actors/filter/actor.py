"""Filter room: assembles groups, judges them, and lets them go whole or, on their last turn, in parts.

Reads  scored (readers "filter"), policy (log)    Writes  groups (kept, turned), verdicts (all)
       rollouts (members that an earlier version of the reward scored)
Owns   half-assembled groups = its pending entries; what left of a group lies in the open hash
A group or part leaves in one commit: its members are acknowledged, and it is either appended to `groups` or counted as
dropped and closed. Killed at any await, the members are still pending and the group is assembled again.

Invariant: when `turned` of a trainer's version is on the stream, every member that had arrived here and would be over the
bound in the next step lies before it, unless it has no finished sibling to be compared with. So the trainer, which cuts after
it, passes none of them by.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from actors.filter.all_samples import AllSamples
from actors.filter.groups import GroupTable, Half, leaves_now, tips, tokens_of
from actors.filter.judges import JUDGES, Judge, Member, judge, kept_reason
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.contained import named
from actors.runtime.context import Context
from actors.runtime.deadline import followed
from actors.runtime.faultpoints import fault_point
from actors.runtime.hooks import copies, load_hook
from actors.runtime.logs import fold_log
from actors.runtime.miles import judge_of
from actors.runtime.prompts import decoder_of
from actors.runtime.refusals import RunEnds, Streak
from actors.runtime.staleness import bound_in_steps, rule_of
from actors.runtime.whole import in_time
from bus import Commit, Entry, Out, Tail, ledger
from bus.errors import Poison
from bus.ledger import read_accounts
from bus.messages.events import EventKind
from bus.messages.groups import MOST_LIVES, GroupKept, GroupVerdict, OpenGroup, Turned, index_of, part_key
from bus.messages.policy import Restored, StepDone, life_of
from bus.messages.reasons import DropReason
from bus.messages.samples import RolloutLost, Scored
from bus.topology import GROUPS, POLICY, ROLLOUTS, SCORED, VERDICTS

NEWEST = 256  # entries of the policy log that are looked through for the step at the start
MOST_RAISED = 16  # groups in a row; then the judge is at fault, not the groups


class FilterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`custom_filter`: dotted path of a judge that replaces the knob's built-in one; empty = none. `hook_values`: on the `args` of
    functions written for Miles, beside the settings."""

    custom_filter: str = ""
    shows_all_to: str = ""  # dotted path of a function that looks at each step's samples (all_samples.py); empty = none
    hooks_within_s: float = 0.0  # deadline of both
    hook_values: dict[str, Any] = {}
    model_dir: str = ""


class Filter:
    """The room: a consumer whose handler keeps entries until their group, or its part, may leave."""

    def __init__(self, context: Context, spec: FilterSpec) -> None:
        self._context = context
        self._interval = int(context.knobs.update_weights_interval)
        self._custom: Judge | None = None
        if spec.custom_filter:
            args = lambda: {**context.knobs.values, **spec.hook_values}  # noqa: E731
            own = judge_of(load_hook(spec.custom_filter), args, decoder_of(spec.model_dir))
            self._custom = lambda samples: own(copies(samples))
            self._custom_name = f"--dynamic-sampling-filter-path {spec.custom_filter}"
        self._reasons: set[str] = set()
        self._deadline_s, self._one_at_a_time = spec.hooks_within_s, asyncio.Lock()
        self._table = GroupTable()
        self._turn: Turned | None = None  # the trainer's present step and version, as far as it was heard
        self._said: Turned | None = None
        self._all: AllSamples | None = None
        if spec.shows_all_to:
            path, deadline_s = spec.shows_all_to, spec.hooks_within_s
            self._all = AllSamples(context, path, deadline_s, values=spec.hook_values, model_dir=spec.model_dir)
        remedy = "Mend it, or choose another --dynamic-sampling-filter-path."
        self._raised = Streak(context.clock.monotonic, "the filter", remedy, most=MOST_RAISED)
        context.noting = lambda: f"{self._table.n_samples} samples of {len(self._table)} groups in assembly"
        self._busy = asyncio.Lock()  # members arrive and turns end in two tasks; one of them moves groups at a time
        self._consumer = Consumer(
            context, [SCORED], "filter", on_dead=self._buried, batch=256, rebuild=self._table.clear, holds=True
        )

    async def run(self) -> None:
        """Until draining."""
        self._reasons |= (await read_accounts(self._context.bus)).dropped.keys()
        async with Tail(self._context.bus, [POLICY], start="$") as tail, followed(partial(self._follow, tail)):
            await self._consumer.run(self.handle)

    # -- turns --------------------------------------------------------------------------------------------------

    async def _follow(self, tail: Tail, stop: asyncio.Event) -> None:
        """The trainer's steps, from the policy log; woken by the blocking read. After a start the turn waits until the
        entries that were pending have been taken in."""
        types = ("policy.step", "policy.restored")  # announcements and orders are not for us
        before = await self._context.bus.last(POLICY, NEWEST)
        await fold_log(self._context, reversed(before), self._hear, types=types)
        while not stop.is_set():
            if self._turn != self._said and self._consumer.reader.recovered:
                async with self._busy:
                    await self._end_turn()
                if self._all is not None:
                    await self._all.tell()
            news = await tail.read(0.5 if self._turn == self._said else 0.02)
            await fold_log(self._context, news, self._hear, types=types)

    def _hear(self, entry: Entry, message: StepDone | Restored) -> None:
        self._turn = Turned(step=message.step, version=message.version.id)

    async def _end_turn(self) -> None:
        """Release what is on its last turn, then say so."""
        turn = self._turn
        if turn is None:
            return
        leaving = [half for half in self._table.halves() if leaves_now(half, **self._now())]
        # All at once: the trainer waits, and their commits share a call to the bus.
        await asyncio.gather(*map(self._release, leaving))
        fault_point(self._context.name, "turned")
        await self._context.bus.append([Out(GROUPS, turn)], repeatable=True)
        self._said = turn

    # -- groups -------------------------------------------------------------------------------------------------

    async def handle(self, entry: Entry, member: Member) -> Commit | None:
        """Hold a member; let its group, or what is here of it, go when it may."""
        group_id, sample_id = member.group_id, member.sample_id
        async with self._busy:
            if not self._table.knows(group_id):
                self._table.begin(group_id, await self._opened(group_id, sample_id))
            if self._table.add(entry, member) == "duplicate":
                self._context.count("duplicates")
                return Commit(ack=(entry,))
            half = self._table.get(group_id)
            fault_point(self._context.name, "assembling")
            if leaves_now(half, **self._now()):
                await self._release(half, came=index_of(sample_id))
        return None

    async def _buried(self, entry: Entry, message: Member | None, error: str) -> Commit:
        """What follows a dead entry."""
        self._table.bury(entry, message)
        return await as_lost(self._context, _dead)(entry, message, error)

    async def _opened(self, group_id: str, sample_id: str) -> OpenGroup:
        """A group as the run lists it: how many samples, which of them have left and with what reward. Poison: it lists none, so
        that nobody waits for this sample and no siblings will come."""
        opened = await self._context.bus.open_group(group_id)
        if opened is None:
            raise Poison(f"sample {sample_id} is of no open group: {group_id!r} is closed, or was never issued")
        return opened

    def _now(self) -> dict[str, Any]:
        """What decides whether a group leaves: the rule, and where the trainer is."""
        knobs = self._context.knobs
        bound = int(knobs.max_weight_staleness)
        return {
            "policy": rule_of(str(knobs.staleness_policy), bound),
            "step": self._turn.step if self._turn is not None else 0,
            "bound": bound_in_steps(bound, self._interval),
        }

    async def _release(self, half: Half, came: int | None = None) -> None:
        """What is here of a group leaves: kept or dropped, whole or as a part. `came`: the member whose coming let it go. Members
        that an earlier reward version scored go back to be scored anew; of a group of which a part has left, it is too late."""
        context = self._context
        if not (half.lost or half.split) and (old := self._outdated(half)):
            members = [half.members[i] for i in old]
            outs = [Out(ROLLOUTS, m.rollout) for m in members if isinstance(m, Scored)]
            commit = Commit(ack=[half.entries[i] for i in old], append=outs)
            if await self._consumer.commit(commit):
                self._table.give_back(half, old)
                context.count("scored_anew", len(old))
            else:
                self._again(half)
            return
        basis = half.basis(came if tips(half, **self._now()) else None)
        indexes = sorted(half.members)
        entries, members = [half.entries[i] for i in indexes], [half.members[i] for i in indexes]
        scored = tuple(m for m in members if isinstance(m, Scored))
        whole = not half.split and half.complete
        rewards = () if whole else tuple(half.known.values())
        reason = await self._judge(half.group_id, members, rewards)
        prompt_id = scored[0].rollout.task.prompt_id if scored else getattr(members[0], "prompt_id", "")
        verdict = GroupVerdict(
            group_id=half.group_id,
            prompt_id=prompt_id,
            kept=reason is None,
            reason=reason or "",
            n_samples=len(members),
            tokens=sum(map(tokens_of, members)),
            mean_reward=sum(s.reward / len(scored) for s in scored),
            members=() if whole else tuple(indexes),
            lives=msgspec.UNSET if reason is None else tuple(map(life_of, scored[:MOST_LIVES])),
        )
        opened: dict[str, bytes] = {}
        key = half.group_id if whole else part_key(half.group_id, indexes)
        rest = half.wanted - set(indexes)
        if not whole:
            base = msgspec.structs.replace(half.opened, rewards=basis)
            if rest:
                opened[half.group_id] = msgspec.msgpack.encode(msgspec.structs.replace(base, members=tuple(sorted(rest))))
            if reason is None:
                opened[key] = msgspec.msgpack.encode(msgspec.structs.replace(base, members=tuple(indexes)))
        closes = () if rest or (whole and reason is None) else (half.group_id,)
        outs = [Out(VERDICTS, verdict)]
        books: dict[str, int] = {}
        if reason is None:
            kept = GroupKept(
                group_id=half.group_id,
                prompt_id=prompt_id,
                samples=scored,
                knob_epoch=context.knobs.epoch,
                part="" if whole else key,
                known=rewards,
            )
            outs.insert(0, Out(GROUPS, kept))
        else:
            books = ledger.dropped(reason, len(members), verdict.tokens)
        # Not bounded: what moves from `scored` adds nothing, and a trainer that waits for `turned` would make no room.
        commit = Commit(ack=entries, append=outs, open_groups=opened, close_groups=closes, ledger=books)
        if not await self._consumer.commit(commit):
            self._again(half)
            return
        self._table.release(half, indexes, basis)
        if self._all is not None:
            self._all.judged.append((scored, reason))
        what = "groups" if whole else "parts"
        context.count(f"{what}_kept" if reason is None else f"{what}_dropped/{reason}")

    def _again(self, half: Half) -> None:
        """Some member was finished by another filter; what is still ours comes back from the pending list."""
        for entry in half.entries.values():
            if (entry.stream.name, entry.id) in self._consumer.reader.held:
                self._consumer.reader.retry_later(entry)
        self._table.forget(half.group_id)

    def _outdated(self, half: Half) -> list[int]:
        """Indexes of members that another version of the reward scored than the present one."""
        version = int(self._context.knobs.reward_version)
        return [i for i, m in sorted(half.members.items()) if isinstance(m, Scored) and (m.reward_version or 0) != version]

    async def _judge(self, group_id: str, members: list[Member], known: tuple[float, ...]) -> str | None:
        """The drop reason, or None. A judge that raises drops what it judged, with a reason of its own; one that raises again
        and again ends the run with its text."""
        path = str(self._context.knobs.dynamic_sampling_filter_path)
        dynamic = JUDGES.get(path) or self._custom or JUDGES["none"]
        try:
            if dynamic is self._custom:  # not in the event loop, which it would hold up
                async with self._one_at_a_time:
                    reason = await in_time(self._custom_name, self._deadline_s, judge, members, dynamic, known)
            else:
                reason = judge(members, dynamic, known)
            if reason is not None and not (isinstance(reason, str) and reason.strip()):
                raise TypeError(f"it gave {reason!r}, which is neither a reason to drop nor None")
        except RunEnds:
            raise
        except Exception as error:  # noqa: BLE001 - what a judge raises costs what it judged
            name = self._custom_name if dynamic is self._custom else path
            said = f"{name}: {named(error)}"
            await self._context.refusals.add("judge", f"{group_id} is dropped: {said}", kind=EventKind.JUDGE_RAISED)
            self._raised.failed(group_id, said)
            return DropReason.JUDGE_RAISED
        self._raised.worked()
        return None if reason is None else kept_reason(reason, self._reasons)


def _dead(entry: Entry, lost: RolloutLost) -> Commit:
    """What follows a dead entry: its sample comes again as lost, through the filter's own input."""
    return Commit(append=(Out(SCORED, lost),))


async def run(context: Context, spec: FilterSpec) -> None:
    """The filter's process."""
    await Filter(context, spec).run()
