"""What a process keeps does not grow with what has passed it. Counted in Python's blocks of memory and in bytes, never in time."""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from actors.filter.actor import FilterSpec, run
from actors.generation.engines.embedded.config import read_config
from actors.generation.engines.embedded.model import Decoder
from actors.generation.engines.embedded.weights import load_weights
from actors.recorder.feed import Feed
from bus import Bus, Commit, Out
from bus.messages.control import EvalDone
from bus.messages.groups import OpenGroup
from bus.messages.policy import StepDone
from bus.messages.versions import PolicyVersion
from bus.streams import wire
from bus.topology import EVAL_RESULTS, GROUPS, POLICY, SCORED, VERDICTS
from tests.actors.house import open_bus, put, running, scored, until

GROUPS_AT_ONCE = 100


def blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


async def pass_groups(bus: Bus, begin: int) -> None:
    """GROUPS_AT_ONCE groups and a step go through the filter; the trainer takes them."""
    numbers = range(begin, begin + GROUPS_AT_ONCE)
    opened = {f"g{g}": msgspec.msgpack.encode(OpenGroup(group_id=f"g{g}", prompt_id=f"p{g}", n_samples=2)) for g in numbers}
    await bus.commit(Commit(open_groups=opened))
    version = PolicyVersion(id=begin, step=begin)
    await put(bus, POLICY, StepDone(step=begin, version=version, trained_on=version, groups=()))
    await put(bus, SCORED, *(scored(g, i, float(i)) for g in numbers for i in (0, 1)))

    async def judged() -> bool:
        return await bus.length(SCORED) == 0

    await until(judged)
    for stream in (GROUPS, VERDICTS, POLICY):
        await bus.link.run("XTRIM", bus.keys.stream(stream.name), "MAXLEN", 0)


async def test_a_room_keeps_nothing_of_the_groups_that_passed_it(redis_url: str, run_name: str) -> None:
    """Filter, reader, log and connection, after caches have filled."""
    async with open_bus(redis_url, run_name) as bus, running(bus, "filter", run, FilterSpec()):
        rounds = iter(range(1, 10_000, GROUPS_AT_ONCE))
        found = []
        for _ in range(4):
            for _ in range(4):
                await pass_groups(bus, next(rounds))
            wire._WORDS.clear()  # a cache of 512 words at most, more or less full
            found.append(blocks())
        grown = min(after - before for before, after in pairwise(found[1:]))  # noise adds to one, what is kept to each
        assert grown < 200, f"{found}: one object kept of each sample would be 800"


METRICS = {f"train/some_metric_of_a_step/{n:02d}": n / 7 for n in range(90)}


async def test_a_step_on_record_takes_a_kilobyte_and_a_history_has_a_bound(redis_url: str, run_name: str) -> None:
    """The launcher, the recorder and every view hold a history that is fed from the bus."""
    async with open_bus(redis_url, run_name) as bus:
        feed = Feed(bus, streams=(POLICY,))
        tracemalloc.start()
        try:
            sizes = []
            for first in range(1, 1200, 300):
                steps = [(n, PolicyVersion(id=n, step=n)) for n in range(first, first + 300)]
                await put(
                    bus,
                    POLICY,
                    *(StepDone(step=n, version=v, trained_on=v, groups=(), metrics=METRICS) for n, v in steps),
                )
                while (await feed.read(0.0))[1]:
                    continue
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
            await feed.close()
        assert len(feed.history.steps) == 1200 and dict(feed.history.steps[-1].metrics) == METRICS
        assert (sizes[-1] - sizes[0]) / 900 < 1500, "bytes a step"


async def test_results_of_evaluations_do_not_stay_on_the_bus_for_ever(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        for step in range(1, 4000, 250):
            done = (EvalDone(name="held_out", version=n, step=n, metrics={}, n_samples=8) for n in range(step, step + 250))
            await bus.append([Out(EVAL_RESULTS, one) for one in done])
        assert EVAL_RESULTS.cap <= await bus.length(EVAL_RESULTS) < 1.5 * EVAL_RESULTS.cap
        [newest] = await bus.last(EVAL_RESULTS)
        assert (await bus.message(newest)).step == 4000


def test_loading_a_version_leaves_nothing_in_the_engine(tmp_path: Path) -> None:
    """safetensors 0.8.0 loses two objects with each tensor that it gives."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
    }
    config = {"model_type": "qwen3", "vocab_size": 16, "head_dim": 8, "max_position_embeddings": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = Decoder(read_config(tmp_path))
    tensors = {name: torch.full(slot.shape, n, dtype=torch.bfloat16) for n, (name, slot) in enumerate(decoder.slots.items())}
    save_file(tensors, tmp_path / "model.safetensors")
    found = []
    for _ in range(3):
        for _ in range(50):
            load_weights(decoder, tmp_path)
        found.append(blocks())
    assert found[2] - found[1] < 50, found
    assert all(bool((slot.view == n).all()) for n, slot in enumerate(decoder.slots.values()))
