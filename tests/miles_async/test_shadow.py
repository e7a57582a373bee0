"""Shadows: another reward, filter or loss on a run's samples. The run must not notice, and what is told must be so."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import msgspec
import numpy as np
import pytest

from actors.filter.actor import FilterSpec
from actors.filter.actor import run as filter_room
from actors.reward.sample import Sample
from actors.reward.spec import RewardSpec
from bus import Bus, Commit
from bus.client import PASSWORD
from bus.errors import InvariantBroken
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup
from bus.messages.policy import Finished
from bus.messages.versions import PolicyVersion
from bus.topology import GROUPS, POLICY, SCORED, VERDICTS
from miles_async.console.shadow.compare import Rewards, ShadowEnds, ShadowFilter
from miles_async.console.shadow.paired import Paired
from miles_async.console.shadow.tap import Tap
from miles_async.console.shadow.units import ShadowUnit, chosen
from tests.actors.house import messages, open_bus, put, running, scored, until
from tests.declared import room_of
from tests.miles_async.shadow_house import OWN, a_user_who_may_only_read

# -- the run does not notice ---------------------------------------------------------------------------------------------


async def through_the_filter(bus: Bus, n: int) -> list[object]:
    """`n` groups of two through the real filter, in an order of arrival that mixes them; what the run is left with."""
    opened = {f"g{g}": msgspec.msgpack.encode(OpenGroup(group_id=f"g{g}", prompt_id=f"p{g}", n_samples=2)) for g in range(n)}
    await bus.commit(Commit(open_groups=opened, ledger={"issued": 2 * n, "tokens/generated": 6 * n}))
    members = [scored(g, i, float(i and g % 3 > 0)) for g in range(n) for i in range(2)]
    random.Random(7).shuffle(members)
    async with running(bus, "filter", filter_room, FilterSpec()):
        for start in range(0, len(members), 6):
            await put(bus, SCORED, *members[start : start + 6])
        await until(lambda: _judged(bus, n))
    small = await bus.snapshot()
    return [small.ledger, small.open_groups, [g.key for g in await messages(bus, GROUPS) if isinstance(g, GroupKept)]]


async def _judged(bus: Bus, n: int) -> bool:
    return await bus.length(VERDICTS) == n


async def drawn(tap: Tap, *, pause_s: float = 0.0) -> list[ShadowUnit]:
    """All that a tap gives out."""
    found = []
    async with aclosing(tap.units()) as units:
        async for unit in units:
            found.append(unit)
            await asyncio.sleep(pause_s)
    return found


@pytest.mark.parametrize("hop_limit_bytes", [16_384, 16], ids=["in the entry", "aside"])
async def test_three_shadows_that_may_only_read_see_every_group_and_the_run_is_left_with_the_same(
    private_redis, run_name: str, hop_limit_bytes: int, monkeypatch
) -> None:
    n, url = 40, private_redis.url
    looker = await a_user_who_may_only_read(url)
    async with open_bus(url, f"{run_name}-alone", hop_limit_bytes=hop_limit_bytes, inline_limit_bytes=hop_limit_bytes) as bus:
        alone = await through_the_filter(bus, n)
    async with open_bus(url, run_name, hop_limit_bytes=hop_limit_bytes, inline_limit_bytes=hop_limit_bytes) as bus:
        monkeypatch.setenv(PASSWORD, "secret")
        config = msgspec.structs.replace(bus.config, url=looker)
        async with Bus(config) as one, Bus(config) as two, Bus(config) as dead:
            with pytest.raises(InvariantBroken, match=r"(?i)permission|can't run"):
                await one.commit(Commit(state={"mine": "1"}))
            taps = [Tap(one, share=1.0), Tap(two, share=0.5), Tap(dead, share=1.0)]
            asked = [asyncio.create_task(drawn(tap, pause_s=p)) for tap, p in zip(taps, (0.0, 0.02, 0.0), strict=True)]
            await until(lambda: _wait(bus, 3))
            asked[2].cancel()
            together = await through_the_filter(bus, n)
            await put(bus, POLICY, Finished(step=1, version=PolicyVersion(2, 1)))
            full, half = await asyncio.gather(*asked[:2])
        verdicts = {v.group_id: v for v in await messages(bus, VERDICTS)}
        keys = {key.decode().rpartition("}:")[2].partition(":")[0] for key in await bus.link.run("KEYS", f"ma:{{{run_name}}}:*")}
    assert together[:2] == alone[:2] and sorted(together[2]) == sorted(alone[2])
    for tap, units, share in ((taps[0], full, 1.0), (taps[1], half, 0.5)):
        wanted = {group for group in verdicts if chosen(group, share)}
        assert len(units) + tap.missed.total() == len(wanted), "each is compared or counted"
        assert len(units) >= 0.7 * len(wanted), tap.missed
        for unit in units:
            assert [m.rollout.task.index for m in unit.members] == [0, 1] and not unit.part
            assert (unit.kept, unit.reason) == (verdicts[unit.group].kept, verdicts[unit.group].reason)
    assert keys <= OWN, "no key of a shadow's"


async def _wait(bus: Bus, n: int) -> bool:
    """Whether so many wait in a blocking read."""
    info = (await bus.link.run("INFO", "clients")).decode()
    return int(info.partition("blocked_clients:")[2].split()[0]) >= n


async def test_what_is_gone_or_unreadable_is_counted_and_a_slow_comparison_does_not_hold_up_the_reading(
    private_redis, run_name: str, monkeypatch
) -> None:
    monkeypatch.setattr("miles_async.console.shadow.tap.MOST_WAITING", 2)
    async with open_bus(private_redis.url, run_name) as bus:
        tap = Tap(bus, share=1.0)
        asked = asyncio.create_task(drawn(tap, pause_s=0.2))
        await until(lambda: _wait(bus, 1))
        torn = scored(0, 1, 0.0)
        response = msgspec.structs.replace(torn.rollout.response, tokens=memoryview(b"\1\2\3"))
        torn = msgspec.structs.replace(torn, rollout=msgspec.structs.replace(torn.rollout, response=response))
        await put(bus, SCORED, scored(0, 0, 1.0), torn)
        for group in range(1, 9):
            await put(bus, SCORED, scored(group, 0, 1.0), scored(group, 1, 0.0))
        judged = [f"g{group}" for group in (0, 99, *range(1, 9))]  # of g99 nothing was ever read
        await put(bus, VERDICTS, *(GroupVerdict(group_id=g, prompt_id="p", kept=True, n_samples=2) for g in judged))
        await put(bus, POLICY, Finished(step=1, version=PolicyVersion(2, 1)))
        found = await asked
    slow = tap.missed.pop("comparing is slower than the run")
    assert tap.missed == {"gone before it was read": 1, "a body gone or unreadable": 1}
    assert 1 <= len(found) <= 4 and len(found) + slow == 8


# -- what is told is so --------------------------------------------------------------------------------------------------


def test_the_interval_covers_the_true_difference_as_often_as_it_says_and_counts_groups_not_samples() -> None:
    rng, hits, rounds = np.random.default_rng(5), 0, 800
    for _ in range(rounds):
        paired = Paired()
        for common in rng.normal(0.1, 0.5, size=6):  # what samples of one prompt share
            paired.add([(0.0, float(common + own)) for own in rng.normal(0, 0.05, size=8)])
        hits += abs(paired.difference - 0.1) <= paired.half
    assert 0.93 <= hits / rounds <= 0.97
    assert (paired.groups, paired.pairs) == (6, 48)
    assert Paired().as_dict()["low"] is None


SETTING = """
import time, sys
def odd(sample):
    index = int(sample["sample_id"].rpartition("/")[2])
    if index == 0: raise ValueError("no unit test")
    if index == 1: time.sleep(60)
    if index == 2: sys.stdout.write("x" * 2_000_000)
    return float(index)
