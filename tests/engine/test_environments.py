"""Environments in a room of their own: an episode keeps its environment when its worker dies, and is told why where it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.environments.actor import EnvironmentsSpec, chained
from actors.environments.actor import run as run_environments
from actors.generation.rollouts import Session, Task, Trajectory, env
from actors.generation.spec import GenerationSpec
from actors.runtime.child import ended, is_alive
from actors.runtime.context import Context
from bus import Bus, Out, Tail
from bus.knobs.live import LiveKnobs
from bus.messages.environments import EnvironmentAnswer, EnvironmentCall
from bus.topology import DEAD, ENV_ANSWERS, ENV_CALLS
from tests.actors.house import messages, running, until
from tests.declared import actor_of
from tests.engine.rollout_programs import STATE, Talker
from tests.engine.test_rollouts import body_on, house, one_rollout

PID = os.getpid()


async def adds(task: Task, session: Session) -> list[Trajectory]:
    """Three turns, each told to the environment."""
    world, ids, segments, seen = session.world(), list(task.prompt), [], []
    await world.reset()
    for turn in range(3):
        said = await session.generate(ids)
        segments.append(said)
        told = (await world.step(len(said.tokens)))[0]
        seen.append([told, (await world.step("pid"))[0]])
        segments.append(env([told]))
        ids += [*said.tokens, told]
        if gate := STATE.get(f"behind turn {turn}"):
            await gate()
    return [Trajectory(task.prompt, segments, reward=1.0, metadata={"seen": seen})]


def spec_of(**fields: Any) -> EnvironmentsSpec:
    usual = {"environment_path": "tests.engine.counting.Counts", "environment_slots": 4, "environment_timeout_s": 30.0}
    rest = {"environment_idle_s": 600.0, "environment_sandbox": False, "sandbox_reads": (), "pass_env": ()}
    return EnvironmentsSpec(**(usual | rest | {"allow_weak_sandbox": False} | fields))


@asynccontextmanager
async def room(bus: Bus, folder: Path, **fields: Any) -> AsyncIterator[Context]:
    async with running(bus, "environments", run_environments, spec_of(**fields), run_dir=str(folder)) as context:
        yield context


class Asks:
    """An episode played by the test."""

    def __init__(self, bus: Bus, name: str = "g/0") -> None:
        self._bus, self._name, self._n = bus, name, 0
        self._tail = Tail(bus, [ENV_ANSWERS])

    async def ask(self, *actions: Any, told: bytes = b"") -> EnvironmentAnswer:
        self._n += 1
        packed = tuple(map(msgspec.msgpack.encode, actions))
        task = msgspec.msgpack.encode({"sample_id": self._name})
        call = EnvironmentCall(asked=f"{self._name} {self._n}", sample_id=self._name, task=task, actions=packed, told=told)
        await self._bus.append([Out(ENV_CALLS, call)])

        async def answered() -> EnvironmentAnswer | None:
            return next((a for a in await messages(self._bus, ENV_ANSWERS) if a.asked == call.asked), None)

        return await until(answered)


def digest(*given: Any) -> bytes:
    found = b""
    for one in given:
        found = chained(found, msgspec.msgpack.encode(one))
    return found


BEGUN = ["begun", "g/0"]


@pytest.mark.timeout(90)
async def test_an_episode_whose_worker_dies_keeps_its_environment(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Its worker is gone in mid-episode; the next one goes on with the same process, which is told nothing twice."""
    gone = asyncio.Event()

    async def hangs() -> None:
        gone.set()
        await asyncio.Future()

    async with house(redis_url, run_name, "calculator", lease_s=1.0) as (bus, plain), room(bus, tmp_path) as kept:

        async def garbage() -> None:
            head = ("v", "1", "type", "environment.answer", "body", b"\xff no message")
            await bus.link.run("XADD", bus.keys.stream(ENV_ANSWERS.name), "*", *head)

        STATE["behind turn 0"] = garbage  # what follows is heard all the same
        spec = msgspec.structs.replace(plain, program=f"{__name__}.adds", environments_s=30.0)
        STATE["behind turn 1"] = hangs
        first = asyncio.create_task(_life(bus, "w0", spec))
        await asyncio.wait_for(gone.wait(), 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        STATE.clear()
        async with running(bus, "w1", body_on(Talker()), spec):
            rollout = await one_rollout(bus)
        seen = rollout.episode.metadata["seen"]
        made = [len(turn) for turn in turns_of(rollout)]
        assert [told for told, _ in seen] == [sum(made[: n + 1]) for n in range(3)]
        assert len({pid for _, pid in seen}) == 1 and seen[0][1] != PID, "one process, and not this one"

        async def ended() -> bool:
            return kept.counters.get("environments_over", 0) == 1

        await until(ended)
        counted = {k: v for k, v in kept.counters.items() if k.startswith("environment")}
        assert counted == {"environments_begun": 1, "environment_steps": 6, "environments_over": 1}
        assert await messages(bus, DEAD) == []


def turns_of(rollout: Any) -> list[list[int]]:
    """The model's tokens, turn by turn."""
    mask = bytes(rollout.response.loss_mask)
    return [list(group) for kept, group in groupby(mask) if kept]


async def _life(bus: Bus, name: str, spec: GenerationSpec) -> None:
    """A worker until it is cancelled, which says nothing to the bus."""
    knobs, over = LiveKnobs(bus), asyncio.Event()
    await knobs.open()
    follow = asyncio.create_task(knobs.follow(over))
    try:
        await body_on(Talker())(Context(actor_of(name=name, role=name, bus=bus.config, run_seed=7), bus, knobs), spec)
    finally:
        over.set()
        await follow


@pytest.mark.timeout(90)
async def test_an_environment_that_is_lost_is_built_anew_by_the_episodes_own_actions(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async with house(redis_url, run_name, "calculator") as (bus, _):
        asks = Asks(bus)
        async with room(bus, tmp_path) as context:
            assert (await asks.ask()).answer == msgspec.msgpack.encode(BEGUN)
            known = digest(BEGUN)
            pid = msgspec.msgpack.decode((await asks.ask("pid", told=known)).answer)[0]
            os.kill(pid, signal.SIGKILL)
            answer = await asks.ask(5, told=known)
            assert msgspec.msgpack.decode(answer.answer)[0] == 5 and context.counters["environments_rebuilt"] >= 1
            again = await asks.ask(5, told=known)
            assert again.answer == answer.answer, "asked twice, it is told once"
        async with room(bus, tmp_path):  # the actor itself was started again
            known = digest(BEGUN, [5, 0.0, False])
            assert msgspec.msgpack.decode((await asks.ask(5, 2, told=known)).answer)[0] == 7
        async with room(bus, tmp_path):
            other = digest(BEGUN, [b"1234", 0.0, False])
            assert (await asks.ask("random", 2, told=other)).differs, "it does not say the same again"


@pytest.mark.timeout(90)
async def test_what_an_environment_starts_reads_no_orders_and_ends_with_it(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """`cat` read the pipe of our orders: the step hung, and was late."""
    async with house(redis_url, run_name, "calculator") as (bus, _):
        async with room(bus, tmp_path, environment_timeout_s=10.0):
            asks = Asks(bus, "c/0")
            answer = await asks.ask("cat", told=digest(["begun", "c/0"]))
            assert not answer.error and msgspec.msgpack.decode(answer.answer)[0] == 0
            asks = Asks(bus, "s/0")
            answer = await asks.ask("setsid", told=digest(["begun", "s/0"]))
            pid = msgspec.msgpack.decode(answer.answer)[0]
            assert is_alive(pid)
            await bus.append([Out(ENV_CALLS, EnvironmentCall(asked="", sample_id="s/0", task=b"", over=True))])
            await ended(pid, 20.0)
            assert not is_alive(pid)


async def test_what_an_environment_does_wrong_is_told_with_its_cause(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with house(redis_url, run_name, "calculator") as (bus, _):
        async with room(bus, tmp_path, environment_timeout_s=1.0):
            answer = await Asks(bus, "hang/0").ask("hang", told=digest(["begun", "hang/0"]))
            assert "did not end within 1 s" in answer.error
        async with room(bus, tmp_path, environment_sandbox=True, environment_slots=1) as context:
            says = {
                "die": "ended with 3", "flood": "more than 100,000",
                "raise": "ValueError: no such move at counting.py:",
            }  # fmt: skip
            for action, text in says.items():
                answer = await Asks(bus, f"{action}/0").ask(action, told=digest(["begun", f"{action}/0"]))
                assert text in answer.error, answer
            answer = await Asks(bus).ask("fork", told=digest(BEGUN))
            assert msgspec.msgpack.decode(answer.answer)[0] != 0, "the sandbox's limits hold: no process is started"
            assert context.counters["environments_died"] == 4 and context.counters["environments_evicted"] >= 1
        async with room(bus, tmp_path, environment_path="tests.engine.nothing.Here"):
            assert "not loaded" in (await Asks(bus, "other/0").ask()).error
