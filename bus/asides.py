"""Experts of a sample's tokens (R3) lie aside, in a blob of their own: they are most of a sample's bytes, and of the rooms that it
passes only the trainer reads them, or the worker that goes on with it. So they are written once and read once.

Always true: the blob lives as long as an entry names it. A commit that acknowledges the last one deletes it (streams/redis.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from bus.errors import BadMessage
from bus.messages.base import EMPTY
from bus.messages.groups import GroupKept
from bus.messages.samples import Response, RolloutDone
from bus.streams.redis import Bus


async def response_aside(bus: Bus, response: Response) -> Response:
    """The same with its experts in a blob, where they would not pass through a commit."""
    routed = response.experts
    if routed is UNSET or routed.ref or len(routed.data) <= bus.config.hop_limit_bytes:
        return response
    return replace(response, experts=replace(routed, data=EMPTY, ref=await bus.blobs.put(bytes(routed.data))))


async def response_whole(bus: Bus, response: Response) -> Response:
    """The same with its experts in it. Of a blob that is gone or cut nothing is there: no data for its `n` tokens."""
    routed = response.experts
    if routed is UNSET or not routed.ref:
        return response
    try:
        data = memoryview(await bus.blobs.get(routed.ref))
    except BadMessage:
        data = EMPTY
    return replace(response, experts=replace(routed, data=data, ref=UNSET))


async def put_aside(bus: Bus, rollout: RolloutDone) -> RolloutDone:
    """`response_aside` of all its trajectories."""
    return await _each(partial(response_aside, bus), rollout) if rollout.routed else rollout


async def fetched(bus: Bus, group: GroupKept) -> GroupKept:
    """`response_whole` of all trajectories of all samples."""
    whole = partial(response_whole, bus)
    rollouts = await asyncio.gather(*(_each(whole, scored.rollout) for scored in group.samples))
    return replace(group, samples=tuple(map(lambda s, r: replace(s, rollout=r), group.samples, rollouts)))


async def _each(change: Callable[[Response], Awaitable[Response]], rollout: RolloutDone) -> RolloutDone:
    *earlier, last = await asyncio.gather(*(change(strand.response) for strand in rollout.strands))
    if rollout.episode is not UNSET:
        strands = map(lambda s, r: replace(s, response=r), rollout.episode.earlier, earlier)
        rollout = replace(rollout, episode=replace(rollout.episode, earlier=tuple(strands)))
    return replace(rollout, response=last)
