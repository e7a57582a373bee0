"""The house in miniature: real bus, real decisions, loops replaced by single steps that a test calls in any order.

Each sample's tokens are numbered 0, 1, 2, ...: a token lost or made twice on the way shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from actors.filter.groups import GroupTable, tokens_of
from actors.filter.judges import JUDGES, judge
from actors.partial.decide import POLICIES, Waiting
from actors.sampler.admission import free_samples, open_limit
from actors.sampler.progress import SamplerProgress
from actors.trainer.cut import Part, cut
from bus import Bus, Commit, Entry, Guard, Out, Reader, Stream, Tail, ledger
from bus.errors import BadMessage
from bus.messages.active import PolicyActive
from bus.messages.base import EMPTY, join, unpack_ints
from bus.messages.control import DeadLetter
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup
from bus.messages.policy import Checkpointed, Restored, StepDone
from bus.messages.samples import Parked, PrefixResume, Response, RolloutDone, RolloutLost, Scored
from bus.messages.versions import PolicyVersion, VersionSpan, spans_cover
from bus.topology import (
    ACTIVE,
    DEAD,
    GROUPS,
    PARKED,
    POLICY,
    PREFIXES,
    PROMPTS,
    ROLLOUTS,
    SCORED,
    VERDICTS,
)
from tests.bus.suite.messages import a_task, an_open_group, more

N_SAMPLES, PER_STEP, BOUND = 2, 2, 1
READS: dict[str, tuple[Stream, ...]] = {
    "generation": (PREFIXES, PROMPTS),
    "reward": (ROLLOUTS,),
    "filter": (SCORED,),
    "partial": (PARKED,),
}


class Piece(msgspec.Struct):
    """A saved piece of a running sample, as it lies on the bus."""

    tokens: bytes
    logprobs: bytes
    mask: bytes
    spans: tuple[VersionSpan, ...]


@dataclass
class Running:
    """A sample on an engine: its tokens, how many of them are in the accounts and how many are saved."""

    response: Response
    counted: int
    saved: int


class Consumer:
    """One process of one room; after `die` in the test it may still act, as a zombie on a bus of its own."""

    def __init__(self, bus: Bus, room: str, name: str) -> None:
        self.bus, self.room, self.name = bus, room, name
        self.reader = Reader(bus, READS[room], room, name)
        self.held: dict[str, Entry] = {}
        self.running: dict[str, Running] = {}
        self.table = GroupTable()
        self.complete: dict[str, None] = {}  # groups to judge, in order

    async def take(self, entries: Sequence[Entry]) -> None:
        """Entries delivered or claimed."""
        for entry in entries:
            self.held[entry.id] = entry
            if self.room == "filter":
                group = entry.fields["group"]
                if not self.table.knows(group):
                    opened = await self.bus.open_group(group)
                    if opened is None:
                        assert not await self.commit(Commit(ack=(entry,))), "an entry was pending whose group was closed"
                        self.held.pop(entry.id, None)
                        continue
                    self.table.begin(group, opened)
                self.table.add(entry, await self.bus.message(entry))
                if self.table.get(group).complete:
                    self.complete[group] = None

    async def commit(self, commit: Commit) -> bool:
        """Whether it took effect; what is over is let go either way."""
        result = await self.bus.commit(commit)
        over = [e for e in commit.ack if result.done or e.id in result.moved]
        for entry in over:
            self.held.pop(entry.id, None)
            self.running.pop(entry.id, None)
        self.reader.forget(over)
        return result.done

    async def finished_elsewhere(self, entry: Entry) -> bool:
        """Whether the body is gone, as it is once somebody else finished the entry; burying it then has no effect."""
        try:
            await self.bus.message(entry)
        except BadMessage:
            letter = DeadLetter(stream=entry.stream.name, entry_id=entry.id, actor=self.name, error="no body")
            buried = await self.commit(Commit(ack=(entry,), append=(Out(DEAD, letter),)))
            assert not buried, "a body was gone while its entry was pending"
            return True
        return False

    # -- generation -----------------------------------------------------------------------------------------------

    async def run_sample(self, entry: Entry) -> tuple[Running, bool]:
        """The sample on its engine, begun from its saved prefix if need be; True when the entry resumes one."""
        message = await self.bus.message(entry)
        resumed = isinstance(message, PrefixResume)
        if entry.id not in self.running:
            base = message.response if resumed else Response()
            counted = base.n_tokens
            for raw in await self.bus.load_prefix(entry.fields["id"]):
                piece = msgspec.msgpack.decode(raw, type=Piece)
                parts = [(base.tokens, piece.tokens), (base.logprobs, piece.logprobs), (base.loss_mask, piece.mask)]
                tokens, logprobs, mask = (join([a, memoryview(b)]) for a, b in parts)
                base = Response(tokens, logprobs, mask, (*base.spans, *piece.spans))
            self.running[entry.id] = Running(base, counted, base.n_tokens)
        return self.running[entry.id], resumed

    async def generate(self, entry: Entry, n_tokens: int, version: PolicyVersion, then: str) -> None:
        """Make tokens, then: nothing, save them, park, finish, lose, or bury the sample."""
        running, _ = await self.run_sample(entry)
        message = await self.bus.message(entry)
        task = message.task if isinstance(message, PrefixResume) else message
        running.response = response = more(running.response, n_tokens, version)
        sample, made = task.sample_id, ledger.generated(self.name, ledger.spans_after(response.spans, running.counted))
        lost = RolloutLost(
            sample_id=sample, group_id=task.group_id, n_samples=N_SAMPLES, reason="poison", tokens_made=running.counted
        )
        done = RolloutDone(task=task, response=response, finish="stop", worker=self.name)
        match then:
            case "save" if response.n_tokens > running.saved:
                at = running.saved
                piece = Piece(
                    bytes(response.tokens[4 * at :]),
                    bytes(response.logprobs[4 * at :]),
                    bytes(response.loss_mask[at:]),
                    ledger.spans_after(response.spans, at),
                )
                if await self.bus.save_prefix(entry, self.name, sample, msgspec.msgpack.encode(piece)):
                    running.saved = response.n_tokens
                else:
                    self.held.pop(entry.id), self.running.pop(entry.id)
                    self.reader.forget([entry])
            case "park":
                out = Out(PARKED, Parked(task=task, response=response, reason="drain"))
                await self.commit(Commit(ack=(entry,), append=(out,), ledger=made, delete_prefixes=(sample,)))
            case "finish":
                out = Out(ROLLOUTS, done)
                await self.commit(Commit(ack=(entry,), append=(out,), ledger=made, delete_prefixes=(sample,)))
            case "lose" | "bury":
                letter = DeadLetter(stream=entry.stream.name, entry_id=entry.id, actor=self.name, error="x")
                outs = [Out(ROLLOUTS, lost)] + ([Out(DEAD, letter)] if then == "bury" else [])
                await self.commit(Commit(ack=(entry,), append=outs, delete_prefixes=(sample,)))

    # -- reward, partial, filter ----------------------------------------------------------------------------------

    async def score(self, entry: Entry, luck: int) -> None:
        """Siblings differ in their reward unless the first one is lucky."""
        message = await self.bus.message(entry)
        if isinstance(message, RolloutDone):
            tokens = unpack_ints(message.response.tokens)
            assert tokens == list(range(len(tokens))), f"tokens lost or doubled on the way: {tokens}"
            assert spans_cover(message.response.spans, len(tokens))
            message = Scored(rollout=message, reward=float(message.task.index or luck))
        await self.commit(Commit(ack=(entry,), append=(Out(SCORED, message),)))

    async def place(self, entry: Entry, step: int) -> None:
        parked = await self.bus.message(entry)
        [plan] = POLICIES["restart_stale"](step, [Waiting(0, parked)])
        restart = plan.action == "restart"
        response = Response(EMPTY, EMPTY, EMPTY) if restart else parked.response
        moves = ledger.dropped("restarted", 0, parked.response.n_tokens) if restart else {}
        out = Out(PREFIXES, PrefixResume(task=parked.task, response=response))
        await self.commit(Commit(ack=(entry,), append=(out,), ledger=moves))

    async def judge(self, group_id: str) -> tuple[str, bool]:
        """Judge a complete group: (reason, whether it took effect); reason empty when kept."""
        half = self.table.get(group_id)
        self.table.forget(group_id)
        entries, members = ([found[i] for i in sorted(found)] for found in (half.entries, half.members))
        reason = judge(members, JUDGES["nonzero_std"]) or ""
        tokens = sum(map(tokens_of, members))
        verdict = GroupVerdict(group_id=group_id, prompt_id="p", kept=not reason, reason=reason)
        if reason:
            moves = ledger.dropped(reason, len(members), tokens)
            commit = Commit(ack=entries, append=(Out(VERDICTS, verdict),), close_groups=(group_id,), ledger=moves)
        else:
            kept = GroupKept(group_id=group_id, prompt_id="p", samples=tuple(m for m in members if isinstance(m, Scored)))
            commit = Commit(ack=entries, append=(Out(GROUPS, kept), Out(VERDICTS, verdict)))
        if await self.commit(commit):
            return reason, True
        await self.take([entry for entry in entries if entry.id in self.held])
        return reason, False


class Saved(msgspec.Struct, frozen=True):
    """A durable checkpoint: its step, the groups of all its steps, and which of them were not acknowledged yet."""

    step: int = 0
    lineage: tuple[tuple[str, ...], ...] = ()
    consumed: tuple[str, ...] = ()


@dataclass
class Trainer:
    """Rank 0: groups by id, those trained and not yet durable, and the lineage: one tuple of group ids a step."""

    bus: Bus
    reader: Reader
    step: int = 0
    ready: dict[str, tuple[Entry, GroupKept]] = field(default_factory=dict)
    uncommitted: list[tuple[int, Entry, GroupKept]] = field(default_factory=list)
    lineage: list[tuple[str, ...]] = field(default_factory=list)

    async def fetch(self) -> None:
        while entries := await self.reader.read(16, 0):
            for entry in entries:
                group = await self.bus.message(entry)
                assert group.group_id not in self.ready, f"{group.group_id} came twice"
                self.ready[group.group_id] = (entry, group)

    async def train(self, per_step: int = PER_STEP) -> bool:
        await self.fetch()
        made = cut(
            ready={g: Part.of(group, came=self.step) for g, (_, group) in self.ready.items()},
            step=self.step,
            size=per_step * N_SAMPLES,
            bound=10**6,  # over-age tokens are masked in the loss; here all of them count as trained
            rule="whole",
        )
        if not made.take:
            return False
        self.step += 1
        version = PolicyVersion(await self.bus.next_number("version"), self.step)
        taken = tuple(group for group, _ in made.take)
        samples = tuple(f"{group}/{i}" for group, at in made.take for i in at)
        done = StepDone(step=self.step, version=version, trained_on=version, groups=taken, samples=samples)
        await self.bus.commit(Commit(append=(Out(POLICY, done),)))
        self.uncommitted += [(self.step, *self.ready.pop(g)) for g in taken]
        self.lineage.append(taken)
        return True

    def save(self) -> Saved:
        """What a checkpoint taken now would hold."""
        return Saved(self.step, tuple(self.lineage), tuple(group.group_id for _, _, group in self.uncommitted))

    async def acknowledge(self, saved: Saved) -> None:
        part = [item for item in self.uncommitted if item[2].group_id in saved.consumed]
        spans = [s for _, _, group in part for scored in group.samples for s in scored.rollout.response.spans]
        await self.bus.commit(
            Commit(
                ack=[entry for _, entry, _ in part],
                close_groups=[group.group_id for _, _, group in part],
                ledger=ledger.trained(sum(len(group.samples) for _, _, group in part), spans),
                append=(Out(POLICY, Checkpointed(step=saved.step, path="")),),
            )
        )
        self.reader.forget([entry for _, entry, _ in part])
        self.uncommitted = [item for item in self.uncommitted if item not in part]


async def restored(bus: Bus, saved: Saved) -> Trainer:
    """A new trainer from a checkpoint: what is inside is acknowledged, the rest is trained again."""
    trainer = Trainer(bus, Reader(bus, [GROUPS], "trainer", "trainer"), saved.step, lineage=list(saved.lineage))
    await trainer.reader.open()
    version = PolicyVersion(await bus.next_number("version"), saved.step)
    await bus.commit(Commit(append=(Out(POLICY, Restored(step=saved.step, version=version)),)))
    await trainer.fetch()
    inside = [g for g in saved.consumed if g in trainer.ready]
    trainer.uncommitted = [(saved.step, *trainer.ready.pop(g)) for g in inside]
    await trainer.acknowledge(saved)
    return trainer


class Sampler:
    """Admission with the real rule; the cursor lies on the bus."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.progress = SamplerProgress()
        self.tail = Tail(bus, [VERDICTS, POLICY, ACTIVE])
        self.last: Commit | None = None

    async def fold(self) -> None:
        while news := await self.tail.read(0):
            for entry in news:
                self.progress.fold(await self.bus.message(entry))

    async def issue(self) -> int:
        await self.fold()
        free = free_samples(
            open_samples=self.progress.open_samples,
            untrained=self.progress.untrained,
            unjudged=self.progress.unjudged,
            limit=open_limit(per_version=PER_STEP * N_SAMPLES, max_staleness=BOUND),
            over_sampling=(PER_STEP + 1) * N_SAMPLES,
            still_needed=10**6,
            engine_room=10**6,
        )
        slots = free // N_SAMPLES
        if not slots:
            return 0
        before = await self.bus.state("cursor")
        first = int(before or 0)
        groups = [f"g{first + n:07d}" for n in range(slots)]
        self.last = Commit(
            append=[Out(PROMPTS, a_task(i, g, n_samples=N_SAMPLES)) for g in groups for i in range(N_SAMPLES)],
            open_groups={g: an_open_group(g, N_SAMPLES) for g in groups},
            ledger=ledger.issued(slots * N_SAMPLES),
            guard=Guard("cursor", before, str(first + slots)),
        )
        await self.bus.commit(self.last)
        for group in groups:
            self.progress.issued(OpenGroup(group_id=group, prompt_id="p", n_samples=N_SAMPLES))
        return slots

    async def activate(self, version: PolicyVersion) -> None:
        """The newest version serves."""
        await self.bus.commit(Commit(append=(Out(ACTIVE, PolicyActive(version=version)),)))