def never(sample):
    raise ValueError("no unit test")
def hangs(samples):
    time.sleep(60)
def torn(samples):
    raise KeyError("unit")
"""


def unit(group: str, n: int) -> ShadowUnit:
    """A group of texts."""
    samples = tuple(Sample(sample_id=f"{group}/{i}", prompt="1+1=", response="2", label="2") for i in range(n))
    return ShadowUnit(group=group, samples=samples, rewards=tuple(float(i) for i in range(n)))


async def test_a_reward_that_raises_hangs_or_floods_is_counted_and_one_that_never_works_ends_the_shadow(
    tmp_path,
) -> None:
    (tmp_path / "odd.py").write_text(SETTING)
    spec = room_of(RewardSpec, tokenizer_dir="", custom_rm_path=f"{tmp_path / 'odd.py'}:odd", n_workers=2)
    async with Rewards(spec, 3.0) as rewards:  # more than a process of the pool takes to start
        rows = await rewards.compare(unit("g1", 4))
        assert [(row["sample"], row["shadow"]) for row in rows] == [("g1/2", 2.0), ("g1/3", 3.0)]
        assert rewards.left_out == {"raised": 1, "late": 1, "lost": 0}
    async with Rewards(msgspec.structs.replace(spec, custom_rm_path=f"{tmp_path / 'odd.py'}:never"), 0.5) as rewards:
        with pytest.raises(ShadowEnds, match=r"16 times in a row.*no unit test"):
            for group in range(8):
                await rewards.compare(unit(f"g{group}", 4))


async def test_a_filter_is_compared_group_by_group_and_one_that_raises_or_hangs_ends_the_shadow_alone(tmp_path) -> None:
    (tmp_path / "odd.py").write_text(SETTING)
    whole = ShadowUnit(group="g1", members=(scored(1, 0, 1.0), scored(1, 1, 1.0)), kept=True)
    other = ShadowUnit(group="g2", members=(scored(2, 0, 1.0), scored(2, 1, 0.0)), kept=False, reason="too_easy")
    shipped = ShadowFilter("check_reward_nonzero_std", 5.0)
    rows = [
        *await shipped.compare(whole),
        *await shipped.compare(other),
        *await shipped.compare(msgspec.structs.replace(other, part=True)),
    ]
    assert [(row["run"], row["shadow"]) for row in rows] == [("kept", "zero_std_1"), ("too_easy", "kept")]
    assert shipped.more()["differ"] == ["g1", "g2"]
    assert shipped.left_out == {"left in parts": 1} and shipped.more()["kept"]["by the run alone"] == 1
    with pytest.raises(ShadowEnds, match=r"did not end within 0\.2 s on group g1"):
        await ShadowFilter(f"{tmp_path / 'odd.py'}:hangs", 0.2).compare(whole)
    torn = ShadowFilter(f"{tmp_path / 'odd.py'}:torn", 5.0)
    with pytest.raises(ShadowEnds, match="KeyError: 'unit'"):
        for _ in range(16):
            await torn.compare(whole)
