"""What every kind of engine must do, asked through its record: of the embedded one, and of one of a user's own (own_engine.py)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from actors.generation.engine import BootedEngine, Engine, EngineUnavailable, GenerateRequest, RequestRefused
from actors.generation.engines.records import engine_kind
from actors.generation.spec import GenerationSpec
from bus import Out
from bus.messages.samples import RolloutDone
from bus.topology import ACTIVE, PROMPTS
from tests.actors.house import until
from tests.engine.models import Oracle
from tests.engine.workers import PROMPT, at_work, order, rollouts_of, sample

OWN = "tests.engine.own_engine:KIND"
KINDS = ("embedded", OWN)
N = 6


class Booted(NamedTuple):
    """One engine of a kind: `first` is what it was booted with, `second` fits it."""

    engine: Engine
    server: BootedEngine
    first: Path
    second: Path


@pytest.fixture(params=KINDS)
async def booted(
    request: pytest.FixtureRequest, tmp_path: Path, models: Callable[[str], tuple[Path, Path]]
) -> AsyncIterator[Booted]:
    first, second = models("qwen3-endless")
    spec = GenerationSpec(engine=request.param, model_path=str(first), control_deadline_s=30.0)
    connect, server = engine_kind(spec.engine).open(None, spec, tmp_path / "engine")  # type: ignore[arg-type]  # asked by none
    assert connect is not None and server is not None
    try:
        engine = connect(await server.start(), server.inside)
        found = await engine.look(own=True, model_path=str(first), routed=False)
        assert found.exact and found.tp_size == 1
        yield Booted(engine, server, first, second)
        await engine.close()
    finally:
        await server.stop()
        assert not server.alive


def asked(rid: str, n: int = N, **more: float) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=PROMPT, max_new_tokens=n, temperature=more.get("temperature", 0.0), ignore_eos=True)


async def tokens(engine: Engine, request: GenerateRequest) -> tuple[list[int], list[float], set[str], str | None]:
    """All of one request: tokens, their log-probs, the versions that made them, how it ended."""
    ids, logprobs, versions, finish = list[int](), list[float](), set[str](), None
    async for chunk in engine.generate(request):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        versions |= {chunk.weight_version} if len(chunk.token_ids) else set()
        finish = chunk.finish
    return ids, logprobs, versions, finish


async def test_tokens_and_their_logprobs_are_the_models(booted: Booted) -> None:
    ids, logprobs, _, finish = await tokens(booted.engine, asked("a"))
    oracle = Oracle(booted.first)
    assert ids == oracle.greedy(PROMPT, N) and finish == "length"
    assert logprobs == pytest.approx(oracle.logprobs(PROMPT, ids), abs=1e-4)


async def test_an_update_between_pause_and_resume_is_served_and_named(booted: Booted) -> None:
    engine = booted.engine
    await engine.pause("retract")
    await engine.update_weights_from_disk(str(booted.second), "7")
    await engine.resume()
    ids, _, versions, _ = await tokens(engine, asked("a"))
    assert ids == Oracle(booted.second).greedy(PROMPT, N) and versions == {"7"}
    await engine.set_version("8")
    assert (await tokens(engine, asked("b")))[::2] == (ids, {"8"}), "the same weights by another name"


async def test_files_that_do_not_fit_change_nothing(booted: Booted, tmp_path: Path) -> None:
    engine, empty = booted.engine, tmp_path / "empty"
    shutil.copytree(booted.second, empty)
    (empty / "model.safetensors").unlink()
    await engine.pause("retract")
    with pytest.raises(RequestRefused):
        await engine.update_weights_from_disk(str(empty), "7")
    await engine.resume()
    ids, _, versions, _ = await tokens(engine, asked("a"))
    assert ids == Oracle(booted.first).greedy(PROMPT, N) and "7" not in versions


async def test_a_paused_engine_makes_no_token_and_goes_on_where_it_was(booted: Booted) -> None:
    engine = booted.engine
    await engine.pause("retract")
    waiting = asyncio.create_task(tokens(engine, asked("a")))
    await asyncio.wait((waiting,), timeout=0.3)
    assert not waiting.done()
    await engine.resume()
    assert (await waiting)[0] == Oracle(booted.first).greedy(PROMPT, N)


@pytest.mark.parametrize("everyone", [True, False])
async def test_an_aborted_request_ends_with_what_it_has(booted: Booted, everyone: bool) -> None:
    engine, begun = booted.engine, asyncio.Event()
    ids, finish = list[int](), None

    async def run() -> None:
        nonlocal finish
        async for chunk in engine.generate(asked("a", 3000)):
            ids.extend(chunk.token_ids)
            finish = chunk.finish
            begun.set()

    running = asyncio.create_task(run())
    await asyncio.wait_for(begun.wait(), 30)
    await engine.abort("nobody")
    assert not running.done()
    await (engine.abort_all() if everyone else engine.abort("a"))
    await asyncio.wait_for(running, 30)
    assert finish == "abort" and 0 < len(ids) < 3000


async def test_what_is_given_up_or_dies_is_told_as_the_engines_failure(booted: Booted) -> None:
    engine = booted.engine
    stream = engine.generate(asked("a", 3000))
    await anext(stream)
    await booted.server.stop()
    finish = None
    try:
        async for chunk in stream:
            finish = chunk.finish
    except EngineUnavailable:
        finish = "abort"  # without a last word
    assert finish == "abort" and not booted.server.alive
    with pytest.raises(EngineUnavailable):
        await tokens(engine, asked("b"))
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await engine.resume()


async def test_how_full_it_is_may_be_unknown_and_is_never_an_error(booted: Booted) -> None:
    load = await booted.engine.load()
    assert load.running in (None, 0) and load.waiting in (None, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_serves_versions_on_an_engine_of_any_kind(
    redis_url: str, run_name: str, tmp_path: Path, models: Callable[[str], tuple[Path, Path]], kind: str
) -> None:
    first, second = models("qwen3-endless")
    spec = GenerationSpec(engine=kind, model_path=str(first))
    async with at_work(redis_url, run_name, spec, run_dir=str(tmp_path)) as (bus, worker):
        for number, folder in ((1, first), (2, second)):

            async def served(number: int = number) -> bool:
                return worker._link.serving is not None and worker._link.serving.id == number

            await bus.append([Out(ACTIVE, order(number, folder))])
            await until(served, deadline_s=60)
            await bus.append([Out(PROMPTS, sample(f"g{number}", 5))])
            rollouts: list[RolloutDone] = await rollouts_of(bus, number)
    assert [[span.version for span in rollout.response.spans] for rollout in rollouts] == [[1], [2]]
    assert [rollout.response.n_tokens for rollout in rollouts] == [5, 5]
