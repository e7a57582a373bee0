"""Runs a rollout program once, on a made-up sample and an engine that answers two tokens, before anything starts."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, cast

import msgspec

from actors.generation.engine import Chunk
from actors.generation.rollouts import Program
from actors.generation.rollouts.live import Live
from actors.generation.rollouts.outcome import outcome_of
from actors.generation.rollouts.world import Worlds
from actors.generation.sample import Running, Turn
from actors.generation.turns import Turns
from actors.runtime.hooks import load_hook
from actors.runtime.whole import said
from bus import Entry
from bus.messages.base import pack_ints
from bus.messages.environments import EnvironmentAnswer, EnvironmentCall
from bus.messages.samples import SampleTask, Sampling
from bus.messages.versions import PolicyVersion
from bus.topology import PROMPTS

VERSIONS = {"1": PolicyVersion(1, 0)}


class _Answers:
    """An engine that says two tokens a turn."""

    worker = "probe"

    async def run(self, entry: Entry, running: Running, turn: Turn, sampling: Sampling, more: Any = None) -> None:
        running.take(turn, Chunk([1, 2], [-0.5, -0.5], "1"), VERSIONS)
        turn.finish = "stop"
        if more is not None:
            more(turn)
        await asyncio.sleep(0)


class _Here:
    """The environments room, in this process: one environment."""

    deadline_s = 30.0

    def __init__(self, path: str) -> None:
        self._kind = load_hook(path)
        self._environment: Any = None

    async def ask(self, call: EnvironmentCall) -> EnvironmentAnswer:
        if not call.actions:
            self._environment = self._kind()
            value = self._environment.reset(msgspec.msgpack.decode(call.task))
        else:
            value = self._environment.step(msgspec.msgpack.decode(call.actions[-1]))
        value = await value if inspect.isawaitable(value) else value
        return EnvironmentAnswer(asked="", sample_id="", answer=msgspec.msgpack.encode(value))

    async def over(self, sample_id: str) -> None: ...


async def problem_of(
    program: Program, *, prompt: str, label: str, metadata: dict[str, Any], deadline_s: float, world: str = ""
) -> str:
    """Why a program cannot be used; empty when it can. `world`: dotted path of its environment."""
    task = SampleTask(
        sample_id="try/0", group_id="try", index=0, n_samples=1, prompt_id="try", prompt_tokens=pack_ints([1]), label=label,
        prompt_text=prompt, metadata=metadata, sampling=Sampling(max_new_tokens=64),
    )  # fmt: skip
    running = Running(task)

    async def admit(_: Running) -> None:
        return None

    entry = Entry("0-1", PROMPTS, "generation", {}, b"", 0)
    live = Live(cast(Turns, _Answers()), admit, entry, running, saves=False, worlds=cast(Worlds, _Here(world)) if world else None)
    try:
        found = await live.play(program, deadline_s)
        outcome_of(found, running)
    except Exception as error:  # noqa: BLE001 - whatever the user's program raises
        return said(error, deadline_s)
    return ""
