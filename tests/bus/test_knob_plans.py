"""Plans on the knobs stream: what holds from a step on, for the trainer exactly, and what may not be planned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bus import Bus, BusConfig
from bus.errors import InvariantBroken, KnobRejected
from bus.knobs import propose, values_at
from bus.knobs.live import LiveKnobs, fold, pending, publish_initial, read_history
from bus.knobs.plans import cancel, carry_out, plan
from bus.messages.control import KnobPatch
from bus.topology import KNOBS as STREAM
from tests.bus.suite.knobs import plain_kinds, plain_knobs


@pytest_asyncio.fixture
async def bus(redis_url: str, run_name: str) -> AsyncIterator[Bus]:
    async with Bus(BusConfig(url=redis_url, run=run_name, deadline_s=10)) as bus:
        await publish_initial(bus, plain_knobs(over_sampling_batch_size=8), plain_kinds())
        yield bus


def covers(values: Mapping[str, Any], patch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rule between two settings."""
    after = {**values, **patch}
    if after["over_sampling_batch_size"] < after["rollout_batch_size"]:
        raise KnobRejected(knob="over_sampling_batch_size", value=0, rule="too small", remedy="Raise it.")
    return patch


async def test_a_plan_changes_nothing_until_its_step_and_then_holds_for_all(bus: Bus) -> None:
    made = await plan(bus, {"lr": 0.5}, at_step=7, author="me", reason="warm")
    history = await read_history(bus)
    assert values_at(history, made.epoch).lr == 1e-3 and pending(history) == [made]
    due = await carry_out(bus, made, step=7)
    history = await read_history(bus)
    assert (due.values, due.at_step, due.plan) == ({"lr": 0.5}, 7, made.epoch)
    assert (due.author, due.reason) == ("me", "planned for step 7 as epoch 1: warm")
    assert values_at(history, due.epoch).lr == 0.5 and not pending(history)
    with pytest.raises(KnobRejected, match="no plan of this epoch waits; plans: none"):
        await carry_out(bus, made, step=8)


async def test_a_step_made_again_has_the_values_it_had(bus: Bus) -> None:
    made = await plan(bus, {"lr": 0.5}, at_step=7, author="me")
    due = await carry_out(bus, made, step=7)
    await propose(bus, {"clip_grad": 0.5}, author="me")
    trainer, other = LiveKnobs(bus), LiveKnobs(bus)
    for knobs in (trainer, other):
        await knobs.open(deadline_s=5)
    await trainer.reach(due.epoch)
    trainer.step = 5  # restored to a checkpoint before the plan's step
    assert (trainer.snapshot().lr, trainer.snapshot().clip_grad) == (1e-3, 0.5)
    trainer.step = 7
    assert trainer.snapshot().lr == other.snapshot().lr == 0.5
    await trainer.close()
    await other.close()


async def test_who_waits_for_an_epoch_is_woken_by_it(bus: Bus) -> None:
    knobs, over = LiveKnobs(bus), asyncio.Event()
    await knobs.open(deadline_s=5)
    following = asyncio.create_task(knobs.follow(over))
    reached = asyncio.create_task(knobs.reach(1))
    await propose(bus, {"lr": 0.5}, author="me")
    await asyncio.wait_for(reached, 10)
    assert knobs.snapshot().lr == 0.5
    over.set()
    await following


