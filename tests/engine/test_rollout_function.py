"""Functions written for Miles that make whole groups: what they return, give back and leave out, and what their failures cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.generation.actor import Worker
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.rollouts import function
from actors.generation.rollouts.function import open_function
from actors.generation.spec import GenerationSpec
from actors.reward.sample import Sample
from actors.runtime.context import Context
from actors.runtime.refusals import RunEnds
from bus import Bus, ledger
from bus.messages.base import unpack_ints
from bus.messages.samples import PrefixResume, RolloutDone, RolloutLost, SampleTask
from bus.topology import DEAD, PARKED, PREFIXES, PROMPTS, ROLLOUTS
from miles_async.launcher.try_hooks import HookTrial, problem_of
from tests.actors.house import messages, open_bus, put, running, until
from tests.engine.rollout_programs import PLUS, Talker, token_at
from tests.engine.scripted import ScriptedEngine, sample
from tests.engine.workers import serve

HERE = "tests.engine.rollout_functions"


def members(group: str, n: int = 2) -> list[SampleTask]:
    one = sample(group, 0, tokens=40)
    sampling = msgspec.structs.replace(one.sampling, stop_token_ids=(0,))
    tasks = [msgspec.structs.replace(one, sample_id=f"{group}/{i}", index=i, n_samples=n, sampling=sampling) for i in range(n)]
    return tasks


@asynccontextmanager
async def house(redis_url: str, run_name: str, folder: Path, name: str, **fields: Any) -> AsyncIterator[tuple[Bus, GenerationSpec]]:
    """A bus with a version served and two groups of two samples to make, of one prompt."""
    spec = GenerationSpec(
        engine="external", engine_url="scripted", rollout_function=f"{HERE}.{name}",
        program_values={"plus": PLUS, "folder": str(folder), "sglang_router_ip": "router"}, **fields,
    )  # fmt: skip
    async with open_bus(redis_url, run_name, groups=("g1", "g2")) as bus:
        await put(bus, PROMPTS, *members("g1"), *members("g2"))
        yield bus, spec


def body_on(engine: SGLangClient) -> Any:
    async def body(context: Context, spec: GenerationSpec) -> None:
        async with open_function(context, spec) as program:
            await serve(Worker(context, spec, None, program), context, engine)

    return body


def ended(*ids: str) -> Any:
    """Whether these samples have left."""

    async def look() -> bool:
        found = await messages(LOOKED[0], ROLLOUTS)
        return {sample_id(one) for one in found} >= set(ids)

    return look


def sample_id(one: RolloutDone | RolloutLost) -> str:
    return one.sample_id if isinstance(one, RolloutLost) else one.task.sample_id


LOOKED: list[Bus] = []
ALL = ("g1/0", "g1/1", "g2/0", "g2/1")


async def done(bus: Bus, *ids: str) -> dict[str, Any]:
    """Each of these samples once."""
    LOOKED[:] = [bus]
    await until(ended(*ids))
    found = await messages(bus, ROLLOUTS)
    assert sorted(map(sample_id, found)) == sorted(ids), "none twice"
    return {sample_id(one): one for one in found}


def agrees(rollout: Any) -> bool:
    """Two turns of the model with the tool's token between them, each token with the version that made it."""
    assert [(span.version, span.n) for span in rollout.response.spans] == [(1, 2), (-1, 1), (1, 3)]
    assert unpack_ints(rollout.response.tokens) == [token_at(2), 0, PLUS, *map(token_at, (5, 6, 7))]
    assert list(rollout.response.loss_mask) == [1, 1, 0, 1, 1, 1]
    return rollout.episode.reward == float(rollout.task.index)


