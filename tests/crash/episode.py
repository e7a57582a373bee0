"""Rollout programs of whole runs that are disturbed: three short turns with an answer of an environment behind the first two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from actors.generation.rollouts import Session, Task, Trajectory, env

EACH = 12  # tokens of a turn
SLOW_S = 0.5


def add(tokens: list[int]) -> int:
    """The environment: a digit's token id, by what the model said."""
    return 3 + sum(tokens) % 8


async def rollout(task: Task, session: Session) -> list[Trajectory]:
    return await in_turns(task, session, add)


async def in_turns(task: Task, session: Session, call: Callable[[list[int]], Any]) -> list[Trajectory]:
    sampling = msgspec.structs.replace(task.sampling, max_new_tokens=EACH)
    tokens, segments = list(task.prompt), []
    for turn in range(3):
        said = await session.generate(tokens, sampling)
        segments.append(said)
        if turn < 2:
            told = env([await session.tell("add", call, said.tokens)] * 2)
            segments.append(told)
            tokens = tokens + said.tokens + told.tokens
    return [Trajectory(task.prompt, segments)]


async def slow_add(tokens: list[int]) -> int:
    await asyncio.sleep(SLOW_S)
    return add(tokens)


async def slow(task: Task, session: Session) -> list[Trajectory]:
    """The same, waiting for its environment most of the time."""
    return await in_turns(task, session, slow_add)


async def rewritten(task: Task, session: Session) -> list[Trajectory]:
    """The same with a second history, and a turn that is thrown away."""
    [first] = await rollout(task, session)
    summary = [*task.prompt, *first.segments[-1].tokens[:4]]
    said = await session.generate(summary, msgspec.structs.replace(task.sampling, max_new_tokens=6))
    await session.generate(summary, msgspec.structs.replace(task.sampling, max_new_tokens=2))
    return [first, Trajectory(summary, [said])]


async def lost_world(task: Task, session: Session) -> list[Trajectory]:
    """One whose environment cannot be rebuilt."""
    return await rollout(task, session)


lost_world.resumable = False  # type: ignore[attr-defined]
