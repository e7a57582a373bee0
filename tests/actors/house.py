"""A run's bus for room tests: real Redis, the room itself in this process, everything else played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from actors.runtime.context import Context
from bus import Bus, BusConfig, Commit, Out, Stream
from bus.knobs.live import LiveKnobs, publish_initial
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import OpenGroup
from bus.messages.samples import Response, RolloutDone, SampleTask, Sampling, Scored
from bus.messages.versions import VersionSpan
from tests.bus.suite.knobs import plain_kinds
from tests.declared import actor_of

KNOBS: dict[str, Any] = {
    "rollout_batch_size": 2,
    "global_batch_size": 4,
    "n_samples_per_prompt": 2,
    "num_steps_per_rollout": 1,
    "update_weights_interval": 1,
    "over_sampling_batch_size": 3,
    "max_weight_staleness": 1,
    "staleness_policy": "whole",
    "staleness_lookahead": 0,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_max_response_len": 8,
    "rollout_max_context_len": 0,
    "partial_rollout": True,
    "partial_save_tokens": 4,
    "max_tokens_per_slice": 0,
    "reward_timeout_s": 5.0,
    "reward_version": 0,
    "max_waves": 0,
    "dynamic_sampling_filter_path": "nonzero_std",
    "lr": 1e-3,
    "clip_grad": 1.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "kl_loss_coef": 0.0,
    "entropy_coef": 0.0,
    "tis_clip": 2.0,
    "sglang_server_concurrency": 8,
    "sglang_concurrency_min": 1,
    "sglang_concurrency_max": 0,
    "max_masked_fraction": 0.0,
    "tail_slots": 0,
    "tail_after_tokens": 0,
    "pause_generation_mode": "retract",
    "save_interval": 0,
    "eval_interval": 0,
    "eval_share": 0.25,
}


@asynccontextmanager
async def open_bus(url: str, run: str, **config: Any) -> AsyncIterator[Bus]:
    """A bus with readers and knobs in place. `groups`: names of groups that the run lists as open."""
    knobs, groups = config.pop("knobs", {}), config.pop("groups", ())
    async with Bus(BusConfig(url=url, run=run, **config)) as bus:
        await bus.make_readers()
        await publish_initial(bus, KNOBS | knobs, plain_kinds(KNOBS | knobs))
        opened = {g: msgspec.msgpack.encode(OpenGroup(group_id=g, prompt_id=g, n_samples=2)) for g in groups}
        await bus.commit(Commit(open_groups=opened))
        yield bus


@asynccontextmanager
async def running(
    bus: Bus, name: str, body: Callable[[Context, Any], Awaitable[None]], spec: Any, **spec_fields: Any
) -> AsyncIterator[Context]:
    """A room at work in this process until the block ends; its failure fails the test."""
    knobs = LiveKnobs(bus)
    await knobs.open()
    context = Context(actor_of(name=name, role=name, bus=bus.config, run_seed=7, **spec_fields), bus, knobs)
    context.state = "running"
    over = asyncio.Event()
    task = asyncio.create_task(body(context, spec))
    follow = asyncio.create_task(knobs.follow(over))
    try:
        yield context
    finally:
        context.draining.set()
        over.set()
        await asyncio.wait_for(asyncio.gather(task, follow), 30.0)


async def until(condition: Callable[[], Awaitable[Any]], *, deadline_s: float = 40.0) -> Any:
    """Poll until the condition holds; the last value, or a failure naming it."""
    async with asyncio.timeout(deadline_s):
        while not (value := await condition()):  # noqa: ASYNC110 - the test plays a person who looks again
            await asyncio.sleep(0.01)
    return value


async def messages(bus: Bus, stream: Stream) -> list[Any]:
    """Everything on a stream, decoded."""
    return [await bus.message(entry) for entry in await bus.scan_all(stream)]


def task(group: int, index: int, *, n: int = 2, label: str = "7") -> SampleTask:
    """A sample of group `group`."""
    return SampleTask(
        sample_id=f"g{group}/{index}",
        group_id=f"g{group}",
        index=index,
        n_samples=n,
        prompt_id=f"p{group}",
        prompt_tokens=pack_ints([1, 2, 3]),
        label=label,
        sampling=Sampling(max_new_tokens=8, stop_token_ids=(0,), seed=3),
    )


def rollout(group: int, index: int, *, n: int = 2, tokens: int = 3) -> RolloutDone:
    """A finished rollout."""
    response = Response(
        tokens=pack_ints(range(4, 4 + tokens)),
        logprobs=pack_floats([-0.5] * tokens),
        loss_mask=memoryview(b"\x01" * tokens),
        spans=(VersionSpan(1, 0, tokens),) if tokens else (),
    )
    return RolloutDone(task=task(group, index, n=n), response=response, finish="stop")


def scored(group: int, index: int, reward: float, *, n: int = 2, tokens: int = 3) -> Scored:
    """A scored rollout."""
    return Scored(rollout=rollout(group, index, n=n, tokens=tokens), reward=reward)


async def put(bus: Bus, stream: Stream, *items: Any) -> None:
    """Append messages as the room before would have."""
    await bus.append([Out(stream, item) for item in items])
