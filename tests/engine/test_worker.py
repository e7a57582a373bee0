"""A generation worker on a real bus and a real engine process: weight updates in mid-sample, engines that are refused."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.generation.actor import Worker
from actors.generation.attach import Attached
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from actors.runtime.run import Refused
from bus import Bus, Out
from bus.messages.base import pack_ints
from bus.messages.control import Event
from bus.messages.policy import Activate, WeightManifest
from bus.messages.samples import RolloutDone, SampleTask, Sampling
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, EVENTS, PROMPTS, ROLLOUTS
from tests.actors.house import messages, open_bus, running, until
from tests.engine.conftest import engine_process
from tests.engine.models import Oracle

PROMPT = [7, 12, 40, 3]
TOKENS = 1500


def sample(name: str, tokens: int = TOKENS) -> SampleTask:
    return SampleTask(
        sample_id=f"{name}/0",
        group_id=name,
        index=0,
        n_samples=1,
        prompt_id=name,
        prompt_tokens=pack_ints(PROMPT),
        sampling=Sampling(max_new_tokens=tokens, seed=3, top_k=63),
    )


def order(number: int, directory: Path) -> Activate:
    manifest = WeightManifest(path=str(directory))
    return Activate(version=PolicyVersion(id=number, step=number), manifest=manifest, mode="retract")


async def events(bus: Bus, kind: str) -> list[Event]:
    return [m for m in await messages(bus, EVENTS) if isinstance(m, Event) and m.kind == kind]


@pytest.mark.parametrize("exact", [True, False], ids=["chunks of one version", "chunks that could mix versions"])
async def test_an_update_in_mid_sample_has_an_exact_boundary(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]], exact: bool
) -> None:
    first, second = models("qwen3")
    with engine_process(first, "--stream-interval", "8") as (url, _):
        spec = GenerationSpec(engine="external", engine_url=url, model_path=str(first))
        knobs = {"partial_save_tokens": 1 << 30}
        made: list[Worker] = []

        async def body(context: Context, given: GenerationSpec) -> None:
            made.append(Worker(context, given))
            await made[0].run()

        async with open_bus(redis_url, run_name, knobs=knobs) as bus, running(bus, "generation-0", body, spec):
            await until(lambda: events(bus, "joined"))
            made[0]._link.kind = Attached(exact=exact, tp_size=1, exact_in_place=exact)
            await bus.append([Out(ACTIVE, order(1, first))])
            await bus.append([Out(PROMPTS, sample("g0")), Out(PROMPTS, sample("g1"))])
            await until(lambda: _progress(made[0]), deadline_s=30)
            await bus.append([Out(ACTIVE, order(2, second))])
            await until(lambda: _length(bus, 2), deadline_s=40)
            rollouts = [m for m in await messages(bus, ROLLOUTS) if isinstance(m, RolloutDone)]
    for rollout in rollouts:
        response = rollout.response
        assert [span.version for span in response.spans] == [1, 2]
        old = response.spans[0].n
        tokens = np.frombuffer(response.tokens, np.int32).tolist()
        logprobs = np.frombuffer(response.logprobs, np.float32)
        expected = Oracle(first).logprobs(PROMPT, tokens[:old]) + Oracle(second).logprobs(
            PROMPT + tokens[:old], tokens[old:]
        )
        assert np.abs(logprobs - np.array(expected)).max() < 1e-3
        assert len(tokens) == TOKENS or rollout.finish == "stop"


async def _progress(worker: Worker) -> bool:
    return len(worker._running) == 2 and all(0 < r.n_tokens < TOKENS // 2 for r in worker._running.values())


async def _length(bus: Bus, n: int) -> bool:
    return await bus.length(ROLLOUTS) == n


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
