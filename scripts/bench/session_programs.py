"""What session.py's worker processes run: an agent with the openai client, and a program of four turns."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from actors.generation.rollouts import Trajectory, env

AGENT_TURNS, AGENT_TOKENS, SPEED_TURNS, HEARD = 5, 48, 4, 32
_client: list[Any] = []


async def agent(task: Any, base_url: str, api_key: str) -> float:
    """Five answers by the openai client; one HTTP pool for all agents of a worker."""
    import openai

    if not _client:
        _client.append(openai.AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0, timeout=600))
    client = _client[0].with_options(api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": f"begin {task.sample_id}"}]
    for turn in range(AGENT_TURNS):
        most = 8 + (sum(task.sample_id.encode()) * 7 + turn * 13) % (AGENT_TOKENS - 8)
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=most)
        messages += [answer.choices[0].message, {"role": "user", "content": f"heard; turn {turn}"}]
    return 1.0


def heard(name: str, turn: int) -> list[int]:
    """What the environment says after a turn: token ids."""
    draw = random.Random(f"{name} {turn}")
    return [draw.randrange(10, 250) for _ in range(HEARD)]


async def four_turns(task: Any, session: Any) -> list[Any]:
    """The program whose speed is measured; its environment is told each turn, so each turn is saved."""
    tokens, segments = list(task.prompt), []
    each = msgspec.structs.replace(task.sampling, max_new_tokens=task.sampling.max_new_tokens // SPEED_TURNS)
    for turn in range(SPEED_TURNS):
        said = await session.generate(tokens, each)
        segments.append(said)
        if turn + 1 < SPEED_TURNS:
            told = await session.tell("env", heard, task.group_id, turn)
            segments.append(env(told))
            tokens = tokens + said.tokens + told
    return [Trajectory(task.prompt, segments, reward=0.0)]
