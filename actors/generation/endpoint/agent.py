"""The program of an agent that speaks the OpenAI interface: it gets an address and a key, and its calls are the session's turns.

    async def agent(task, base_url, api_key): ...      # returns a reward, a table of them, or None: the reward actor scores it

A plain function runs in a thread. An agent has no deadline while the model answers; between two answers it has `idle_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from actors.generation.endpoint.server import Endpoint, Episode
from actors.generation.rollouts.session import Session, Task, Trajectory
from actors.runtime.contained import contained
from actors.runtime.whole import off_loop
from bus.errors import Poison


class AgentHangs(Exception):
    """An agent that asks nothing more and does not end."""


class AgentProgram:
    """A rollout program of the agent `run`. `idle_s`: longest time without an answer of the model."""

    def __init__(self, run: Callable[[Task, str, str], Any], endpoint: Endpoint, *, idle_s: float) -> None:
        self._run, self._endpoint, self._idle_s = run, endpoint, idle_s
        self.resumable = bool(getattr(run, "resumable", True))

    def __str__(self) -> str:
        return f"agent {getattr(self._run, '__name__', self._run)}"

    async def __call__(self, task: Task, session: Session) -> list[Trajectory]:
        async with self._endpoint.episode(task, session) as (episode, key):
            agent = asyncio.ensure_future(self._call(task, key))
            try:
                await self._watch(agent, episode)
                reward = agent.result()
            except Exception:
                if not episode.spent:  # an agent whose calls are refused as tokens or context are used up ends as it likes
                    raise
                reward = None
            finally:
                agent.cancel()
        found = episode.dialogues.trajectories()
        if not found:
            why = f"; its last call was refused: {episode.refused:.200}" if episode.refused else ""
            raise Poison(f"the agent ended without an answer of the model on {task.sample_id}{why}")
        if reward is not None:
            found[-1] = msgspec.structs.replace(found[-1], reward=reward)
        return found

    async def _call(self, task: Task, key: str) -> Any:
        url = self._endpoint.url
        with contained():
            return await off_loop(self._run, task, url, key)

    async def _watch(self, agent: asyncio.Future[Any], episode: Episode) -> None:
        """Until the agent ends; raises AgentHangs. Woken by its end, else when it could be late."""
        episode.heard_at = time.monotonic()
        while not agent.done():
            idle = 0.0 if episode.handlers else time.monotonic() - episode.heard_at
            if idle >= self._idle_s:
                raise AgentHangs(f"the agent neither called the model nor ended for {self._idle_s:g} s")
            await asyncio.wait([agent], timeout=self._idle_s - idle)
