"""Where every sample under way lies: its stream, its entry, who holds it. From one look at the heads of the streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from bus import Bus, Stream
from bus.inspect import Head, Pending, all_heads, pending_entries, readers_of
from bus.ledger import HOME
from bus.messages.groups import OpenGroup
from bus.topology import EVAL_PROMPTS, EVAL_ROLLOUTS, EVAL_SCORED, GROUPS, ROLLOUTS, SCORED

EVAL_HOME = (EVAL_PROMPTS, EVAL_ROLLOUTS, EVAL_SCORED)
DOING = {
    "prompts": "to be generated",
    "prefixes": "to be resumed",
    "tail": "to be resumed in the tail's slots",
    "parked": "parked",
    "rollouts": "to be scored",
    "scored": "scored, waiting for its siblings",
    "groups": "with the trainer",
    "eval.prompts": "to be generated",
    "eval.rollouts": "to be scored",
    "eval.scored": "scored, waiting for its evaluation",
}


class EntryPlace(msgspec.Struct, frozen=True):
    """One entry, and its holder if it was delivered."""

    head: Head
    pending: Pending | None = None

    def text(self, now: float) -> str:
        """`leased by worker-1 on prompts 1712-0, renewed 0.4 s ago, 2nd delivery` or `not delivered on prompts 1712-0`."""
        where = f"{self.head.stream} {self.head.id}"
        waited = f"there for {max(0.0, now - self.head.wall):.0f} s"
        if self.pending is None:
            return f"not delivered yet on {where}, {waited}"
        p = self.pending
        again = f", delivered {p.deliveries} times" if p.deliveries > 1 else ""
        return f"held by {p.owner} on {where}, {waited}, lease renewed {p.idle_s:.0f} s ago{again}"


class EntryPlaces(msgspec.Struct, frozen=True):
    """Entries of the data streams with their holders, and the open groups and parts of groups by key."""

    heads: dict[str, list[Head]]
    pending: dict[tuple[str, str], Pending]
    groups: dict[str, OpenGroup]

    def place(self, head: Head) -> EntryPlace:
        """An entry with its holder."""
        return EntryPlace(head, self.pending.get((head.stream, head.id)))

    def by_sample(self) -> dict[str, EntryPlace]:
        """Training samples not yet in a kept group. Of several entries the one furthest along counts."""
        found: dict[str, EntryPlace] = {}
        for stream in HOME[:-1]:
            for head in self.heads.get(stream.name, ()):
                found[head.sample] = self.place(head)
        return found

    def kept(self) -> dict[str, EntryPlace]:
        """Groups and parts that lie with the trainer, by key."""
        return {head.sample: self.place(head) for head in self.heads.get(GROUPS.name, ()) if head.sample}

    def opened(self, sample_id: str) -> OpenGroup | None:
        """The open group or part that a sample belongs to; of a group's id, the group."""
        parts = [part for part in self.groups.values() if sample_id in part.sample_ids]
        return parts[0] if parts else self.groups.get(sample_id)

    def holds(self, head: Head, sample_id: str, group: str) -> bool:
        """Whether an entry of `groups` has this sample, or is of this group."""
        part = self.groups.get(head.sample)
        return head.group == group and (sample_id == group or part is None or sample_id in part.sample_ids)

    def incomplete(self) -> list[Incomplete]:
        """Open groups of which the filter has some samples but not all, oldest first."""
        samples, kept = self.by_sample(), self.kept()
        found: list[Incomplete] = []
        for key, group in sorted(self.groups.items()):
            if key in kept:
                continue
            ids = group.sample_ids
            here = [s for s in ids if s in samples and samples[s].head.stream == SCORED.name]
            if here and len(here) < len(ids):
                since = min(samples[s].head.wall for s in here)
                missing = {s: samples.get(s) for s in ids if s not in here}
                found.append(Incomplete(group.group_id, len(here), len(ids), since, missing))
        return found

    def stages(self) -> dict[str, int]:
        """Open groups by how far their slowest sample is, whatever parts they left the filter in: generation, reward, filter, kept,
        nowhere."""
        samples, kept = self.by_sample(), self.kept()
        stage_of = dict.fromkeys((stream.name for stream in HOME), 1) | {ROLLOUTS.name: 2, SCORED.name: 3}
        names = ("nowhere", "generation", "reward", "filter", "kept")
        slowest: dict[str, int] = {}
        for key, group in self.groups.items():
            places = [samples.get(sample) for sample in group.sample_ids]
            stage = 4 if key in kept else min((stage_of[p.head.stream] if p else 0 for p in places), default=0)
            slowest[group.group_id] = min(stage, slowest.get(group.group_id, stage))
        count = dict.fromkeys(names[::-1], 0)
        for stage in slowest.values():
            count[names[stage]] += 1
        return count


class Incomplete(msgspec.Struct, frozen=True):
    """A group at the filter that waits for siblings. `since`: wall time of its first scored sample."""

    group_id: str
    here: int
    wanted: int
    since: float
    missing: Mapping[str, EntryPlace | None]


async def read_places(bus: Bus, *, evals: bool = False) -> EntryPlaces:
    """Heads and holders of all data streams."""
    streams = (*HOME, *EVAL_HOME) if evals else HOME
    opened, found = await asyncio.gather(
        bus.open_groups(), asyncio.gather(*(_stream_with_holders(bus, stream) for stream in streams))
    )
    heads: dict[str, list[Head]] = {}
    pending: dict[tuple[str, str], Pending] = {}
    for stream, (rows, held) in zip(streams, found, strict=True):
        heads[stream.name] = rows
        pending |= {(p.stream, p.id): p for p in held}
    return EntryPlaces(heads, pending, opened)


async def _stream_with_holders(bus: Bus, stream: Stream) -> tuple[list[Head], list[Pending]]:
    rows = await all_heads(bus, stream)
    held: list[Pending] = []
    for name in await readers_of(bus, stream):
        held += await pending_entries(bus, stream, name)
    return rows, held