async def test_a_plan_is_held_to_the_rules_and_holds_others_to_them(bus: Bus) -> None:
    with pytest.raises(KnobRejected, match="too small"):
        await plan(bus, {"rollout_batch_size": 9}, at_step=5, author="me", check=covers)
    wider = await plan(bus, {"over_sampling_batch_size": 16}, at_step=5, author="me", check=covers)
    larger = await plan(bus, {"rollout_batch_size": 9}, at_step=6, author="me", check=covers)
    before = await bus.scan_all(STREAM)
    with pytest.raises(KnobRejected, match=r"^--cancel=1 refused: the plan for step 6 \(epoch 2\) would then be refused"):
        await cancel(bus, wider.epoch, author="me", check=covers)
    with pytest.raises(KnobRejected, match=r"miles-async tune --cancel 2"):
        await plan(bus, {"over_sampling_batch_size": 8}, at_step=5, author="me", check=covers)
    with pytest.raises(KnobRejected, match="it has this value already"):
        await plan(bus, {"rollout_batch_size": 9}, at_step=8, author="me", check=covers)
    for bad in ({"lr": "fast"}, {"nonsense": 1}, {}):
        with pytest.raises(KnobRejected):
            await plan(bus, bad, at_step=5, author="me")
    assert await bus.scan_all(STREAM) == before
    await cancel(bus, larger.epoch, author="me", check=covers)
    await cancel(bus, wider.epoch, author="me", check=covers)
    assert not pending(await read_history(bus))
    with pytest.raises(KnobRejected, match="no plan of this epoch waits"):
        await cancel(bus, wider.epoch, author="me")


async def test_an_ordinary_patch_may_not_make_a_plan_impossible(bus: Bus) -> None:
    await plan(bus, {"rollout_batch_size": 7}, at_step=6, author="me", check=covers)
    with pytest.raises(KnobRejected, match=r"^over_sampling_batch_size=6 refused: the plan for step 6 \(epoch 1\) would then be"):
        await propose(bus, {"lr": 0.5, "over_sampling_batch_size": 6}, author="me", check=covers)
    await propose(bus, {"over_sampling_batch_size": 7}, author="me", check=covers)


def test_a_plan_of_values_that_are_none_is_no_message_of_ours() -> None:
    first = fold(None, KnobPatch(epoch=0, values=plain_knobs(), kinds=plain_kinds()))
    with pytest.raises(KnobRejected):
        fold(first, KnobPatch(epoch=1, values={}, planned={"lr": "fast"}, at_step=3))


acts = st.lists(st.tuples(st.sampled_from(["plan", "patch", "cancel", "step"]), st.integers(1, 6), st.integers(1, 9)), max_size=12)


@given(acts)
@hypothesis_settings(max_examples=60)
def test_each_step_has_the_values_of_the_newest_patch_or_plan_that_was_due(found: list[tuple[str, int, int]]) -> None:
    """Against a table of steps: the fold of the stream is what an operator would say."""
    history = [KnobPatch(epoch=0, values=plain_knobs(clip_grad=0.0), kinds=plain_kinds())]
    table: list[KnobPatch] = []  # plans that wait
    step, live = 0, 0.0
    for act, when, value in found:
        epoch = len(history)
        if act == "plan":
            history.append(KnobPatch(epoch=epoch, values={}, planned={"clip_grad": float(value)}, at_step=step + when))
            table.append(history[-1])
        elif act == "patch":
            history.append(KnobPatch(epoch=epoch, values={"clip_grad": float(value)}))
            live = float(value)
        elif act == "cancel" and table:
            gone = table.pop(value % len(table))
            history.append(KnobPatch(epoch=epoch, values={}, plan=gone.epoch))
        elif act == "step":
            step += 1
            for due in [p for p in pending(history) if p.from_step <= step]:
                assert due in table
                table.remove(due)
                history.append(KnobPatch(epoch=len(history), values=due.planned or {}, plan=due.epoch, at_step=step))
                live = (due.planned or {})["clip_grad"]
        assert pending(history) == sorted(table, key=lambda p: (p.from_step, p.epoch))
        assert values_at(history, history[-1].epoch).clip_grad == live


async def test_an_epoch_that_a_failover_lost_is_not_waited_for_without_end(bus: Bus) -> None:
    knobs, over = LiveKnobs(bus), asyncio.Event()
    await knobs.open()
    following = asyncio.create_task(knobs.follow(over))
    made = await propose(bus, {"lr": 0.5}, author="me")
    await knobs.reach(made.epoch)
    with pytest.raises(InvariantBroken, match="knob epoch 2 was said and not heard"):
        await knobs.reach(made.epoch + 1, deadline_s=0.05)
    over.set()
    await following
