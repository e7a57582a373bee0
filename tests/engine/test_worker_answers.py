"""A worker on an engine whose answers are none, and a sample whose stream broke off behind its last token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from actors.generation.actor import Worker
from actors.generation.engine import AnswerRefused, Chunk, GenerateRequest
from actors.generation.sample import start
from actors.generation.spec import GenerationSpec
from actors.runtime.context import Context
from actors.runtime.run import RunEnds
from bus.messages.samples import RolloutDone, RolloutLost, SampleTask, Sampling
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, DEAD, PROMPTS, ROLLOUTS
from tests.actors.house import messages, open_bus, put, running, until
from tests.engine.scripted import ScriptedEngine
from tests.engine.test_client import LENGTH, PAIRS, event, served
from tests.engine.workers import at_work, order, sample

TOKENS = len(PAIRS)


async def test_an_answer_that_is_none_is_refused_and_counted_and_the_engine_goes_on(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async def generate(http: web.Request) -> web.StreamResponse:
        asked = await http.json()
        pairs = [[7.5, 11, None], *PAIRS[1:]] if "bad" in asked["rid"] else PAIRS
        return web.Response(body=event(TOKENS, pairs, finish=LENGTH), content_type="text/event-stream")

    async def said(http: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": "1", "internal_states": [{}]})

    async def done(http: web.Request) -> web.Response:
        return web.json_response({})

    posts = ("pause_generation", "continue_generation", "update_weights_from_disk", "flush_cache", "abort_request")
    gets = {"get_health": said, "get_model_info": said, "get_server_info": said}
    async with served(generate=generate, **dict.fromkeys(posts, done), **gets) as url:
        spec = GenerationSpec(engine="external", engine_url=url)
        async with at_work(redis_url, run_name, spec, groups=("bad", "good")) as (bus, worker):
            await put(bus, ACTIVE, order(1, tmp_path))
            await put(bus, PROMPTS, sample("bad", TOKENS), sample("good", TOKENS))

            async def both() -> bool:
                return await bus.length(ROLLOUTS) == 2

            await until(both)
            lost, good = sorted(await messages(bus, ROLLOUTS), key=lambda m: isinstance(m, RolloutDone))
            assert isinstance(lost, RolloutLost) and (lost.sample_id, lost.reason) == ("bad/0", "poison")
            assert isinstance(good, RolloutDone) and good.response.n_tokens == TOKENS
            [letter] = await messages(bus, DEAD)
            assert "log-probability 7.5" in letter.error
            assert worker._context.counters["answers_refused"] == 1


class Foreign(ScriptedEngine):
    """An engine of a larger vocabulary than the worker was told of."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        raise AnswerRefused("token id 99 is outside the vocabulary of 64")
        yield


async def test_an_engine_whose_every_answer_is_refused_ends_the_run_before_it_burns_the_prompts(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    ended: list[BaseException] = []

    async def body(context: Context, spec: GenerationSpec) -> None:
        worker = Worker(context, spec)
        worker._link._connect = lambda url, inside: Foreign()
        with pytest.raises(ExceptionGroup) as caught:
            await worker.run()
        error: BaseException = caught.value
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        ended.append(error)

    async def over() -> bool:
        return bool(ended)

    groups = [f"g{i}" for i in range(100)]
    async with open_bus(redis_url, run_name, groups=groups) as bus:
        async with running(bus, "w0", body, GenerationSpec(engine="external", engine_url="scripted")):
            await put(bus, ACTIVE, order(1, tmp_path))
            await put(bus, PROMPTS, *map(sample, groups))
            await until(over)
        [error] = ended
        assert isinstance(error, RunEnds) and "token id 99" in str(error)
        assert await bus.length(DEAD) < 40 and await bus.length(PROMPTS) > 60


@pytest.mark.parametrize("finish", [None, "stop"])
def test_a_sample_ends_at_its_stop_token_also_when_the_stream_broke_off_behind_it(finish: str | None) -> None:
    task = SampleTask(
        sample_id="g/0", group_id="g", index=0, n_samples=1, prompt_id="p", prompt_tokens=memoryview(b""),
        sampling=Sampling(max_new_tokens=9, stop_token_ids=(3,)),
    )  # fmt: skip
    running = start(task, [], mask_prefix=False)
    versions = {"1": PolicyVersion(id=1, step=0)}
    turn = running.open(0, [])
    running.take(turn, Chunk([3, 5], [-1.0, -1.0], "1"), versions)
    assert not turn.ended(9, (3,))
    running.take(turn, Chunk([3], [-1.0], "1", finish), versions)
    assert turn.ended(9, (3,)) and turn.finish == "stop"
