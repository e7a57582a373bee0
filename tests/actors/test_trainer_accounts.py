"""What the ledger gets for trained samples: by version, wherever masks sit; what is said of a first step."""

from __future__ import annotations

import msgspec
import pytest

from actors.runtime.context import Context
from actors.runtime.run import RunEnds
from actors.trainer.accounts import Trained, booked, consumed_by
from actors.trainer.backend import StepResult
from actors.trainer.cut import Part
from actors.trainer.selfcheck import tell
from bus import Entry
from bus.knobs.live import LiveKnobs
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import GroupKept
from bus.messages.versions import VersionSpan
from bus.topology import EVENTS, GROUPS
from tests.actors.house import messages, open_bus, scored
from tests.declared import actor_of


def test_a_mask_over_the_newest_tokens_leaves_the_oldest_as_trained() -> None:
    """Version 1 made 100 tokens that trained; what version 2 made was a tool's answer, and masked."""
    plain = scored(1, 0, 1.0, n=1, tokens=200)
    spans = (VersionSpan(1, 4, 100), VersionSpan(2, 5, 100))
    response = msgspec.structs.replace(
        plain.rollout.response, tokens=pack_ints([1] * 200), logprobs=pack_floats([-1.0] * 200),
        loss_mask=memoryview(b"\x01" * 100 + bytes(100)), spans=spans,
    )  # fmt: skip
    rollout = msgspec.structs.replace(plain.rollout, response=response)
    group = GroupKept(group_id="g1", prompt_id="p1", samples=(msgspec.structs.replace(plain, rollout=rollout),))
    part = Part.of(group, came=5)
    for kept, trained, masked, aged in (((100, 0), 100, 100, 0), ((40, 7), 47, 153, 0), ((0, 0), 0, 200, 0)):
        [item] = consumed_by([("g1", part, group)], StepResult({}, (), [kept]), step=5, bound=1)
        assert item.versions == tuple((v, n) for v, n in zip((1, 2), kept, strict=True) if n)
        moves = booked([Trained(6, Entry("1-0", GROUPS, "trainer", {}, b"", 0), item)])
        assert moves.get("tokens/trained", 0) == trained and moves["tokens/dropped/masked"] == masked
        assert "tokens/dropped/outlasted" not in moves and aged == 0
    [item] = consumed_by([("g1", part, group)], StepResult({}, (), [(0, 60)]), step=5, bound=0)
    assert item.aged == {"outlasted": (0, 100)} and item.masked_tokens == 40 and item.versions == ((2, 60),)


def test_each_sample_of_each_group_is_booked_as_its_step_trained_it() -> None:
    groups = [GroupKept(group_id=f"g{g}", prompt_id="p", samples=tuple(scored(g, i, 1.0) for i in range(2))) for g in (1, 2)]
    batch = [(group.key, Part.of(group, came=0), group) for group in groups]
    first, second = consumed_by(batch, StepResult({}, (), [(3,), (0,), (1,), (3,)]), step=0, bound=4)
    assert (first.samples, first.masked_samples, first.tokens, first.masked_tokens) == (1, 1, 3, 3)
    assert (second.samples, second.masked_samples, second.tokens, second.masked_tokens) == (2, 0, 4, 2)
    entry = Entry("1-0", GROUPS, "trainer", {}, b"", 0)
    moves = booked([Trained(1, entry, first), Trained(1, entry, second)])
    assert (moves["trained"], moves["dropped/masked"], moves["tokens/trained"]) == (3, 1, 7)


def test_what_waited_is_stale_and_what_came_late_has_outlasted_the_bound() -> None:
    group = GroupKept(group_id="g1", prompt_id="p", samples=(scored(1, 0, 1.0),))
    for came, reason in ((4, "stale"), (5, "outlasted")):
        part = Part.of(group, came=came)
        [item] = consumed_by([("g1", part, group)], StepResult({}, (), [(0,)]), step=5, bound=2)
        assert item.aged == {reason: (1, 3)} and (item.samples, item.masked_samples, item.masked_tokens) == (0, 0, 0)
    [edge] = consumed_by([("g1", part, group)], StepResult({}, (), [(1,)]), step=5, bound=5)
    assert edge.aged == {} and edge.masked_tokens == 2, "at the bound a token may be trained"
    [over] = consumed_by([("g1", part, group)], StepResult({}, (), [(1,)]), step=5, bound=4)
    assert over.aged == {"outlasted": (0, 2)} and over.samples == 1


async def test_a_first_step_that_could_not_be_checked_says_so_and_ends_nothing(redis_url: str, run_name: str) -> None:
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="trainer", role="trainer", bus=bus.config), bus, LiveKnobs(bus))
        await tell(context, {"train/loss": 0.5}, ends=True)
        await tell(context, {"train/loss": 0.5, "train/selfcheck/loss": 0.5, "train/selfcheck_limit/loss": 9.0}, ends=True)
        with pytest.raises(RunEnds, match="step 1 failed 1 of its 1 checks"):
            await tell(context, {"train/selfcheck/loss": 10.0, "train/selfcheck_limit/loss": 9.0}, ends=True)
        said = [e.text for e in await messages(bus, EVENTS) if e.kind == "self-check"]
        assert ["not checked" in text for text in said] == [True, False, False] and "passed its 1 checks" in said[1]
