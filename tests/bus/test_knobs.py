"""Live knobs: what may be patched, what is refused and why, and how everyone sees the same epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import example, given
from hypothesis import strategies as st

from bus import Bus, BusConfig, Commit, Guard, Out
from bus.errors import BusRefused, InvariantBroken, KnobRejected
from bus.knobs import propose, values_at
from bus.knobs.kinds import checked
from bus.knobs.live import STATE_FIELD, KnobValues, LiveKnobs, fold, publish_initial, read_history, revert
from bus.messages.control import Kind, KnobPatch
from bus.server import EmbeddedRedis
from bus.topology import KNOBS as STREAM
from tests.bus.suite.conformance import eventually, put_raw
from tests.bus.suite.faults import restart, written
from tests.bus.suite.knobs import FIXED, plain_kinds, plain_knobs

WHOLE, LIVE = plain_knobs(), plain_kinds()


@pytest_asyncio.fixture
async def bus(redis_url: str, run_name: str) -> AsyncIterator[Bus]:
    async with Bus(BusConfig(url=redis_url, run=run_name, deadline_s=10)) as bus:
        yield bus


# -- kinds ------------------------------------------------------------------------------------------------------------

KINDS = {
    "lr": Kind(type="float", ge=0.0),
    "top_p": Kind(type="float", gt=0.0, le=1.0),
    "batch": Kind(type="int", ge=1, lt=10),
    "interval": Kind(type="int", ge=1, optional=True),
    "policy": Kind(type="str", choices=("wait", "drop")),
    "filter": Kind(type="str"),
    "on": Kind(type="bool"),
}


@pytest.mark.parametrize(
    ("name", "value", "after"),
    [
        *(("lr", 0.5, 0.5), ("lr", 1, 1.0), ("top_p", 1.0, 1.0), ("batch", 9, 9), ("interval", None, None)),
        *(("policy", "wait", "wait"), ("filter", "any", "any"), ("on", False, False)),
    ],
)
def test_a_value_of_its_kind_is_taken(name: str, value: Any, after: Any) -> None:
    result = checked(name, value, KINDS)
    assert result == after and type(result) is type(after)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", float("nan")), ("lr", float("inf")), ("lr", "1e-5"), ("lr", None), ("lr", True), ("lr", -1e-9)),
        *(("top_p", 0.0), ("top_p", 1.01), ("batch", 0), ("batch", 10), ("batch", 2.0), ("batch", True)),
        *(("interval", 0), ("policy", "hope"), ("policy", ["wait"]), ("filter", b"1"), ("on", 1), ("on", None)),
        ("fixed_one", 1),
    ],
)
def test_another_value_is_refused_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(KnobRejected, match=name) as refusal:
        checked(name, value, KINDS)
    assert "\n" not in str(refusal.value) and "Live value unchanged" in str(refusal.value)


@example("lr", 2**53 + 1)  # no double is equal to it
@example("lr", 10**400)
@given(st.sampled_from(sorted(KINDS)), st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans()))
def test_any_value_is_taken_or_refused_and_what_is_taken_holds(name: str, value: Any) -> None:
    try:
        taken = checked(name, value, KINDS)
    except KnobRejected:
        return
    assert checked(name, taken, KINDS) == taken == (float(value) if KINDS[name].type == "float" else value)


# -- folding ----------------------------------------------------------------------------------------------------------


def test_a_patch_of_a_passed_epoch_changes_nothing() -> None:
    first = fold(None, KnobPatch(epoch=0, values=WHOLE, kinds=LIVE))
    second = fold(first, KnobPatch(epoch=1, values={"lr": 0.5}))
    assert fold(second, KnobPatch(epoch=1, values={"lr": 0.7})) is second
    assert (first.lr, second.lr, second.epoch) == (1e-3, 0.5, 1), "a snapshot does not change under its holder"


def test_a_patch_that_does_not_hold_is_refused_whoever_wrote_it() -> None:
    first = fold(None, KnobPatch(epoch=0, values=WHOLE, kinds=LIVE))
    for patch in ({"lr": "free"}, {"n_samples_per_prompt": 3}, {"knob_of_tomorrow": 1}):
        with pytest.raises(KnobRejected):
            fold(first, KnobPatch(epoch=1, values=patch))


def test_another_release_may_know_more_or_fewer_knobs() -> None:
    newer = fold(None, KnobPatch(epoch=0, values={**WHOLE, "knob_of_tomorrow": [1]}, kinds=LIVE))
    assert newer.knob_of_tomorrow == [1]
    older = {name: value for name, value in WHOLE.items() if name != "max_waves"}
    assert fold(None, KnobPatch(epoch=0, values=older, kinds=LIVE)).lr == 1e-3
    assert fold(None, KnobPatch(epoch=0, values=older)).live == {}, "a release that told no kinds"


def test_values_are_read_by_name_and_frozen() -> None:
    values = fold(None, KnobPatch(epoch=3, values=WHOLE, kinds=LIVE))
    assert values.values["lr"] == values.lr == 1e-3
    assert values.live == {name: value for name, value in WHOLE.items() if name not in FIXED}
    with pytest.raises(AttributeError, match="no setting 'lrr'"):
        _ = values.lrr
    with pytest.raises(TypeError):
        values.values["lr"] = 1  # type: ignore[index]


# -- the stream -------------------------------------------------------------------------------------------------------


async def opened(bus: Bus) -> LiveKnobs:
    knobs = LiveKnobs(bus)
    await knobs.open(deadline_s=5)
    return knobs


async def test_a_rerun_keeps_what_was_tuned_and_says_so(bus: Bus) -> None:
    assert await publish_initial(bus, plain_knobs(), LIVE) == []
    await propose(bus, {"lr": 0.5}, author="me", reason="try")
    differences = await publish_initial(bus, plain_knobs(max_waves=7), LIVE)
    assert {d.name: (d.live, d.given) for d in differences} == {"lr": (0.5, 1e-3), "max_waves": (0, 7)}
    assert "lr stays 0.5 (knob epoch 1), the settings say 0.001" in map(str, differences)
    assert [p.epoch for p in await read_history(bus)] == [0, 1]


async def test_launchers_at_once_publish_one_set(redis_url: str, run_name: str) -> None:
    buses = [Bus(BusConfig(url=redis_url, run=run_name)) for _ in range(4)]
    found = await asyncio.gather(*(publish_initial(b, plain_knobs(max_waves=n), LIVE) for n, b in enumerate(buses)))
    assert sorted(len(differences) for differences in found) == [0, 1, 1, 1]
    assert len(await read_history(buses[0])) == 1
    for b in buses:
        await b.link.close()


async def test_values_of_a_newer_release_are_added(bus: Bus) -> None:
    old = {name: value for name, value in WHOLE.items() if name != "max_waves"}
    await bus.append([Out(STREAM, KnobPatch(epoch=0, values=old, kinds=LIVE))])
    await bus.link.run("HSET", bus.keys.state, "knob_epoch", "0:old")
    assert await publish_initial(bus, plain_knobs(max_waves=9), LIVE) == []
    knobs = await opened(bus)
    assert (knobs.snapshot().max_waves, knobs.snapshot().epoch) == (9, 1)
    await knobs.close()


async def test_a_fresh_bus_goes_on_from_the_epoch_of_a_checkpoint(bus: Bus) -> None:
    await publish_initial(bus, plain_knobs(lr=0.25), LIVE, epoch=6)
    assert (await propose(bus, {"lr": 0.5}, author="me")).epoch == 7
    assert values_at(await read_history(bus), 6).lr == 0.25


async def test_a_refused_patch_changes_nothing(bus: Bus) -> None:
    await publish_initial(bus, plain_knobs(), LIVE)
    before = await bus.scan_all(STREAM)
    for patch in ({"lr": "-1"}, {"lr": 0.5, "nonsense": 1}, {}, {"lr": 0.001}, {"n_samples_per_prompt": 99}):
        with pytest.raises(KnobRejected):
            await propose(bus, patch, author="me")
    assert await bus.scan_all(STREAM) == before


async def test_a_patch_that_nobody_can_read_blocks_no_other(bus: Bus) -> None:
    """One with a number as its reason, say: its epoch is taken, and no history shows it."""
    await publish_initial(bus, WHOLE, LIVE)
    for reason in (5, "half of a pair: \ud83d"):
        with pytest.raises(KnobRejected, match=r"reason=.* it is not UTF-8 text"):
            await propose(bus, {"lr": 0.5}, author="me", reason=reason)  # type: ignore[arg-type]
    assert (await propose(bus, {"lr": 0.5}, author="me")).epoch == 1, "what was refused took no epoch"
    unreadable = KnobPatch(epoch=2, values={"lr": 0.6}, reason=5)  # type: ignore[arg-type]
    guard = Guard(STATE_FIELD, await bus.state(STATE_FIELD), "2:another")
    await bus.commit(Commit(append=(Out(STREAM, unreadable),), guard=guard))
    assert (await propose(bus, {"lr": 0.7}, author="me")).epoch == 3
    [differs] = await publish_initial(bus, WHOLE, LIVE)
    assert differs.live == 0.7 and [patch.epoch for patch in await read_history(bus)] == [0, 1, 3]


async def test_a_run_that_was_never_started_is_named(bus: Bus) -> None:
    with pytest.raises(BusRefused, match="never started"):
        await propose(bus, {"lr": 1}, author="me")
    with pytest.raises(BusRefused, match="never started"):
        await LiveKnobs(bus).open(deadline_s=0.05)


async def test_patches_at_once_all_apply_in_some_order(redis_url: str, run_name: str) -> None:
    buses = [Bus(BusConfig(url=redis_url, run=run_name)) for _ in range(3)]
    await publish_initial(buses[0], plain_knobs(), LIVE)
    names = ["lr", "clip_grad", "entropy_coef"]
    made = await asyncio.gather(
        *(propose(b, {name: 0.5}, author=name) for b, name in zip(buses, names, strict=True)),
    )
    assert sorted(patch.epoch for patch in made) == [1, 2, 3]
    live = values_at(await read_history(buses[0]), 3)
    assert [live.values[name] for name in names] == [0.5, 0.5, 0.5]
    for b in buses:
        await b.link.close()


def covers(values: Mapping[str, Any], patch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rule between two settings."""
    after = {**values, **patch}
    if after["over_sampling_batch_size"] < after["rollout_batch_size"]:
        raise KnobRejected(knob="over_sampling_batch_size", value=0, rule="too small", remedy="Raise it.")
    return patch


