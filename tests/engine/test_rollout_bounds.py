"""What a rollout program may do wrong, and what that costs: rewards, tools that hang, long episodes, a blocked worker.
And how it is tried before a run starts."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import msgspec
import pytest

from actors.generation.rollouts import probe
from actors.generation.spec import GenerationSpec
from actors.reward.sample import Sample
from bus.messages.samples import RolloutDone
from bus.topology import DEAD, PROMPTS, ROLLOUTS
from miles_async.launcher.try_hooks import HookTrial, problem_of
from tests.actors.house import messages, open_bus, put, running, until
from tests.engine.rollout_programs import HERE, STATE, Talker, talks_long
from tests.engine.test_rollouts import body_on, one_rollout, task, with_stop
from tests.engine.test_rollouts import fresh as fresh


@pytest.mark.parametrize(
    ("given", "kept"), [("True", 1.0), ("{'score': 1, 'why': 'right'}", {"score": 1.0}), ("[1.0]", None), ("'1'", None)]
)
async def test_a_reward_of_the_program_is_a_number_or_numbers(redis_url: str, run_name: str, given: str, kept: Any) -> None:
    """Whatever else would cost the sample at its next reader, which could only say that the message is malformed."""
    path = f"{HERE}.judged_so"
    spec = GenerationSpec(engine="external", engine_url="scripted", program=path)
    async with open_bus(redis_url, run_name, groups=("g",)) as bus:
        await put(bus, PROMPTS, with_stop(task(label=given)))
        async with running(bus, "w0", body_on(Talker()), spec):
            rollout = await one_rollout(bus)
        letters = await messages(bus, DEAD)
    if kept is not None:
        assert isinstance(rollout, RolloutDone) and rollout.episode and rollout.episode.reward == kept
    else:
        assert "which is no number and no table of numbers" in letters[0].error


async def test_a_tool_that_hangs_takes_nothing_from_others(redis_url: str, run_name: str) -> None:
    """Forty at once, more than any pool of threads has."""
    STATE["over"] = threading.Event()
    spec = GenerationSpec(engine="external", engine_url="scripted", program=f"{HERE}.patient")
    names = [f"h{i}" for i in range(40)]

    async def all_there() -> bool:
        return await bus.length(ROLLOUTS) == len(names)

    try:
        async with open_bus(redis_url, run_name, groups=names, knobs={"sglang_server_concurrency": 40}) as bus:
            await put(bus, PROMPTS, *(with_stop(task(name)) for name in names))
            async with running(bus, "w0", body_on(Talker()), spec):
                await until(all_there)
            assert STATE["late"] == len(names) and not await messages(bus, DEAD)
    finally:
        STATE["over"].set()


async def test_a_long_episode_holds_its_history_once() -> None:
    """Not once for each of its turns: 60,000 tokens, 300 turns."""
    asked = task()
    asked = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, max_new_tokens=1000))
    tracemalloc.start()
    try:
        assert await probe.problem_of(talks_long, asked, deadline_s=60.0) == ""
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10e6


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rollout_programs.calculator", ""),
        ("rollout_programs.generate", ""),
        ("rollout_programs.broken", "raised KeyError: 'no such tool' at rollout_programs.py:"),
        ("rollout_programs.twice", "in two trajectories"),
        ("rollout_programs.retokenised", "not what the engine answered"),
        ("rollout_programs.add", "raised TypeError"),
        ("rollout_programs.hanging", "did not end within its deadline (0.5 s) at rollout_programs.py:"),
        ("rollout_programs.nowhere", "cannot be loaded"),
    ],
)
def test_each_program_is_tried_before_a_run_starts(name: str, problem: str) -> None:
    made = Sample(sample_id="try/0", prompt="1+1=", response="2", label="2")
    field = "custom_generate_function_path"
    ask = HookTrial(paths={field: f"tests.engine.{name}"}, sample=made, deadline_s=2.0, rollout_s=0.5, values={"plus": 7})
    found = problem_of(field, ask.paths[field], ask)
    assert problem in found and bool(problem) == bool(found)
