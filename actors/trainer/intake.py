"""What the trainer holds: groups that are ready, and groups trained but not yet in a durable checkpoint.

Invariant: every entry of `groups` that was delivered to the trainer is in exactly one of `ready` and `uncommitted`, and is
acknowledged only by a commit that books it as trained or dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from actors.runtime.consume import header_number
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.trainer.backend import StepResult
from actors.trainer.checkpoint import Consumed
from bus import Commit, Entry, Out, Reader
from bus.errors import BadMessage
from bus.messages.control import DeadLetter
from bus.messages.groups import GroupKept
from bus.messages.policy import Checkpointed, GroupsGivenUp
from bus.messages.versions import VersionSpan
from bus.topology import DEAD, GROUPS, POLICY

ACKS_PER_COMMIT = 200
ALREADY_TRAINED = "already_trained"  # said of a group that came again; it counts as trained
SETTLED_KEPT = 4096  # groups; far more than a second's worth


class Trained(msgspec.Struct, frozen=True):
    """One group that a step trained: its entry, and what the accounts will get when the step is durable."""

    step: int
    entry: Entry
    consumed: Consumed


class Intake:
    """Entries of `groups` between delivery and acknowledgement."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # One trainer exists: nobody else claims these entries, so they need no renewal.
        self.reader = Reader(context.bus, [GROUPS], "trainer", "trainer")
        self.ready: dict[str, GroupKept] = {}
        self._entries: dict[str, Entry] = {}
        self.uncommitted: list[Trained] = []
        self._settled: dict[str, Consumed] = {}  # the newest groups inside durable checkpoints

    async def fetch(self, count: int, block_s: float) -> int:
        """Read more groups; returns how many came. One that is here already, or inside a checkpoint, is settled at once."""
        bus = self._context.bus
        entries = await self.reader.read(count, block_s)
        for entry in entries:
            try:
                group: GroupKept = await bus.message(entry)
            except BadMessage as error:
                await self._bury(entry, error)
                continue
            if group.group_id in self._settled or self._held(group.group_id) is not None:
                await self._came_again(entry, group.group_id)
                continue
            self.ready[group.group_id] = group
            self._entries[group.group_id] = entry
        return len(entries)

    def _held(self, group_id: str) -> Entry | None:
        """The entry under which a group is here."""
        known = (t.entry for t in self.uncommitted if t.consumed.group_id == group_id)
        return self._entries.get(group_id) or next(known, None)

    async def _came_again(self, entry: Entry, group_id: str) -> None:
        """A server that lost its last second may forget deliveries, acknowledgements and entries that this process knows.

        An acknowledgement that was forgotten is given again, with its accounts if they were forgotten too. A group whose
        entry was forgotten was judged again: it goes on under the new entry.
        """
        bus = self._context.bus
        self._context.count("duplicates")
        consumed = self._settled.get(group_id)
        if consumed is not None:
            is_open = await bus.link.run("HEXISTS", bus.keys.open_groups, group_id)
            moves = booked([Trained(step=0, entry=entry, consumed=consumed)]) if is_open else {}
            # The sampler may have issued it again from a cursor that fell back.
            known = GroupsGivenUp(groups=((group_id, ALREADY_TRAINED),))
            await bus.commit(
                Commit(ack=(entry,), append=(Out(POLICY, known),), close_groups=(group_id,), ledger=moves)
            )
            self.reader.forget([entry])
            return
        held = self._held(group_id)
        if held is None or held.id == entry.id:
            return
        if held.id not in await self.reader.renew([held]):
            await bus.commit(Commit(ack=(entry,)))
            self.reader.forget([entry])
            return
        if group_id in self._entries:
            self._entries[group_id] = entry
        self.uncommitted = [
            msgspec.structs.replace(t, entry=entry) if t.consumed.group_id == group_id else t for t in self.uncommitted
        ]

    async def _bury(self, entry: Entry, error: BadMessage) -> None:
        group_id = entry.fields.get("group", "")
        note = entry.fields.get("note", "").removeprefix("samples=")
        n_samples = int(note) if note.isdecimal() else 0
        tokens = header_number(entry, "tokens")
        letter = DeadLetter(
            stream=GROUPS.name,
            entry_id=entry.id,
            actor=self._context.name,
            error=str(error),
            deliveries=entry.deliveries,
            fields=dict(entry.fields),
            body=entry.body[:65536],
            wall=self._context.clock.wall(),
            group_id=group_id,
        )
        given_up = GroupsGivenUp(groups=((group_id, "malformed"),))
        await self._context.bus.commit(
            Commit(
                ack=(entry,),
                append=(Out(DEAD, letter), Out(POLICY, given_up)),
                close_groups=(group_id,) if group_id else (),
                ledger={"dropped/malformed": n_samples, "tokens/dropped/malformed": tokens} if n_samples else {},
            )
        )
        self.reader.forget([entry])
        await self._context.event("dead letter", f"groups {group_id}: {error}", level="error")

    async def give_up(self, drops: tuple[tuple[str, str], ...], *, reissue: bool) -> None:
        """Drop ready groups for good, with their reason; the sampler may start their prompts again."""
        prompts = tuple(self.ready[g].prompt_id for g, _ in drops)
        ledger: dict[str, int] = {}
        for group_id, reason in drops:
            group = self.ready.pop(group_id)
            tokens = sum(s.rollout.response.n_tokens for s in group.samples)
            ledger[f"dropped/{reason}"] = ledger.get(f"dropped/{reason}", 0) + len(group.samples)
            ledger[f"tokens/dropped/{reason}"] = ledger.get(f"tokens/dropped/{reason}", 0) + tokens
        entries = [self._entries.pop(g) for g, _ in drops]
        message = GroupsGivenUp(groups=drops, prompts=prompts, reissue=reissue)
        await self._context.bus.commit(
            Commit(ack=entries, append=(Out(POLICY, message),), close_groups=[g for g, _ in drops], ledger=ledger)
        )
        self.reader.forget(entries)
        self._context.count("groups_given_up", len(drops))

    def trained(self, groups: list[GroupKept], result: StepResult, step: int) -> None:
        """Move a batch from ready to uncommitted, with its accounts."""
        position = 0
        for group in groups:
            n = len(group.samples)
            trained = result.trained_tokens[position : position + n]
            position += n
            total = sum(s.rollout.response.n_tokens for s in group.samples)
            masked = sum(1 for t in trained if t == 0)
            self.uncommitted.append(
                Trained(
                    step=step,
                    entry=self._entries.pop(group.group_id),
                    consumed=Consumed(
                        group.group_id,
                        n - masked,
                        masked,
                        sum(trained),
                        total - sum(trained),
                        trained_versions([s.rollout.response.spans for s in group.samples], trained),
                    ),
                )
            )
            del self.ready[group.group_id]

    async def acknowledge(self, step: int, checkpoint: Checkpointed | None) -> None:
        """Everything trained up to `step` is durable: acknowledge, close and book it. Repeatable after a crash."""
        done = [t for t in self.uncommitted if t.step <= step]
        for start in range(0, len(done), ACKS_PER_COMMIT):
            part = done[start : start + ACKS_PER_COMMIT]
            while part:
                fault_point(self._context.name, "before_ack")
                result = await self._context.bus.commit(
                    Commit(
                        ack=[t.entry for t in part],
                        close_groups=[t.consumed.group_id for t in part],
                        ledger=booked(part),
                        state={"saved": str(step)},
                    )
                )
                fault_point(self._context.name, "after_ack")
                if result.done:
                    break
                # Entries that the server forgot: their groups come again, and are settled then.
                part = [t for t in part if t.entry.id not in result.moved]
        self.reader.forget([t.entry for t in done])
        self._settle([t.consumed for t in done])
        self.uncommitted = [t for t in self.uncommitted if t.step > step]
        if checkpoint is not None:
            await self._context.bus.append([Out(POLICY, checkpoint)])

    def _settle(self, consumed: Iterable[Consumed]) -> None:
        self._settled |= {item.group_id: item for item in consumed}
        for group_id in list(self._settled)[:-SETTLED_KEPT]:
            del self._settled[group_id]

    async def inside_but_open(self) -> tuple[str, ...]:
        """Groups inside the checkpoint that the bus still lists as open: not acknowledged yet, or it forgot that."""
        inside = [*self._settled, *(t.consumed.group_id for t in self.uncommitted)]
        listed = await self._context.bus.hash_of(self._context.bus.keys.open_groups) if inside else {}
        return tuple(group_id for group_id in inside if group_id in listed)

    def adopt(self, consumed: tuple[Consumed, ...], step: int) -> None:
        """At a start: groups that the loaded checkpoint already holds, delivered again, only wait for their
        acknowledgement; those that are not here may still come, from a server that lost its last second."""
        self._settle(item for item in consumed if item.group_id not in self.ready)
        for item in consumed:
            if self.ready.pop(item.group_id, None) is not None:
                entry = self._entries.pop(item.group_id)
                self.uncommitted.append(Trained(step=step, entry=entry, consumed=item))


def booked(trained: list[Trained]) -> dict[str, int]:
    """Ledger movements of durable groups; accounts that do not move are left out."""
    moves = {
        "trained": sum(t.consumed.samples for t in trained),
        "dropped/masked": sum(t.consumed.masked_samples for t in trained),
        "tokens/trained": sum(t.consumed.tokens for t in trained),
        "tokens/dropped/masked": sum(t.consumed.masked_tokens for t in trained),
    }
    for item in trained:
        for version, n in item.consumed.versions:
            account = f"tokens/trained/version/{version}"
            moves[account] = moves.get(account, 0) + n
    return {account: n for account, n in moves.items() if n}


def trained_versions(
    spans: Sequence[Sequence[VersionSpan]], trained: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Trained tokens by version: `trained[i]` tokens of sample i, the newest ones, because masks take the oldest."""
    found: dict[int, int] = {}
    for sample, left in zip(spans, trained, strict=True):
        for span in reversed(sample):
            n = min(span.n, left)
            left -= n
            if n:
                found[span.version] = found.get(span.version, 0) + n
    return tuple(sorted(found.items()))


__all__ = ("Intake", "Trained", "booked")
