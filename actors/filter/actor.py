"""Filter room: assembles groups and judges them whole.

Reads  scored (readers "filter")    Writes  groups (kept), verdicts (all)    Owns  half-assembled groups = its pending entries
A group leaves in one commit: all its members are acknowledged, and it is either appended to `groups` or counted as dropped
and closed. Killed at any await, the members are still pending and the group is assembled again.
"""

from __future__ import annotations

import msgspec

from actors.filter.groups import GroupTable, tokens_of
from actors.filter.judges import JUDGES, Judge, Member, judge
from actors.runtime.consume import Consumer, header_number
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.hooks import load_hook
from bus import Commit, Entry, Out
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup
from bus.messages.samples import RolloutLost, Scored
from bus.topology import GROUPS, SCORED, VERDICTS


class FilterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`custom_filter`: dotted path of a judge that replaces the knob's built-in one; empty = none."""

    custom_filter: str = ""


class Filter:
    """The room: a consumer whose handler keeps entries until their group is complete."""

    def __init__(self, context: Context, spec: FilterSpec) -> None:
        self._context = context
        self._custom: Judge | None = load_hook(spec.custom_filter, Judge) if spec.custom_filter else None
        self._table = GroupTable()
        self._consumer = Consumer(
            context, [SCORED], "filter", self.handle, on_dead=_on_dead, batch=256, rebuild=self._table.clear, holds=True
        )

    async def run(self) -> None:
        """Until draining."""
        await self._consumer.run()

    async def handle(self, entry: Entry, member: Member) -> Commit | None:
        """Hold a member; judge the group when it is the last."""
        if isinstance(member, RolloutLost) and member.n_samples == 0:
            member = msgspec.structs.replace(member, n_samples=await self._size_of(member.group_id))
        match self._table.add(entry, member):
            case "duplicate":
                self._context.count("duplicates")
                return Commit(ack=(entry,))
            case "held":
                self._context.note = f"{len(self._table)} groups in assembly"
                return None
        group_id = entry.fields.get("group", "")
        fault_point(self._context.name, "assembling")
        await self._judge(group_id)
        return None

    async def _size_of(self, group_id: str) -> int:
        """Samples of a group by the run's registry, for members whose own entry could not be read; 0 = unknown."""
        raw = await self._context.bus.link.run("HGET", self._context.bus.keys.open_groups, group_id)
        return msgspec.msgpack.decode(raw, type=OpenGroup).n_samples if raw else 0

    async def _judge(self, group_id: str) -> None:
        context = self._context
        entries, members = self._table.take(group_id)
        knobs = context.knobs
        dynamic = self._custom or JUDGES[str(knobs.dynamic_sampling_filter)]
        reason = judge(members, dynamic)
        tokens = sum(map(tokens_of, members))
        scored = tuple(m for m in members if isinstance(m, Scored))
        prompt_id = scored[0].rollout.task.prompt_id if scored else getattr(members[0], "prompt_id", "")
        verdict = GroupVerdict(
            group_id=group_id,
            prompt_id=prompt_id,
            kept=reason is None,
            reason=reason or "",
            n_samples=len(members),
            tokens=tokens,
            mean_reward=sum(s.reward for s in scored) / max(1, len(scored)),
        )
        if reason is None:
            kept = GroupKept(group_id=group_id, prompt_id=prompt_id, samples=scored, knob_epoch=knobs.epoch)
            commit = Commit(ack=entries, append=(Out(GROUPS, kept), Out(VERDICTS, verdict)), bounded=True)
        else:
            commit = Commit(
                ack=entries,
                append=(Out(VERDICTS, verdict),),
                close_groups=(group_id,),
                ledger={f"dropped/{reason}": len(members), f"tokens/dropped/{reason}": tokens},
            )
        if await self._consumer.commit(commit):
            context.count("groups_kept" if reason is None else f"groups_dropped/{reason}")
            return
        # Some member was finished by another filter; what is still ours comes back from the pending list.
        for entry in entries:
            if (entry.stream.name, entry.id) in self._consumer.reader.held:
                self._consumer.reader.retry_later(entry)


def _on_dead(entry: Entry, message: object, error: str) -> Commit:
    """A scored entry that cannot be read: its group closes as lost, through the filter's own input."""
    lost = RolloutLost(
        sample_id=entry.fields.get("id", ""),
        group_id=entry.fields.get("group", ""),
        n_samples=0,
        reason="malformed",
        error=error,
        tokens_made=header_number(entry, "tokens"),
    )
    return Commit(append=(Out(SCORED, lost),) if lost.sample_id and lost.group_id else ())


async def run(context: Context, spec: FilterSpec) -> None:
    """The filter's process."""
    await Filter(context, spec).run()
