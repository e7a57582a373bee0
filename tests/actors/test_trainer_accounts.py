"""What the ledger gets for trained samples: by version, wherever masks sit."""

from __future__ import annotations

import msgspec

from actors.trainer.accounts import Trained, booked, consumed_by
from actors.trainer.backend import StepResult
from actors.trainer.cut import Part
from bus import Entry
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import GroupKept
from bus.messages.versions import VersionSpan
from bus.topology import GROUPS
from tests.actors.house import scored


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
