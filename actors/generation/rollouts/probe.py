"""Runs a rollout program once, on a made-up sample and an engine that answers two tokens, before anything starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from actors.generation.engine import Chunk
from actors.generation.rollouts import Program, single
from actors.generation.rollouts.function import RolloutFunction
from actors.generation.rollouts.live import Live
from actors.generation.rollouts.outcome import outcome_of
from actors.generation.rollouts.programs import LeftOut, ProgramFailed
from actors.generation.rollouts.world import Worlds
from actors.generation.sample import ModelTurn, Running
from actors.generation.turns import Turns
from actors.runtime.context import Context
from actors.runtime.hooks import load_hook
from actors.runtime.whole import off_loop, said
from bus import Entry
from bus.clock import SystemClock
from bus.messages.environments import EnvironmentAnswer, EnvironmentCall
from bus.messages.samples import SampleTask, Sampling
from bus.messages.versions import PolicyVersion
from bus.topology import PROMPTS

MOST_GROUPS = 4096  # asked for by a function that keeps none
VERSIONS = {"1": PolicyVersion(1, 0)}


class _Answers:
    """An engine that says two tokens a turn."""

    worker = "probe"

    async def run(self, entry: Entry, running: Running, turn: ModelTurn, sampling: Sampling, more: Any = None) -> None:
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
        value = await off_loop(self._said, call)  # as at work: in no loop, since a plain method may run one of its own
        return EnvironmentAnswer(asked="", sample_id="", answer=msgspec.msgpack.encode(value))

    def _said(self, call: EnvironmentCall) -> Any:
        if not call.actions:
            self._environment = self._kind()
            return self._environment.reset(msgspec.msgpack.decode(call.task))
        return self._environment.step(msgspec.msgpack.decode(call.actions[-1]))

    async def over(self, sample_id: str) -> None: ...


async def _play(program: Program, task: SampleTask, deadline_s: float | None, world: str = "") -> None:
    running = Running(task)

    async def admit(_: Running) -> None:
        return None

    entry = Entry("0-1", PROMPTS, "generation", {}, b"", 0)
    live = Live(cast(Turns, _Answers()), admit, entry, running, saves=False, worlds=cast(Worlds, _Here(world)) if world else None)
    outcome_of(await live.play(program, deadline_s), running)


async def problem_of(program: Program, task: SampleTask, *, deadline_s: float, world: str = "") -> str:
    """Why a program cannot be used; empty when it can. `world`: dotted path of its environment."""
    try:
        await _play(program, task, deadline_s, world)
    except Exception as error:  # noqa: BLE001 - whatever the user's program raises
        return said(error, deadline_s)
    return ""


async def function_problem(path: str, values: Mapping[str, Any], task: SampleTask, *, deadline_s: float) -> str:
    """Why a rollout function cannot be used; empty when it can, or when it goes on asking for further groups. It gets as many as it
    asks for, of one prompt."""
    quiet = SimpleNamespace(clock=SystemClock(), count=lambda *_: None, log=logging.getLogger("try"), version=0)
    function = RolloutFunction(
        cast(Context, quiet), path, beside=single.rollout, values=lambda: values, decode=lambda ids: " ".join(map(str, ids)),
        deadline_s=deadline_s,
    )  # fmt: skip
    n, issued, samples = int(values.get("n_samples_per_prompt") or 1), 0, set[asyncio.Task[None]]()
    async with function.open():
        while not function.why and issued <= MOST_GROUPS and not any(one.done() for one in samples):
            for _ in range(max(0, function.wanted)):
                group = f"try{issued}"
                for i in range(n):
                    one = msgspec.structs.replace(task, sample_id=f"{group}/{i}", group_id=group, index=i, n_samples=n)
                    samples.add(asyncio.create_task(_play(function, one, None)))
                issued += 1
            await asyncio.sleep(0.01)
        for sample in samples:
            sample.cancel()
        ended = await asyncio.gather(*samples, return_exceptions=True)
    raised = [one for one in ended if isinstance(one, Exception) and not isinstance(one, LeftOut | ProgramFailed)]
    return function.why or (said(raised[0]) if raised else "")
