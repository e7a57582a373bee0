"""Functions as users write them, for runs by chance: of turns as a sample's name says, over HTTP, and some that fail.

One sample in 25 fails at every attempt and becomes a dead letter; any other fails now and then, and is done at a later attempt.
What is decided by a name is the same at every attempt, so that a program that is run again from its journal asks the same.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from random import Random, random
from typing import Any

import msgspec

from actors.generation.rollouts import Session, Task, Trajectory, env

NEVER, NOT_NOW = 0.04, 0.08
SLOW_S = 1.5  # above the deadline that runs by chance give a reward


def falter(sample_id: str) -> None:
    """Fail, or not. The trial before a run does not."""
    if sample_id.startswith("try"):
        return
    if Random(f"never {sample_id}").random() < NEVER:
        raise ValueError("this one never works")
    if random() < NOT_NOW:
        raise OSError("not now")


# -- rewards and a filter ---------------------------------------------------------------------------------------


def reward(sample: dict[str, Any]) -> float:
    """By the sample's name; one in fifty attempts takes too long."""
    falter(sample["sample_id"])
    if random() < 0.02 and not sample["sample_id"].startswith("try"):
        time.sleep(SLOW_S)
    return float(Random(sample["sample_id"]).getrandbits(1))


def rewards(samples: list[dict[str, Any]]) -> list[float]:
    """Of a group at once, which fails with any of them."""
    return [reward(sample) for sample in samples]


def picky(samples: Sequence[Any]) -> str | None:
    """A filter that drops a third of the groups, and raises at one in twenty."""
    group = str(samples[0].rollout.task.group_id)
    mood = Random(group).random() if group.startswith("g") else 1.0
    if mood < 0.05:
        raise ValueError("cannot judge this one")
    return "disliked" if mood < 0.35 else None


# -- rollouts ---------------------------------------------------------------------------------------------------


async def heard(name: str, turn: int) -> list[int]:
    """What an environment says: token ids, after a while."""
    chance = Random(f"{name} {turn}")
    await asyncio.sleep(chance.choice([0.0, 0.0, 0.05, 0.2]))
    return [chance.randrange(3, 12) for _ in range(chance.randint(1, 4))]


async def wander(task: Task, session: Session) -> list[Trajectory]:
    """One to four turns, the second of them twice side by side in some samples, a rewritten history at the end of others."""
    chance = Random(f"wander {task.sample_id}")
    each = msgspec.structs.replace(task.sampling, max_new_tokens=chance.randint(4, 16))
    tokens, segments = list(task.prompt), []
    for turn in range(chance.randint(1, 4)):
        if turn == 1 and chance.random() < 0.3:
            said, _thrown_away = await asyncio.gather(session.generate(tokens, each), session.generate(tokens, each))
        else:
            said = await session.generate(tokens, each)
        told = env(await session.tell("heard", heard, task.sample_id, turn))
        segments += [said, told]
        tokens = tokens + said.tokens + told.tokens
        if not session.left:
            break
    found = [Trajectory(task.prompt, segments)]
    if session.left and chance.random() < 0.3:
        summary = [*task.prompt, *segments[-1].tokens]
        found.append(Trajectory(summary, [await session.generate(summary, each)]))
    return found


async def moody(task: Task, session: Session) -> list[Trajectory]:
    """The same, failing between its turns and its end."""
    found = await wander(task, session)
    falter(task.sample_id)
    return found


async def guesses(task: Task, session: Session) -> list[Trajectory]:
    """A game against an environment that stays (actors.environments.guess.Guess), which gives the reward."""
    world, tokens, segments, reward, over = session.world(), list(task.prompt), [], 0.0, False
    each = msgspec.structs.replace(task.sampling, max_new_tokens=6)
    await world.reset()
    while not over and session.left:
        said = await session.generate(tokens, each)
        seen, reward, over = await world.step(said.tokens[-1] % 10 if said.tokens else 0)
        answer = env([3 + len(seen)])
        segments += [said, answer]
        tokens = tokens + said.tokens + answer.tokens
    return [Trajectory(task.prompt, segments, reward=reward)]


def ask(base_url: str, api_key: str, messages: list[dict[str, Any]], most: int) -> dict[str, Any]:
    """One answer of the model; what is refused is raised."""
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": most}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        message: dict[str, Any] = json.loads(answer.read())["choices"][0]["message"]
    return message


def agent(task: Any, base_url: str, api_key: str) -> float | None:
    """One to four calls over HTTP, the history cut short before the last one in some samples. Half of them know their reward."""
    chance = Random(f"agent {task.sample_id}")
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt_text or "1+1="}]
    turns = chance.randint(1, 4)
    for turn in range(turns):
        if turn == turns - 1 and chance.random() < 0.3:
            messages = messages[:1]
        try:
            messages.append(ask(base_url, api_key, messages, chance.randint(4, 16)))
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            break  # the last of its tokens is made
        messages.append({"role": "user", "content": str(chance.randint(0, 99))})
    falter(task.sample_id)
    return chance.choice([None, 0.0, 1.0])