async def test_settings_that_are_fixed_are_those_of_the_newest_start(bus: Bus) -> None:
    await publish_initial(bus, plain_knobs(), LIVE)
    await propose(bus, {"lr": 0.5}, author="me")
    assert [d.name for d in await publish_initial(bus, plain_knobs(n_samples_per_prompt=4), LIVE)] == ["lr"]
    live = values_at(await read_history(bus), 2)
    assert (live.n_samples_per_prompt, live.lr, live.kinds) == (4, 0.5, LIVE)


async def test_a_kept_value_that_is_none_of_its_kind_any_more_gives_way(bus: Bus) -> None:
    await publish_initial(bus, plain_knobs(), LIVE)
    await propose(bus, {"lr": 0.5}, author="me")
    kinds = LIVE | {"lr": Kind(type="float", lt=0.1)}
    assert await publish_initial(bus, plain_knobs(), kinds) == []
    assert values_at(await read_history(bus), 2).lr == 1e-3


async def test_two_patches_that_exclude_each_other_cannot_both_pass(redis_url: str, run_name: str) -> None:
    buses = [Bus(BusConfig(url=redis_url, run=run_name)) for _ in range(2)]
    await publish_initial(buses[0], plain_knobs(over_sampling_batch_size=8), LIVE)
    results = await asyncio.gather(
        propose(buses[0], {"over_sampling_batch_size": 5}, author="a", check=covers),
        propose(buses[1], {"rollout_batch_size": 7}, author="b", check=covers),
        return_exceptions=True,
    )
    assert sorted(type(r).__name__ for r in results) == ["KnobPatch", "KnobRejected"]
    for b in buses:
        await b.link.close()


async def test_followers_see_each_epoch_and_ignore_what_is_none(bus: Bus) -> None:
    await publish_initial(bus, plain_knobs(), LIVE)
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
        await publish_initial(bus, plain_knobs(), LIVE)
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
