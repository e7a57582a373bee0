"""A rollout worker on a real bus and a real engine process: weight updates in mid-sample, engines that are refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from actors.generation.actor import Worker
from actors.generation.engine import Attached
from actors.generation.engines.sglang.server import SGLangServer
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from actors.runtime.run import Refused
from bus import Out
from bus.messages.active import PolicyActive, Seat, Send
from bus.messages.control import Event
from bus.messages.waits import Wait
from bus.topology import ACTIVE, PROMPTS
from tests.actors.house import open_bus, running, until
from tests.engine.conftest import engine_process
from tests.engine.models import Oracle
from tests.engine.workers import (
    PROMPT,
    TOKENS,
    at_work,
    attached,
    engines,
    events,
    half_way,
    order,
    rollouts_of,
    sample,
    told,
)


@pytest.mark.parametrize("exact", [True, False], ids=["chunks of one version", "chunks that could mix versions"])
async def test_an_update_in_mid_sample_has_an_exact_boundary(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]], exact: bool
) -> None:
    first, second = models("qwen3-endless")
    async with attached(redis_url, run_name, first) as (bus, worker):
        worker._link.kind = Attached(exact=exact, tp_size=1, exact_in_place=exact)
        await bus.append([Out(ACTIVE, order(1, first))])
        await bus.append([Out(PROMPTS, sample("g0")), Out(PROMPTS, sample("g1"))])
        await until(lambda: half_way(worker), deadline_s=30)
        await bus.append([Out(ACTIVE, order(2, second))])
        rollouts = await rollouts_of(bus, 2)
    for rollout in rollouts:
        response = rollout.response
        assert [span.version for span in response.spans] == [1, 2]
        old = response.spans[0].n
        tokens = np.frombuffer(response.tokens, np.int32).tolist()
        logprobs = np.frombuffer(response.logprobs, np.float32)
        expected = Oracle(first).logprobs(PROMPT, tokens[:old]) + Oracle(second).logprobs(PROMPT + tokens[:old], tokens[old:])
        assert np.abs(logprobs - np.array(expected)).max() < 1e-3
        assert len(tokens) == TOKENS


@pytest.mark.timeout(200)
async def test_an_update_of_an_engine_that_stands_still_ends_with_its_requests(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    first, second = models("qwen3-endless")
    spec = GenerationSpec(model_path=str(first), token_deadline_s=3.0, control_deadline_s=600.0)
    async with at_work(redis_url, run_name, spec, run_dir=str(tmp_path)) as (bus, worker):
        await until(lambda: told(bus, "joined", 1), deadline_s=60)
        await bus.append([Out(ACTIVE, order(1, first))])
        await bus.append([Out(PROMPTS, sample("g0")), Out(PROMPTS, sample("g1"))])
        await until(lambda: half_way(worker), deadline_s=30)
        [process] = engines(tmp_path)
        process.suspend()
        await bus.append([Out(ACTIVE, order(2, second))])
        await until(lambda: told(bus, "joined", 2), deadline_s=100)
        assert len(await events(bus, "engine stalled")) == 1


async def test_a_worker_that_starts_again_reads_of_the_log_what_is_for_it(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]]
) -> None:
    first, _ = models("qwen3")
    given = order(1, first)
    async with open_bus(redis_url, run_name) as bus:
        send = Send(version=given.version, transport="ipc", seats=(Seat(worker="generation-0"),))
        await bus.append([Out(ACTIVE, send), Out(ACTIVE, given), Out(ACTIVE, PolicyActive(version=given.version))])
    async with attached(redis_url, run_name, first) as (bus, _):
        await bus.append([Out(ACTIVE, given), Out(PROMPTS, sample("g0", tokens=4))])
        await rollouts_of(bus, 1)
        assert not await events(bus, "unreadable")


async def refusal(redis_url: str, run_name: str, spec: GenerationSpec, run_dir: Path) -> tuple[str, list[Event]]:
    """What a worker says that must not start, and what it told everyone."""
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def body(context: Context, given: GenerationSpec) -> None:
        with pytest.raises((Refused, ExceptionGroup)) as caught:
            await Worker(context, given).run()
        error: BaseException = caught.value
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, Refused)
        said.set_result(str(error))

    async with open_bus(redis_url, run_name) as bus, running(bus, "generation-0", body, spec, run_dir=str(run_dir)):
        text = await asyncio.wait_for(said, 30.0)
        return text, await events(bus, "engine boot refused")


async def test_a_flag_that_the_server_does_not_know_is_told_once_and_for_all(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"log": "launch_server.py: error: unrecognized arguments: --wrong", "exit": 2}]))
    monkeypatch.setenv("FAKE_SGLANG", str(plan))
    fake = Path(__file__).parents[1] / "actors" / "fake_sglang.py"
    spec = GenerationSpec(engine="sglang", server_command=(sys.executable, str(fake)), server_args={"wrong": True})
    text, told = await refusal(redis_url, run_name, spec, tmp_path)
    assert "unrecognized arguments: --wrong" in text and "Correct or leave out the flag." in text
    assert [event.text for event in told] == [text]
    assert len(list((tmp_path / "engines" / "generation-0").glob("boot.*"))) == 1


async def test_a_worker_says_that_its_engine_compiles_and_does_not_keep_a_run_that_ends(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start on a machine takes minutes. `the engine to boot` alone told nobody why, and a stop waited for it as long as for
    answers under way."""
    (plan := tmp_path / "plan.json").write_text("[]")
    (tmp_path / "plan.json.compiling").touch()
    monkeypatch.setenv("FAKE_SGLANG", str(plan))
    monkeypatch.setitem(SGLangServer.__init__.__kwdefaults__, "compiling_s", 0.05)
    fake = Path(__file__).parents[1] / "actors" / "fake_sglang.py"
    spec = GenerationSpec(engine="sglang", server_command=(sys.executable, str(fake)))

    async def body(context: Context, given: GenerationSpec) -> None:
        await Worker(context, given).run()

    async with open_bus(redis_url, run_name) as bus, running(bus, "generation-0", body, spec, run_dir=str(tmp_path)) as context:

        async def says() -> bool:
            vitals = context.vitals()
            return vitals.waits_for == Wait.BOOTING and "compiles kernels" in vitals.note

        await until(says)
        await until(lambda: events(bus, "engine compiles"))
        ours = {child.pid for child in psutil.Process().children(recursive=True)}
        [engine] = [p for p in psutil.process_iter(["cmdline"]) if p.pid in ours and str(fake) in (p.info["cmdline"] or ())]
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


async def test_an_engine_of_another_model_is_not_attached(
    redis_url: str, run_name: str, tmp_path: Path, models: Callable[[str], tuple[Path, Path]]
) -> None:
    first, _ = models("qwen3")
    ours = tmp_path / "ours"
    shutil.copytree(first, ours)
    config: dict[str, Any] = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with engine_process(first) as (url, _):
        spec = GenerationSpec(engine="external", engine_url=url, model_path=str(ours))
        text, _ = await refusal(redis_url, run_name, spec, tmp_path)
    assert "its num_hidden_layers is 2" in text and "has 9" in text
