"""Experts of a sample's tokens (R3) lie aside, in a blob of their own: they are most of a sample's bytes, and of the rooms that it
passes only the trainer reads them. So they are written once and read once.

Always true: the blob lives as long as an entry names it. A commit that acknowledges the last one deletes it (streams/redis.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from msgspec import UNSET
from msgspec.structs import replace

from bus.errors import BadMessage
from bus.messages.base import EMPTY
from bus.messages.groups import GroupKept
from bus.messages.samples import Response, RolloutDone, Routed
from bus.streams.redis import Bus


async def put_aside(bus: Bus, rollout: RolloutDone) -> RolloutDone:
    """The same with its experts in blobs, of those that would not pass through a commit."""

    async def put(routed: Routed) -> Routed:
        if routed.ref or len(routed.data) <= bus.config.hop_limit_bytes:
            return routed
        return replace(routed, data=EMPTY, ref=await bus.blobs.put(bytes(routed.data)))

    routed = rollout.routed
    return _with(rollout, iter(await asyncio.gather(*map(put, routed)))) if routed else rollout


async def fetched(bus: Bus, group: GroupKept) -> GroupKept:
    """The same with all experts in it. Of a blob that is gone or cut nothing is there: no data for its `n` tokens."""

    async def get(routed: Routed) -> Routed:
        if not routed.ref:
            return routed
        try:
            return replace(routed, data=memoryview(await bus.blobs.get(routed.ref)), ref=UNSET)
        except BadMessage:
            return replace(routed, data=EMPTY, ref=UNSET)

    rollouts = [scored.rollout for scored in group.samples]
    every = iter(await asyncio.gather(*(get(routed) for rollout in rollouts for routed in rollout.routed)))
    return replace(
        group, samples=tuple(replace(scored, rollout=_with(scored.rollout, every)) for scored in group.samples)
    )


def _with(rollout: RolloutDone, found: Iterator[Routed]) -> RolloutDone:
    """With these in the places of `rollout.routed`, in order."""

    def changed(response: Response) -> Response:
        return response if response.experts is UNSET else replace(response, experts=next(found))

    if rollout.episode is not UNSET:
        earlier = tuple(replace(strand, response=changed(strand.response)) for strand in rollout.episode.earlier)
        rollout = replace(rollout, episode=replace(rollout.episode, earlier=earlier))
    return replace(rollout, response=changed(rollout.response))