@pytest.mark.parametrize("name", ["returns_all", "Newer", "raises_once", "dies_once"])
async def test_groups_that_it_returns_leave_as_made_each_sample_once(
    redis_url: str, run_name: str, tmp_path: Path, name: str
) -> None:
    """Whatever became of the function's first attempt. What that had made was never told to the accounts."""
    async with house(redis_url, run_name, tmp_path, name) as (bus, spec):
        async with running(bus, "w0", body_on(Talker()), spec) as context:
            found = await done(bus, *ALL)
        accounts = await ledger.read_accounts(bus)
        assert all(map(agrees, found.values())) and not await messages(bus, DEAD)
    assert (accounts.tokens_generated, accounts.tokens_dropped) == (20, {})
    assert context.counters.get("programs_failed", 0) == (name in ("raises_once", "dies_once"))


async def test_what_it_gives_back_comes_again_as_it_was(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "PATIENCE_S", 0.3)
    async with house(redis_url, run_name, tmp_path, "gives_back") as (bus, spec):
        async with running(bus, "w0", body_on(Talker()), spec):
            found = await done(bus, *ALL)
        accounts = await ledger.read_accounts(bus)
    assert all(map(agrees, found.values())) and (tmp_path / "came again with").read_text() == "2"
    assert (accounts.tokens_generated, accounts.tokens_dropped) == (22, {"discarded": 2}), "the turn that it began anew"


async def test_what_it_leaves_out_is_dropped_and_counted(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with house(redis_url, run_name, tmp_path, "leaves_out") as (bus, spec):
        async with running(bus, "w0", body_on(Talker()), spec) as context:
            found = await done(bus, *ALL)
        accounts = await ledger.read_accounts(bus)
        assert not await messages(bus, DEAD)
    lost = [one for one in found.values() if isinstance(one, RolloutLost)]
    assert {(one.group_id, one.reason) for one in lost} == {("g2", "cancelled")} and sum(one.tokens_made for one in lost) == 10
    assert accounts.tokens_generated == 20 and context.counters["function_groups_left_out"] == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "raised ValueError: no such tool for 2 groups at rollout_functions.py:"),
        ("foreign", "group 'g77', which data_source.get_samples did not give"),
        ("flat", "where a group belongs, a list of samples"),
        ("cut", "1 of the 2 samples of group g1; remove_sample takes one out of training"),
        ("retokenised", "3 tokens with loss_mask 1 are not what the engine answered"),
        ("of_text", "g1/0: no sample is made of tokens ["),
        ("unsendable", "returned samples that cannot be sent: UnicodeEncodeError"),
        ("unreadable", "returned what cannot be used: "),
        ("idle", "no group, and asked data_source for none"),
        ("nowhere", "Refused: hook 'tests.engine.rollout_functions.nowhere' not loaded"),
    ],
)
async def test_a_function_that_fails_again_and_again_ends_the_run_with_its_text(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    """Nothing is lost: all samples are still pending."""
    if name != "raises":
        monkeypatch.setattr(function, "MOST_FAILED", 1)
    ends: list[BaseException] = []

    async def body(context: Context, spec: GenerationSpec) -> None:
        try:
            await body_on(Talker())(context, spec)
        except ExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            ends.append(error)

    async def over() -> bool:
        return bool(ends)

    async with house(redis_url, run_name, tmp_path, name) as (bus, spec):
        async with running(bus, "w0", body, spec):
            await until(over)
        assert isinstance(ends[0], RunEnds) and said in str(ends[0])
        assert not await bus.length(ROLLOUTS) and not await bus.length(DEAD) and await bus.length(PROMPTS) == 4


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("returns_all", ""),
        ("raises", "raised ValueError: no such tool for 2 groups at rollout_functions.py:"),
        ("retokenised", "with loss_mask 1 are not what the engine answered"),
    ],
)
def test_it_is_tried_before_a_run_starts(tmp_path: Path, name: str, problem: str) -> None:
    values = {"plus": 7, "folder": str(tmp_path), "n_samples_per_prompt": 2}
    field, made = "rollout_function_path", Sample(sample_id="try/0", prompt="1+1=", response="2", label="2")
    ask = HookTrial(paths={field: f"{HERE}.{name}"}, sample=made, values=values)
    found = problem_of(field, ask.paths[field], ask)
    assert problem in found and bool(problem) == bool(found)


