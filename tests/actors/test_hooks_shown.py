"""What functions of the user's do to what they are shown, and odd answers of theirs, cost no sample and reach no message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors.filter.actor import FilterSpec
from actors.filter.actor import run as run_filter
from actors.filter.groups import GroupTable
from actors.filter.judges import MOST_REASONS, REASON_CHARS, kept_reason
from actors.partial.actor import PartialSpec
from actors.partial.actor import run as run_partial
from actors.partial.decide import Plan, Waiting
from actors.reward.sample import ScorerFailed, settle
from actors.reward.wire import plain
from bus.ledger import check, read_accounts
from bus.messages.groups import OpenGroup
from bus.messages.reasons import DropReason
from bus.messages.samples import PrefixResume, RolloutLost, Scored
from bus.streams.entry import Entry
from bus.topology import DEAD, EVENTS, PARKED, SCORED, VERDICTS
from miles_async.launcher.try_hooks import problem_of
from tests.actors.house import messages, open_bus, put, running, scored, until
from tests.actors.test_filter import issue
from tests.actors.test_partial import listed, moved, parked
from tests.miles_async.test_try_hooks import SAMPLE, HookTrial


class Mute(Exception):
    """An exception that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def meddling(samples: list[Scored]) -> str | None:
    """A filter that goes by the first reward: it changes what it is shown, or drops with an odd reason."""
    kind = samples[0].reward
    for sample in samples:
        sample.rewards["mine"] = sample.rollout.task.metadata["mine"] = object()  # type: ignore[assignment]
        sample.rollout.task.metadata["all"] = samples
    samples.clear()
    return {1.0: "half \ud800", 2.0: "two\nlines\x1b[31m", 3.0: "long " * 1000, 4.0: "  "}.get(kind)


async def test_what_a_filter_does_to_samples_and_the_reasons_it_gives_cost_none(redis_url: str, run_name: str) -> None:
    path = f"{__name__}.meddling"
    async with open_bus(redis_url, run_name, knobs={"dynamic_sampling_filter_path": path}) as bus:
        await issue(bus, 1, 2, 3, 4, 5)
        async with running(bus, "filter", run_filter, FilterSpec(custom_filter=path, hooks_within_s=20.0)):
            await put(bus, SCORED, *(scored(g, i, float(g)) for g in range(1, 6) for i in range(2)))

            async def all_of_them() -> list[Any]:
                found = await messages(bus, VERDICTS)
                return found if len(found) == 5 else []

            verdicts = await until(all_of_them)
        reasons = {one.group_id: one.reason for one in verdicts}
        assert reasons.pop("g3").startswith("long long")
        assert reasons == {"g1": "half \\ud800", "g2": "two lines\\x1b[31m", "g4": "judge_raised", "g5": ""}
        assert all(len(one.reason) <= REASON_CHARS for one in verdicts)
        assert await messages(bus, DEAD) == []
        assert (await check(bus)).closes
        [said] = [m for m in await messages(bus, EVENTS) if getattr(m, "kind", "") == "judge raised"]
        assert path in said.text and "neither a reason to drop nor None" in said.text


def test_reasons_are_told_apart_up_to_a_number_since_the_accounts_keep_each() -> None:
    known: set[str] = set()
    told = [kept_reason(f"mean {n}", known) for n in range(3 * MOST_REASONS)]
    assert len({*told}) == MOST_REASONS + 1 and told[-1] == DropReason.OTHER_REASON
    assert kept_reason("mean 0", known) == "mean 0"


def test_a_member_that_was_buried_comes_again_as_lost_and_is_no_duplicate() -> None:
    table, entry = GroupTable(), Entry("1-1", SCORED, "filter", {}, b"", 1)
    table.begin("g1", OpenGroup(group_id="g1", prompt_id="p1", n_samples=2))
    member = scored(1, 0, 1.0)
    assert table.add(entry, member) == "held"
    table.bury(entry, member)
    lost = RolloutLost(sample_id="g1/0", group_id="g1", n_samples=2, reason="poison")
    assert table.add(Entry("1-2", SCORED, "filter", {}, b"", 1), lost) == "held"
    table.bury(entry, member)
    assert table.get("g1").lost, "only the entry that was buried leaves"


async def test_accounts_of_reasons_that_a_filter_before_gave_are_known(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        await issue(bus, 1, 2)
        for group in (1, 2):
            async with running(bus, "filter", run_filter, FilterSpec()):
                await put(bus, SCORED, scored(group, 0, 1.0), scored(group, 1, 1.0))

                async def dropped(n: int = 2 * group) -> bool:
                    return sum((await read_accounts(bus)).dropped.values()) == n

                await until(dropped)
        assert (await read_accounts(bus)).dropped == {"zero_std_1": 4}


def emptied(step: int, waiting: Sequence[Waiting]) -> list[Plan]:
    """A buffer's order that changes what it is shown, then raises."""
    for one in waiting:
        one.parked.task.metadata["mine"] = object()
    waiting.clear()  # type: ignore[attr-defined]
    raise Mute


def in_floats(step: int, waiting: Sequence[Waiting]) -> list[Plan]:
    return [Plan(float(one.order), "resume") for one in reversed(waiting)]  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["emptied", "in_floats"])
async def test_what_a_buffers_order_does_to_what_it_is_shown_costs_no_sample(redis_url: str, run_name: str, policy: str) -> None:
    spec = PartialSpec(buffer_filter=f"{__name__}.{policy}", hooks_within_s=20.0)
    async with open_bus(redis_url, run_name) as bus:
        await listed(bus, 1, 2)
        async with running(bus, "partial", run_partial, spec):
            await put(bus, PARKED, parked(1, 3), parked(2, 1))
            resumed = await moved(bus, 2)
        assert all(isinstance(one, PrefixResume) and not one.task.metadata for one in resumed)
        said = [m.text for m in await messages(bus, EVENTS) if getattr(m, "kind", "") == "policy raised"]
        assert len(said) == (policy == "emptied") and all("Mute: its text cannot be made" in text for text in said)


@pytest.mark.parametrize("path", ["mute", "interrupts", "half_a_pair"])
@pytest.mark.parametrize("field", ["custom_rm_path", "dynamic_sampling_filter_path", "buffer_filter_path"])
def test_whatever_a_tried_function_raises_is_told_by_its_name(field: str, path: str) -> None:
    problem = problem_of(field, f"{__name__}.{path}", HookTrial(paths={}, sample=SAMPLE))
    assert problem.startswith("raised ") and problem.isprintable()


def mute(*_: Any) -> Any:
    raise Mute


def interrupts(*_: Any) -> Any:
    raise KeyboardInterrupt


def half_a_pair(*_: Any) -> Any:
    raise ValueError("\ud800")


def test_what_is_no_reward_is_called_by_its_type_and_a_huge_number_is_infinite() -> None:
    with pytest.raises(ScorerFailed, match="gave a value of type generator, not a number"):
        settle(plain(one for one in (1.0,)), "", "custom")
    assert settle(plain(10**400), "", "custom").scalar == float("inf")
    assert settle(plain(-(10**400)), "", "custom").scalar == float("-inf")
