"""What the sampler may issue, and what it counts as open (pure)."""

from __future__ import annotations

import pytest

from actors.sampler.admission import engine_room, free_samples, open_limit, whole_groups
from actors.sampler.progress import SamplerProgress
from bus.messages.active import PolicyActive
from bus.messages.groups import GroupVerdict, OpenGroup
from bus.messages.policy import GroupsGivenUp, Restored, StepDone
from bus.messages.versions import PolicyVersion

N = 4


@pytest.mark.parametrize(
    ("given", "free"),
    [
        ({}, 100),
        ({"open_samples": 30}, 70),
        ({"open_samples": 120}, 0),  # the bound was lowered
        ({"over_sampling": 48}, 48),
        (
            {"over_sampling": 48, "open_samples": 60, "unjudged": 10},
            38,
        ),  # those that wait to be trained are not in generation
        ({"over_sampling": 48, "unjudged": 50}, 0),
        ({"still_needed": 70, "open_samples": 60, "untrained": 60}, 10),
        ({"still_needed": 70, "open_samples": 60, "untrained": 20}, 40),  # what is trained fills no further batch
        ({"engine_room": 3}, 3),
        ({"engine_room": -5}, 0),
    ],
    ids=str,
)
def test_the_smallest_of_all_bounds_decides(given: dict[str, int], free: int) -> None:
    plain = {
        "open_samples": 0,
        "untrained": 0,
        "unjudged": 0,
        "limit": 100,
        "over_sampling": 0,
        "still_needed": 100,
        "engine_room": 100,
    }
    assert free_samples(**(plain | given)) == free


@pytest.mark.parametrize(
    ("free", "untrained", "coming", "unjudged", "groups"),
    [
        (11, 0, 0, 0, 2),
        (3, 29, 0, 0, 1),  # the batch of 32 lacks three samples, and nothing comes any more
        (3, 29, 0, 1, 0),  # something comes
        (3, 32, 0, 0, 0),  # the batch is there
        (0, 31, 0, 0, 1),
        (0, 0, 32, 0, 0),  # a version that is about to be served frees the slots of its batch
        (0, 0, 31, 0, 1),
    ],
)
def test_what_a_batch_lacks_is_issued_even_if_it_is_less_than_a_group(
    free: int, untrained: int, coming: int, unjudged: int, groups: int
) -> None:
    assert whole_groups(free, untrained=untrained, coming=coming, unjudged=unjudged, needed=32, group=N) == groups


@pytest.mark.parametrize(("slots", "under_way", "room"), [(100, 90, 35), (8, 0, 16), (8, 20, -4)])
def test_beside_full_slots_some_prompts_lie_ready(slots: int, under_way: int, room: int) -> None:
    assert engine_room(slots=slots, under_way=under_way, group=N) == room


@pytest.mark.parametrize(("lookahead", "limit"), [(1, 20), (2, 16), (5, 16), (6, 12), (100, 4)])
def test_each_step_begun_of_a_lookahead_costs_a_batch(lookahead: int, limit: int) -> None:
    assert open_limit(per_version=4, max_staleness=4, lookahead=lookahead) == limit


# -- what is open -----------------------------------------------------------------------------------------------------


def group(number: int, members: tuple[int, ...] | None = None) -> OpenGroup:
    return OpenGroup(group_id=f"g{number}", prompt_id="p", n_samples=N, members=members)


def verdict(number: int, *members: int, kept: bool = False) -> GroupVerdict:
    n = len(members) or N
    return GroupVerdict(group_id=f"g{number}", prompt_id="p", kept=kept, reason="", n_samples=n, members=members)


def done(step: int, *groups: int) -> StepDone:
    version = PolicyVersion(step + 1, step)
    samples = tuple(sample for number in groups for sample in group(number).sample_ids)
    return StepDone(step=step, version=version, trained_on=PolicyVersion(step, step - 1), groups=(), samples=samples)


def served(step: int) -> PolicyActive:
    return PolicyActive(version=PolicyVersion(step + 1, step), serving={"w": step + 1})


def issued(*groups: int) -> SamplerProgress:
    progress = SamplerProgress()
    progress.fold(served(0))
    for number in groups:
        progress.issued(group(number))
    return progress


def test_what_is_issued_twice_is_open_once() -> None:
    progress = issued(1, 1)
    progress.issued(group(1, (2, 3)))
    assert (progress.open_samples, progress.unjudged) == (N, N)


def test_a_part_that_is_dropped_closes_itself_only() -> None:
    progress = issued(1)
    progress.fold(verdict(1, 0, 3))
    progress.fold(verdict(1, 0, 3))
    assert (progress.open_samples, progress.unjudged) == (2, 2)
    progress.fold(verdict(1, 1, kept=True))
    assert (progress.open_samples, progress.unjudged) == (2, 1)


def test_a_kept_group_ends_a_row_of_drops() -> None:
    progress = issued(1, 2, 3)
    progress.fold(verdict(1))
    progress.fold(verdict(2, 0))
    assert progress.drops_in_a_row == N + 1
    progress.fold(verdict(3, kept=True))
    assert progress.drops_in_a_row == 0


def test_samples_that_the_trainer_gives_up_are_not_open_any_more() -> None:
    progress = issued(1, 2)
    progress.fold(GroupsGivenUp(groups=(("g1", "stale"),), samples=("g1/0", "g1/2")))
    assert (progress.open_samples, progress.unjudged) == (2 * N - 2,) * 2
    progress.fold(GroupsGivenUp(groups=(("g2", "malformed"),)))
    assert progress.open_samples == N - 2


def test_the_next_published_version_frees_what_was_trained_up_to_its_step() -> None:
    progress = issued(1, 2, 3, 4)
    for step in (1, 2, 3):
        progress.fold(done(step, step))
    assert (progress.open_samples, progress.untrained) == (4 * N, N)
    assert [progress.coming(interval) for interval in (1, 2, 3, 4)] == [3 * N, 2 * N, 3 * N, 0]
    progress.fold(served(2))
    assert (progress.open_samples, progress.coming(2)) == (2 * N, 0)
    progress.fold(Restored(step=3, version=PolicyVersion(9, 3), samples=()))
    assert progress.coming(2) == N, "weights of a checkpoint are published whatever the interval"


def test_a_trainer_that_goes_back_opens_what_came_after_its_checkpoint_and_nothing_before() -> None:
    progress = issued(1, 2, 3)
    for step in (1, 2):
        progress.fold(done(step, step))
        progress.fold(served(step))
    assert progress.open_samples == N
    progress.fold(Restored(step=1, version=PolicyVersion(9, 1)))
    assert (progress.open_samples, progress.step, progress.active_step) == (2 * N, 1, 1)


def test_after_a_restore_a_step_done_again_frees_its_slots_when_it_is_served_again() -> None:
    progress = issued(1, 2)
    progress.fold(done(1, 1))
    progress.fold(served(1))
    progress.fold(Restored(step=0, version=PolicyVersion(9, 0)))
    progress.fold(done(1, 1))
    assert progress.open_samples == 2 * N, "the weights of the lost future are served, those of the new step are not"
    progress.fold(PolicyActive(version=PolicyVersion(10, 1)))
    assert progress.open_samples == N