async def test_one_that_does_not_return_is_ended_and_its_groups_are_made_again(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async with house(redis_url, run_name, tmp_path, "hangs_once", program_deadline_s=2.0) as (bus, spec):
        async with running(bus, "w0", body_on(Talker()), spec):
            found = await done(bus, *ALL)
    assert all(map(agrees, found.values()))


async def test_fewer_are_given_when_no_more_come(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function asks for two groups, and one is all there is; of another only half has come."""
    monkeypatch.setattr(function, "PATIENCE_S", 0.3)
    monkeypatch.setattr(function, "PARTS_S", 0.6)
    spec = GenerationSpec(
        engine="external", engine_url="scripted", rollout_function=f"{HERE}.returns_all", program_values={"plus": PLUS}
    )
    async with open_bus(redis_url, run_name, groups=("g1", "g2")) as bus:
        await put(bus, PROMPTS, *members("g1"), *members("g2")[1:])
        async with running(bus, "w0", body_on(Talker()), spec):
            assert all(map(agrees, (await done(bus, "g1/0", "g1/1", "g2/1")).values()))


async def test_turns_that_it_aborts_end_with_what_they_have(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with house(redis_url, run_name, tmp_path, "aborts") as (bus, spec):
        async with running(bus, "w0", body_on(ScriptedEngine(pace_s=0.05)), spec):
            found = await done(bus, *ALL)
    assert all(0 < one.response.n_tokens < 40 for one in found.values())


async def test_a_sample_that_must_leave_takes_its_group_along_and_both_are_made_again(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    """The worker drains in mid-turn; a next one makes the groups from what was parked, and the first one's tokens are counted."""
    async with house(redis_url, run_name, tmp_path, "returns_all") as (bus, spec):
        slow = ScriptedEngine(pace_s=0.05)

        async def at_work() -> bool:
            return len(slow.starts) == 4

        async with running(bus, "w0", body_on(slow), spec):
            await until(at_work)
            await asyncio.sleep(0.3)
        parked = await messages(bus, PARKED)
        assert sorted(one.task.sample_id for one in parked) == sorted(ALL) and not await bus.length(ROLLOUTS)
        assert {one.response.n_tokens for one in parked} == {0}
        await put(bus, PREFIXES, *(PrefixResume(task=one.task, response=one.response) for one in parked))
        async with running(bus, "w1", body_on(Talker()), spec):
            found = await done(bus, *ALL)
        accounts = await ledger.read_accounts(bus)
    assert all(map(agrees, found.values()))
    assert accounts.tokens_generated == 20 + accounts.tokens_dropped["restarted"] > 20


async def test_killed_in_the_middle_of_the_function_nothing_is_lost_and_nothing_twice(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    """The worker's process is gone with the function's; the same worker, started again, takes up its pending entries."""
    async with house(redis_url, run_name, tmp_path, "returns_all") as (bus, spec):
        slow = ScriptedEngine(pace_s=0.05)

        class Killed(BaseException):
            pass

        async def dies() -> None:
            async def at_work() -> bool:
                return len(slow.starts) == 4

            await until(at_work)
            raise Killed

        async def body(context: Context, spec: GenerationSpec) -> None:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(body_on(slow)(context, spec))
                    tasks.create_task(dies())
            except BaseExceptionGroup as group:
                assert group.subgroup(Killed) is not None
                over.set()

        over = asyncio.Event()
        async with running(bus, "w0", body, spec):
            await asyncio.wait_for(over.wait(), 30)
        assert not await bus.length(ROLLOUTS) and not await bus.length(PARKED)
        async with running(bus, "w0", body_on(Talker()), spec):
            found = await done(bus, *ALL)
        accounts = await ledger.read_accounts(bus)
    assert all(map(agrees, found.values())) and accounts.tokens_generated == 20
