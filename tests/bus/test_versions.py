"""Which version made which token, and what an entry says of it (pure)."""

from __future__ import annotations

from bus.messages.groups import GroupKept, part_key
from bus.messages.samples import Scored
from bus.messages.versions import PolicyVersion, VersionSpan, extend_spans, spans_cover, spans_within
from tests.bus.suite.messages import a_rollout, a_task

SPANS = (VersionSpan(2, 1, 3), VersionSpan(3, 2, 2))


def test_only_tokens_of_one_version_share_a_span() -> None:
    three = extend_spans((), PolicyVersion(3, 2), 4)
    assert extend_spans(three, PolicyVersion(3, 2), 2) == (VersionSpan(3, 2, 6),)
    assert extend_spans(three, PolicyVersion(2, 1), 2) == (VersionSpan(3, 2, 4), VersionSpan(2, 1, 2)), "of another turn"
    assert extend_spans(three, PolicyVersion(4, 3), 0) == three


def test_a_part_of_the_tokens_has_the_spans_of_these() -> None:
    assert spans_within(SPANS, 0, 3) == SPANS[:1] and spans_within(SPANS, 3, 5) == SPANS[1:]
    assert spans_within(SPANS, 2, 4) == (VersionSpan(2, 1, 1), VersionSpan(3, 2, 1)) and spans_within(SPANS, 3, 3) == ()


def test_spans_are_of_exactly_as_many_tokens() -> None:
    assert [spans_cover(SPANS, n) for n in (4, 5, 6)] == [False, True, False]
    assert not spans_cover((*SPANS, VersionSpan(4, 3, 0)), 5), "none is empty"


def test_an_entry_shows_the_oldest_version_in_it_and_a_part_its_first_member() -> None:
    samples = tuple(Scored(rollout=a_rollout(a_task(i), 2, version=version), reward=0.0) for i, version in ((2, 5), (4, 3)))
    part = GroupKept(group_id="g1", prompt_id="p", samples=samples, part=part_key("g1", (4, 2)))
    assert (part.key, part.header().version) == ("g1+2", 3)
