"""A change of live settings that the backend refuses is undone, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from actors.runtime.context import Context
from actors.trainer.backend import BatchRefused, StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.tuned import TunedSteps
from bus import Bus
from bus.knobs import values_at
from bus.knobs.live import LiveKnobs, propose, publish_initial, read_history
from bus.knobs.plans import plan
from bus.messages.control import Kind
from bus.topology import EVENTS
from tests.actors.house import messages, open_bus
from tests.declared import actor_of

HOOK = {"custom_advantage_function_path": "tests.trainer.hook_samples.narrow_only"}


@asynccontextmanager
async def following(bus: Bus, *, epoch: int) -> AsyncIterator[Context]:
    """A trainer's surroundings once it has heard of an epoch."""
    knobs = LiveKnobs(bus)
    await knobs.open()
    assert knobs.snapshot().epoch == epoch
    try:
        yield Context(actor_of(name="trainer", role="trainer", bus=bus.config), bus, knobs)
    finally:
        await knobs.close()


async def in_thread(call: Callable[..., object], *args: object) -> object:
    return await asyncio.to_thread(call, *args)


async def test_a_refused_change_is_undone_and_the_step_is_done(
    redis_url: str,
    run_name: str,
    make_backend: Callable[..., TorchBackend],
    make_batch: Callable[..., StepBatch],
) -> None:
    backend = make_backend(objective=HOOK)
    async with open_bus(redis_url, run_name) as bus:
        await propose(bus, {"eps_clip": 0.3, "lr": 0.5}, author="me")
        await propose(bus, {"eps_clip": 0.9, "clip_grad": 2.0}, author="me")
        async with following(bus, epoch=2) as context:
            steps = TunedSteps(context, backend, in_thread)
            knobs = context.knobs.live | {"max_weight_staleness": 1}
            result = await steps.train(make_batch(1, **knobs), 2)
            assert result.trained_tokens and steps.used == (knobs | {"eps_clip": 0.3, "clip_grad": 1.0}, 1)
        last = (await read_history(bus))[-1]
        assert (last.epoch, last.values, last.author) == (3, {"eps_clip": 0.3, "clip_grad": 1.0}, "trainer")
        [event] = await messages(bus, EVENTS)
        assert event.kind == "knobs refused" and "eps_clip = 0.9 is not for this run" in event.text


async def test_what_others_have_changed_meanwhile_is_not_undone(
    redis_url: str,
    run_name: str,
    make_backend: Callable[..., TorchBackend],
    make_batch: Callable[..., StepBatch],
) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await propose(bus, {"eps_clip": 0.9, "clip_grad": 2.0}, author="me")
        await propose(bus, {"clip_grad": 3.0}, author="me")
        async with following(bus, epoch=2) as context:
            knobs = context.knobs.live | {"max_weight_staleness": 1, "clip_grad": 2.0}
            await TunedSteps(context, make_backend(objective=HOOK), in_thread).train(make_batch(1, **knobs), 1)
        last = (await read_history(bus))[-1]
        assert (last.epoch, last.values, last.author) == (3, {"eps_clip": 0.2}, "trainer")


async def test_a_batch_that_is_refused_under_all_settings_leaves_them_alone(
    redis_url: str, run_name: str, make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    backend = make_backend(objective=HOOK)
    async with open_bus(redis_url, run_name, knobs={"eps_clip": 0.8}) as bus:
        await propose(bus, {"eps_clip": 0.9}, author="me")
        async with following(bus, epoch=1) as context:
            with pytest.raises(BatchRefused, match=r"eps_clip = 0\.9"):
                await TunedSteps(context, backend, in_thread).train(make_batch(1, **context.knobs.live), 1)
        assert len(await read_history(bus)) == 2 and not await messages(bus, EVENTS)


async def test_a_plan_holds_from_exactly_its_step_and_one_that_cannot_be_is_given_up_and_told(
    redis_url: str, run_name: str, make_backend: Callable[..., TorchBackend]
) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await plan(bus, {"lr": 0.5}, at_step=3, author="me")
        await plan(bus, {"eps_clip": 0.7}, at_step=3, author="me")
        kinds = values_at(await read_history(bus), 0).kinds
        narrower = {**kinds, "eps_clip": Kind(type="float", lt=0.5)}  # another release, after a restart
        await publish_initial(bus, values_at(await read_history(bus), 0).values, narrower)
        async with following(bus, epoch=3) as context:
            over = asyncio.Event()
            follow = asyncio.create_task(context.live_knobs.follow(over))
            steps = TunedSteps(context, make_backend(objective=HOOK), in_thread)
            before = context.knobs.lr
            await steps.begin(2)
            assert (context.knobs.lr, context.knobs.epoch) == (before, 3)
            await steps.begin(3)
            assert (context.knobs.lr, context.knobs.eps_clip, context.knobs.epoch) == (0.5, 0.2, 5)
            await steps.begin(2)  # the step before is made again, from a checkpoint
            assert context.knobs.lr == before
            await steps.begin(3)
            assert context.knobs.lr == 0.5
            over.set()
            await follow
        assert len(await read_history(bus)) == 6, "a plan is carried out once"
        [event] = await messages(bus, EVENTS)
        assert (event.kind, event.level) == ("knobs refused", "error")
        assert "planned for step 3 as epoch 2; given up: eps_clip=0.7" in event.text
