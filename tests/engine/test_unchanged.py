"""Orders that change no weights: said twice, or a new version of the files that the engine holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bus import Out
from bus.topology import ACTIVE, PROMPTS
from tests.actors.house import until
from tests.engine.models import Oracle
from tests.engine.workers import PROMPT, attached, events, half_way, order, rollouts_of, sample, told


async def test_files_that_the_engine_holds_are_not_loaded_again(
    redis_url: str, run_name: str, models: Callable[[str], tuple[Path, Path]]
) -> None:
    first, second = models("qwen3-endless")
    async with attached(redis_url, run_name, first) as (bus, worker):
        await bus.append([Out(ACTIVE, order(1, first))] * 3)
        await until(lambda: told(bus, "activated", 1))
        await bus.append([Out(PROMPTS, sample("g0")), Out(PROMPTS, sample("g1"))])
        await until(lambda: half_way(worker), deadline_s=30)
        await bus.append([Out(ACTIVE, order(1, first)), Out(ACTIVE, order(2, first))])
        await until(lambda: told(bus, "activated", 2))
        then = {name: running.n_tokens for name, running in worker._running.items()}

        async def further() -> bool:  # by two chunks
            return all(worker._running[name].n_tokens >= n + 16 for name, n in then.items())

        await until(further, deadline_s=30)
        await bus.append([Out(ACTIVE, order(3, second))])
        rollouts = await rollouts_of(bus, 2)
        await bus.append([Out(ACTIVE, order(4, first))])
        await until(lambda: told(bus, "activated", 4))
        done = [(e.data["version"], e.data["pause_s"] > 0) for e in await events(bus, "activated")]
        kept = [e.data["version"] for e in await events(bus, "activated") if e.data["requests"] == "kept"]
    assert done == [(1, True), (2, False), (3, True), (4, True)] and 2 in kept
    for rollout in rollouts:
        response = rollout.response
        spans = {span.version: span.n for span in response.spans}
        assert list(spans) == [1, 2, 3] and rollout.resumed_tokens == 0
        old = spans[1] + spans[2]
        tokens = np.frombuffer(response.tokens, np.int32).tolist()
        expected = Oracle(first).logprobs(PROMPT, tokens[:old])
        expected += Oracle(second).logprobs(PROMPT + tokens[:old], tokens[old:])
        assert np.frombuffer(response.logprobs, np.float32) == pytest.approx(expected, abs=1e-3)
