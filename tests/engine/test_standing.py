"""Which sample begins where (pure): what a worker makes of the words that it heard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generation.engine import Chunk, RouteBroken
from actors.generation.sample import Running
from actors.generation.standing import NO_TOKENS, Standing
from bus.messages.active import Activate, PolicyActive
from bus.messages.policy import Restored, WeightManifest
from bus.messages.versions import PolicyVersion, VersionSpan
from tests.engine.scripted import sample


def version(number: int, step: int | None = None) -> PolicyVersion:
    """Version `number`; of step `number` - 1 unless told."""
    return PolicyVersion(number, number - 1 if step is None else step)


def test_tokens_of_an_older_version_than_the_sample_needs_are_sent_for_again() -> None:
    versions = {"1": version(1), "2": version(2), "3": version(3)}
    running_ = Running(sample("s", 1))
    turn = running_.open(0, [])
    running_.least_step = 1
    with pytest.raises(RouteBroken, match="needs step 1"):
        running_.take(turn, Chunk([5], [-0.5], "1"), versions)
    assert running_.n_tokens == 0
    running_.take(turn, Chunk([5], [-0.5], "3"), versions)
    with pytest.raises(RouteBroken, match="version 3 or later"):
        running_.take(turn, Chunk([5], [-0.5], "2"), versions)
    assert running_.response().spans == (VersionSpan(3, 2, 1),)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[PolicyVersion], list[Restored], Standing, list[object]]:
    """A history of versions and restores, and what a worker heard of it: all of the newest words, or only older ones."""
    said: list[object] = []
    versions: list[PolicyVersion] = []
    restored: list[Restored] = []
    number, step = 1, 0
    for _ in range(draw(st.integers(1, 8))):
        if versions and draw(st.integers(0, 3)) == 0:
            step = draw(st.integers(0, step))
            restored.append(Restored(step=step, version=version(number, step)))
            said.append(restored[-1])
        elif versions:
            step += draw(st.integers(1, 2))
        versions.append(version(number, step))
        said.append(PolicyActive(version=versions[-1], serving={"peer": number}))
        number += draw(st.integers(1, 2))
    standing = Standing("me")
    for message in said:
        standing.fold(message)
    return versions, restored, standing, said


@given(worlds(), st.data())
def test_what_begins_is_never_older_than_its_task_and_what_is_newest_always_begins(
    world: tuple[list[PolicyVersion], list[Restored], Standing, list[object]], data: st.DataObject
) -> None:
    versions, restored, standing, said = world
    serving = data.draw(st.sampled_from(versions))
    issued_for = data.draw(st.sampled_from(versions))
    newest = versions[-1]

    def lost(v: PolicyVersion) -> bool:
        return any(v.id < r.version.id and v.step > r.step for r in restored)

    verdict = standing.verdict(serving, step=issued_for.step)
    if verdict == "begin":
        assert not lost(serving)
        assert serving.step >= issued_for.step or (lost(issued_for) and serving.step >= newest.step)
    assert standing.verdict(newest, step=issued_for.step) == "begin", "nothing waits for ever"
    assert not standing.behind(newest)
    last = data.draw(st.sampled_from(versions)).id
    assert (standing.verdict(serving, step=0, last=last) == "begin") == (serving.id >= last)
    for message in data.draw(st.permutations(said)):  # an old word that comes late changes nothing
        if isinstance(message, PolicyActive):
            standing.fold(message)
    assert not standing.behind(newest) and standing.verdict(newest, step=issued_for.step, last=NO_TOKENS) == "begin"


def heard(number: int, **serving: int) -> PolicyActive:
    return PolicyActive(version=version(number), serving=serving)


def test_a_sample_is_left_to_a_peer_that_has_what_it_needs_and_never_to_nobody() -> None:
    standing, first = Standing("me"), version(1)
    standing.fold(heard(2, me=1, peer=2))
    assert standing.verdict(first, step=1) == "leave" and standing.verdict(first, step=0) == "begin"
    assert standing.verdict(first, step=0, last=2) == "leave" and standing.verdict(first, step=0, last=3) == "wait"
    assert standing.peers_have() and standing.peer_serves(2) and not standing.peer_serves(1), "one is no peer of oneself"
    standing.fold(heard(2, me=2))
    assert standing.verdict(first, step=1) == "wait" and not standing.peers_have() and not standing.peer_serves(2)
    standing.fold(heard(2, me=1, peer=1))
    assert standing.verdict(first, step=1) == "wait"


def test_what_is_ordered_here_is_waited_for() -> None:
    standing = Standing("me")
    standing.fold(heard(2, me=1, peer=2))
    manifest = WeightManifest()
    standing.fold(Activate(version=version(2), manifest=manifest, workers=("peer",)))
    assert standing.verdict(version(1), step=1) == "leave", "an order for another"
    standing.fold(Activate(version=version(2), manifest=manifest, workers=("peer", "me")))
    assert standing.verdict(version(1), step=1) == "wait" and standing.verdict(None, step=1) == "wait"
    standing.fold(heard(3, me=1, peer=3))
    assert standing.verdict(version(1), step=2) == "leave", "what is ordered would not do"


def test_a_task_of_the_step_that_is_served_is_not_behind() -> None:
    standing = Standing("me")
    standing.fold(heard(3, me=3))
    standing.fold(heard(2, me=2))  # a word that comes late
    assert not standing.behind(version(3)) and standing.behind(version(2)) and standing.behind(None)
    standing.fold(Restored(step=1, version=version(9, 1)))
    assert not standing.behind(version(2)), "the weights that the trainer went back to are no lost future"
    assert standing.behind(version(3))


def test_a_peer_that_serves_a_lost_future_has_nothing_that_is_needed() -> None:
    standing = Standing("me")
    standing.fold(heard(2, me=2, peer=5))
    assert standing.peers_have(2), "it serves a later one"
    standing.fold(Restored(step=1, version=version(9, 1)))
    assert not standing.peers_have(2) and standing.peers_have(2) == standing.peers_have(3)
    standing.fold(heard(9, me=2, peer=9))
    assert standing.peers_have(2)
