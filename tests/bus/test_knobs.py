"""Live knobs: what may be patched, what is refused and why, and how everyone sees the same epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from bus import Bus, BusConfig, Out
from bus.errors import BusRefused, InvariantBroken, KnobRejected
from bus.knobs import LiveKnobs, propose, publish_initial, read_history, revert, values_at
from bus.knobs.live import KnobValues, fold
from bus.knobs.table import FACTS, KNOBS, check_patch, check_whole, coerce, describe, find_knob
from bus.messages.control import KnobPatch
from bus.server import EmbeddedRedis
from bus.topology import KNOBS as STREAM
from tests.bus.suite.conformance import eventually, put_raw
from tests.bus.suite.faults import restart, written
from tests.bus.suite.knobs import plain_knobs

WHOLE = check_whole(plain_knobs())


@pytest_asyncio.fixture
async def bus(redis_url: str, run_name: str) -> AsyncIterator[Bus]:
    async with Bus(BusConfig(url=redis_url, run=run_name, deadline_s=10)) as bus:
        yield bus


def refused(patch: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(KnobRejected, match="Live value unchanged") as refusal:
        check_patch(check_whole(plain_knobs(**changes)), patch)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", KNOBS.values(), ids=lambda knob: knob.name)
def test_each_knob_says_what_it_is_and_when_it_applies(knob: Any) -> None:
    assert knob.help and knob.applies and knob.actor and knob.range_text
    assert knob.name in describe()
    assert coerce(knob, WHOLE[knob.name]) == WHOLE[knob.name]
    assert coerce(knob, str(WHOLE[knob.name])) == WHOLE[knob.name], "what is shown can be typed in"
    for bad in ("", "many", [1], {}, object(), b"1", "nan" if knob.kind == "float" else "1.5x"):
        with pytest.raises(KnobRejected, match=knob.name):
            coerce(knob, bad)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rollout_batch_size", "3", 3),
        ("lr", "1e-5", 1e-5),
        ("lr", 1, 1.0),
        ("eps_clip", " 0.3 ", 0.3),
        ("staleness_policy", "wait", "wait"),
        ("max_tokens_per_slice", None, 0),
        ("eval_interval", "none", 0),
    ],
)
def test_text_from_a_command_line_becomes_a_value(name: str, text: Any, value: Any) -> None:
    result = coerce(KNOBS[name], text)
    assert result == value and type(result) is type(value)


def test_facts_take_truth_from_text() -> None:
    assert coerce(FACTS["no_correction"], "true") is True and coerce(FACTS["no_correction"], "off") is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_batch_size", 0),
        ("rollout_batch_size", True),
        ("rollout_batch_size", 2.0),
        ("rollout_batch_size", 1 << 63),
        ("rollout_temperature", 0),
        ("rollout_temperature", "inf"),
        ("rollout_top_p", 1.01),
        ("eps_clip", 1.0),
        ("lr", float("nan")),
        ("lr", "-1e-9"),
        ("lr", None),
        ("staleness_policy", "hope"),
        ("dynamic_sampling_filter", "os.system"),
    ],
)
def test_values_out_of_range_or_of_another_type_are_refused(name: str, value: Any) -> None:
    assert name in refused({name: value})


@given(st.sampled_from(sorted(KNOBS)), st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans()))
def test_any_value_is_taken_or_refused_and_what_is_taken_holds(name: str, value: Any) -> None:
    try:
        changes = check_patch(WHOLE, {name: value})
    except KnobRejected as error:
        assert "\n" not in str(error)
        return
    assert check_whole({**WHOLE, **changes}) == {**WHOLE, **changes}


def test_names_are_found_by_setting_flag_or_nearest() -> None:
    assert find_knob("dynamic_sampling_filter_path").name == "dynamic_sampling_filter"
    assert find_knob("--over-sampling-batch-size").name == "over_sampling_batch_size"
    assert "Did you mean rollout_temperature?" in refused({"rollout_temprature": 1})
    assert "fixed for the whole run" in refused({"n_samples_per_prompt": 8})
    assert "it is rollout_batch_size" in refused({"global_batch_size": 8})


def test_the_global_batch_follows_the_rollout_batch() -> None:
    whole = check_whole(plain_knobs(num_steps_per_rollout=2))
    assert whole["global_batch_size"] == 4
    changes = check_patch(whole, {"rollout_batch_size": "3", "over_sampling_batch_size": "9"})
    assert changes == {"rollout_batch_size": 3, "over_sampling_batch_size": 9, "global_batch_size": 3}
    assert "do not divide" in refused({"rollout_batch_size": 3}, num_steps_per_rollout=4)


@pytest.mark.parametrize(
    ("patch", "changes", "says"),
    [
        ({"rollout_batch_size": 5}, {}, "smaller than rollout_batch_size = 5"),
        ({"over_sampling_batch_size": 3}, {}, "Set over_sampling_batch_size >= 4"),
        (
            {"max_weight_staleness": 1},
            {"correction": "none", "max_weight_staleness": 0},
            "off-policy data without a correction",
        ),
        ({"staleness_policy": "wait"}, {"staleness_lookahead": 6}, "adds 2 versions"),
        ({"rollout_max_response_len": 64}, {"rollout_max_context_len": 64}, "no room for a prompt"),
        ({"kl_loss_coef": 0.1}, {"use_kl_loss": False}, "no reference policy"),
        ({"dynamic_sampling_filter": "nonzero_std"}, {"n_samples_per_prompt": 1}, "every group would be dropped"),
        ({"eval_interval": 5}, {"has_eval_data": False}, "without evaluation data"),
    ],
)
def test_rules_between_knobs_hold_for_the_resulting_whole(
    patch: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    assert says in refused(patch, **changes)


def test_what_breaks_alone_may_hold_together() -> None:
    assert check_patch(WHOLE, {"rollout_batch_size": 8, "over_sampling_batch_size": 8})
    whole = check_whole(plain_knobs(correction="none", no_correction=True, max_weight_staleness=0))
    assert check_patch(whole, {"max_weight_staleness": 3}) == {"max_weight_staleness": 3}


def test_initial_values_are_complete() -> None:
    values = plain_knobs()
    del values["lr"]
    with pytest.raises(KnobRejected, match="no value given for lr"):
        check_whole(values)


# -- folding ----------------------------------------------------------------------------------------------------------


def test_a_patch_of_a_passed_epoch_changes_nothing() -> None:
    first = fold(None, KnobPatch(epoch=0, values=WHOLE))
    second = fold(first, KnobPatch(epoch=1, values={"lr": 0.5}))
    assert fold(second, KnobPatch(epoch=1, values={"lr": 0.7})) is second
    assert (first.lr, second.lr, second.epoch) == (1e-3, 0.5, 1), "a snapshot does not change under its holder"


def test_a_patch_that_does_not_hold_is_refused_whoever_wrote_it() -> None:
    first = fold(None, KnobPatch(epoch=0, values=WHOLE))
    with pytest.raises(KnobRejected):
        fold(first, KnobPatch(epoch=1, values={"lr": "free"}))


def test_another_release_may_know_more_or_fewer_knobs() -> None:
    newer = fold(None, KnobPatch(epoch=0, values={**WHOLE, "knob_of_tomorrow": [1]}))
    assert newer.knob_of_tomorrow == [1]
    older = {name: value for name, value in WHOLE.items() if name != "max_waves"}
    assert fold(None, KnobPatch(epoch=0, values=older)).lr == 1e-3


def test_values_are_read_by_name_and_frozen() -> None:
    values = fold(None, KnobPatch(epoch=3, values=WHOLE))
    assert values.rollout_batch_size == 4 and values.lr == 1e-3
    assert values.staleness_policy == "whole"
    with pytest.raises(AttributeError, match="no knob 'lrr'"):
        _ = values.lrr
    with pytest.raises(TypeError):
        values.values["lr"] = 1  # type: ignore[index]


# -- the stream -------------------------------------------------------------------------------------------------------


async def opened(bus: Bus) -> LiveKnobs:
    knobs = LiveKnobs(bus)
    await knobs.open(deadline_s=5)
    return knobs


async def test_a_rerun_keeps_what_was_tuned_and_says_so(bus: Bus) -> None:
    assert await publish_initial(bus, plain_knobs()) == []
    await propose(bus, {"lr": "0.5"}, author="me", reason="try")
    differences = await publish_initial(bus, plain_knobs(max_waves=7))
    assert {d.name: (d.live, d.given) for d in differences} == {"lr": (0.5, 1e-3), "max_waves": (0, 7)}
    assert "lr stays 0.5 (knob epoch 1), the settings say 0.001" in map(str, differences)
    assert [p.epoch for p in await read_history(bus)] == [0, 1]


async def test_launchers_at_once_publish_one_set(redis_url: str, run_name: str) -> None:
    buses = [Bus(BusConfig(url=redis_url, run=run_name)) for _ in range(4)]
    found = await asyncio.gather(*(publish_initial(b, plain_knobs(max_waves=n)) for n, b in enumerate(buses)))
    assert sorted(len(differences) for differences in found) == [0, 1, 1, 1]
    assert len(await read_history(buses[0])) == 1
    for b in buses:
        await b.link.close()


async def test_values_of_a_newer_release_are_added(bus: Bus) -> None:
    old = {name: value for name, value in WHOLE.items() if name != "max_waves"}
    await bus.append([Out(STREAM, KnobPatch(epoch=0, values=old))])
    await bus.link.run("HSET", bus.keys.state, "knob_epoch", "0:old")
    assert await publish_initial(bus, plain_knobs(max_waves=9)) == []
    knobs = await opened(bus)
    assert (knobs.snapshot().max_waves, knobs.snapshot().epoch) == (9, 1)
    await knobs.close()


async def test_a_fresh_bus_goes_on_from_the_epoch_of_a_checkpoint(bus: Bus) -> None:
    await publish_initial(bus, plain_knobs(lr=0.25), epoch=6)
    assert (await propose(bus, {"lr": 0.5}, author="me")).epoch == 7
    assert values_at(await read_history(bus), 6).lr == 0.25


async def test_a_refused_patch_changes_nothing(bus: Bus) -> None:
    await publish_initial(bus, plain_knobs())
    before = await bus.scan_all(STREAM)
    for patch in ({"lr": -1}, {"lr": 0.5, "nonsense": 1}, {}, {"lr": "0.001"}, {"rollout_batch_size": 99}):
        with pytest.raises(KnobRejected):
            await propose(bus, patch, author="me")
    assert await bus.scan_all(STREAM) == before


async def test_a_run_that_was_never_started_is_named(bus: Bus) -> None:
    with pytest.raises(BusRefused, match="never started"):
        await propose(bus, {"lr": 1}, author="me")
    with pytest.raises(BusRefused, match="never started"):
        await LiveKnobs(bus).open(deadline_s=0.05)


async def test_patches_at_once_all_apply_in_some_order(redis_url: str, run_name: str) -> None:
    buses = [Bus(BusConfig(url=redis_url, run=run_name)) for _ in range(3)]
    await publish_initial(buses[0], plain_knobs())
    names = ["lr", "clip_grad", "entropy_coef"]
    made = await asyncio.gather(
        *(propose(b, {name: 0.5}, author=name) for b, name in zip(buses, names, strict=True)),
    )
    assert sorted(patch.epoch for patch in made) == [1, 2, 3]
    live = values_at(await read_history(buses[0]), 3)
    assert [live.values[name] for name in names] == [0.5, 0.5, 0.5]
    for b in buses:
        await b.link.close()


async def test_two_patches_that_exclude_each_other_cannot_both_pass(redis_url: str, run_name: str) -> None:
    buses = [Bus(BusConfig(url=redis_url, run=run_name)) for _ in range(2)]
    await publish_initial(buses[0], plain_knobs(over_sampling_batch_size=8))
    results = await asyncio.gather(
        propose(buses[0], {"over_sampling_batch_size": 5}, author="a"),
        propose(buses[1], {"rollout_batch_size": 7}, author="b"),
        return_exceptions=True,
    )
    assert sorted(type(r).__name__ for r in results) == ["KnobPatch", "KnobRejected"]
    for b in buses:
        await b.link.close()


async def test_followers_see_each_epoch_and_ignore_what_is_none(bus: Bus) -> None:
    await publish_initial(bus, plain_knobs())
    knobs, over = await opened(bus), asyncio.Event()
    following = asyncio.create_task(knobs.follow(over))
    held = knobs.snapshot()
    await put_raw(bus, STREAM, "body", b"\xc1")
    await bus.append([Out(STREAM, KnobPatch(epoch=1, values={"lr": "free"}))])
    made = await propose(bus, {"lr": 0.5}, author="me", reason="because")
    await eventually(lambda: knobs.snapshot().epoch == made.epoch, "the follower sees the patch")
    assert knobs.snapshot().lr == 0.5 and held.lr == 1e-3 and len(knobs.rejected) == 2
    assert [(p.epoch, p.reason) for p in knobs.history()] == [(0, "initial"), (1, "because")]
    back = await revert(bus, 0, author="me")
    await eventually(lambda: knobs.snapshot().epoch == back.epoch, "the follower sees the way back")
    assert knobs.snapshot().values == held.values and back.reason == "back to epoch 0"
    over.set()
    await following
    with pytest.raises(KnobRejected, match="its values are live"):
        await revert(bus, 0, author="me")
    with pytest.raises(KnobRejected, match="known epochs are 0 to 2"):
        await revert(bus, 9, author="me")


async def test_a_snapshot_before_open_is_a_mistake_of_ours(bus: Bus) -> None:
    with pytest.raises(InvariantBroken, match="before open"):
        LiveKnobs(bus).snapshot()


async def test_knobs_survive_a_killed_server(private_redis: EmbeddedRedis, run_name: str) -> None:
    async with Bus(BusConfig(url=private_redis.url, run=run_name, deadline_s=15)) as bus:
        await publish_initial(bus, plain_knobs())
        knobs, over = await opened(bus), asyncio.Event()
        following = asyncio.create_task(knobs.follow(over))
        await propose(bus, {"lr": 0.5}, author="me")
        await written(bus)
        await restart(private_redis)
        last = await propose(bus, {"clip_grad": 0.5}, author="me")
        await eventually(lambda: knobs.snapshot().epoch == last.epoch, "the follower goes on")
        assert isinstance(knobs.snapshot(), KnobValues) and knobs.snapshot().clip_grad == 0.5
        over.set()
        await following
