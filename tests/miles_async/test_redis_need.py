"""What a run is said to need of Redis, against what a real one takes for such samples."""

from __future__ import annotations

import msgspec

from bus import Bus, BusConfig, Out
from bus.client import connect
from bus.messages.groups import MOST_LIVES
from bus.messages.samples import Scored
from bus.server import EmbeddedRedis
from bus.topology import SCORED, VERDICTS
from miles_async.settings.load import settings_from
from miles_async.settings.redis_need import LIFE_BYTES, LIVES_TOLD, VERDICTS_KEPT, memory_note, redis_need
from tests.bus.suite.messages import a_rollout, a_task
from tests.wire.examples_2 import LIFE

PROMPT, RESPONSE = 500, 4_000


def settings(**rollout: int):  # type: ignore[no-untyped-def]
    lengths = {"rollout_max_prompt_len": PROMPT, "rollout_max_response_len": RESPONSE}
    sizes = {"rollout_batch_size": 16, "n_samples_per_prompt": 8, "max_weight_staleness": 1, "num_rollout": 100}
    own = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "rm_type": "exact_match", "use_tis": True}
    own |= {"bus_url": "redis://127.0.0.1:1", "save_interval": 3}
    return settings_from(**{**own, **sizes, **lengths, **rollout}).flat


async def test_what_is_said_bounds_what_redis_takes_and_not_by_far(private_redis: EmbeddedRedis, run_name: str) -> None:
    need = redis_need(settings())
    of_open, of_trained = need.shares[:2]
    assert (of_open.n, of_trained.n) == (2 * 16 * 8, 3 * 16 * 8)
    async with connect(private_redis.url) as client, Bus(BusConfig(url=private_redis.url, run=run_name)) as bus:
        await bus.append([Out(SCORED, Scored(rollout=a_rollout(a_task(), RESPONSE), reward=1.0))])  # what the first one costs once
        # Its data, without what waits for a busy disk or for clients.
        before = (await client.info("memory"))["used_memory_dataset"]
        for n in range(of_open.n):
            rollout = a_rollout(a_task(n % 8, f"g{n:07d}", n_samples=8, prompt_tokens=PROMPT), RESPONSE)
            await bus.append([Out(SCORED, Scored(rollout=rollout, reward=1.0))])
        taken = (await client.info("memory"))["used_memory_dataset"] - before
    assert 0.75 < taken / of_open.n_bytes < 1.25, "SLACK is for more than this"


def test_a_redis_with_less_is_named_with_what_takes_it_and_one_without_a_limit_is_not() -> None:
    need = redis_need(settings())
    note = memory_note(need, need.n_bytes - 1, "redis://h")
    assert "256 open samples" in note and "384 samples that are trained" in note and "--save-interval" in note
    assert memory_note(need, need.n_bytes, "redis://h") == memory_note(need, 0, "redis://h") == ""
    longer = redis_need(settings(rollout_max_context_len=20_000))
    assert longer.shares[0].each > 4 * need.shares[0].each, "turns and tool calls fill the context"


def test_what_is_told_of_dropped_samples_is_counted_as_it_is_kept() -> None:
    assert (VERDICTS.cap, MOST_LIVES) == (VERDICTS_KEPT, LIVES_TOLD)
    assert 100 < len(msgspec.msgpack.encode(LIFE)) + len("generation-12") < LIFE_BYTES
