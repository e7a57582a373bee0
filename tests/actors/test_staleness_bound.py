"""The staleness bound, by construction: admission, cutting and activation simulated together in random order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.sampler.admission import free_slots, open_limit
from actors.sampler.progress import Progress
from actors.trainer.cut import cut, group_age
from bus.messages.groups import GroupKept, GroupVerdict
from bus.messages.policy import PolicyActive, StepDone
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import PolicyVersion, VersionSpan


def kept(group_id: str, made_step: int) -> GroupKept:
    task = SampleTask(
        sample_id=f"{group_id}/0", group_id=group_id, index=0, n_samples=1, prompt_id="p0", prompt_tokens=memoryview(b"")
    )
    response = Response(
        tokens=memoryview(bytes(4)),
        logprobs=memoryview(bytes(4)),
        loss_mask=memoryview(b"\x01"),
        spans=(VersionSpan(made_step + 1, made_step, 1),),
    )
    rollout = RolloutDone(task=task, response=response, finish="stop")
    return GroupKept(group_id=group_id, prompt_id="p0", samples=(Scored(rollout=rollout, reward=1.0),))


@settings(max_examples=150, deadline=None)
@given(
    bound=st.integers(0, 3),
    per_step=st.integers(1, 4),
    over=st.integers(0, 3),
    events=st.lists(st.tuples(st.sampled_from(["finish", "drop", "train", "activate"]), st.integers(0, 99)), max_size=150),
)
def test_no_group_is_older_than_the_bound_when_batches_are_cut_oldest_first(
    bound: int, per_step: int, over: int, events: list[tuple[str, int]]
) -> None:
    progress = Progress()
    progress.fold(PolicyActive(version=PolicyVersion(1, 0)))
    generating: dict[str, int] = {}
    ready: dict[str, GroupKept] = {}
    number = step = 0
    for event, choice in events:
        slots = free_slots(
            open_groups=progress.open_groups,
            in_generation=progress.in_generation,
            limit=open_limit(groups_per_step=per_step, max_staleness=bound),
            over_sampling=per_step + over,
            still_needed=10_000,
        )
        for _ in range(slots):
            group_id = f"g{number:07d}"
            number += 1
            progress.issued(group_id)
            generating[group_id] = progress.active_step
        if event in ("finish", "drop") and generating:
            # Stragglers are allowed: any group may end next, but within one version the oldest ends before a batch is cut.
            group_id = sorted(generating)[choice % min(len(generating), per_step)]
            made = generating.pop(group_id)
            if event == "drop":
                progress.fold(GroupVerdict(group_id=group_id, prompt_id="p0", kept=False, reason="zero_std_0"))
            else:
                ready[group_id] = kept(group_id, made)
                progress.fold(GroupVerdict(group_id=group_id, prompt_id="p0", kept=True))
        elif event == "train":
            made_cut = cut(
                ready=ready,
                open_order=[],
                step=step,
                groups_per_step=per_step,
                bound=bound,
                policy="mask",
                lookahead=0,
            )
            for group_id, _ in made_cut.drop:
                del ready[group_id]
                progress.fold(GroupVerdict(group_id=group_id, prompt_id="p0", kept=False, reason="stale"))
            if made_cut.take:
                assert all(group_age(step, ready[g]) <= bound for g in made_cut.take)
                for group_id in made_cut.take:
                    del ready[group_id]
                step += 1
                version = PolicyVersion(step + 1, step)
                progress.fold(
                    StepDone(step=step, version=version, trained_on=PolicyVersion(step, step - 1), groups=made_cut.take)
                )
        elif event == "activate":
            progress.fold(PolicyActive(version=PolicyVersion(step + 1, step)))
        assert progress.open_groups <= (bound + 1) * per_step


def test_bound_zero_never_overlaps_two_versions() -> None:
    """With bound 0 nothing is issued between the training of a batch and the activation of what it made."""
    progress = Progress()
    progress.fold(PolicyActive(version=PolicyVersion(1, 0)))
    for number in range(4):
        progress.issued(f"g{number}")
    limit = open_limit(groups_per_step=4, max_staleness=0)

    def slots() -> int:
        return free_slots(
            open_groups=progress.open_groups,
            in_generation=progress.in_generation,
            limit=limit,
            over_sampling=8,
            still_needed=99,
        )

    assert slots() == 0
    done = StepDone(
        step=1, version=PolicyVersion(2, 1), trained_on=PolicyVersion(1, 0), groups=tuple(f"g{n}" for n in range(4))
    )
    progress.fold(done)
    assert slots() == 0, "announced is not active"
    progress.fold(PolicyActive(version=PolicyVersion(2, 1)))
    assert slots() == 4


@given(per_step=st.integers(1, 64), bound=st.integers(0, 8), lookahead=st.integers(1, 256))
def test_lookahead_is_paid_for_by_admission(per_step: int, bound: int, lookahead: int) -> None:
    plain = open_limit(groups_per_step=per_step, max_staleness=bound)
    with_lookahead = open_limit(groups_per_step=per_step, max_staleness=bound, lookahead=lookahead)
    assert per_step <= with_lookahead <= plain
    assert open_limit(groups_per_step=per_step, max_staleness=bound, lookahead=1) == plain


def test_wait_takes_nothing_beyond_the_lookahead() -> None:
    ready = {f"g{n}": kept(f"g{n}", 0) for n in (1, 2, 3)}
    order = ["g0", "g1", "g2", "g3"]
    common = {"ready": ready, "open_order": order, "step": 0, "groups_per_step": 2, "bound": 1, "policy": "wait"}
    assert cut(**common, lookahead=1).take == ()
    assert cut(**common, lookahead=2).take == ("g1", "g2")


def test_a_group_with_no_fresh_token_is_dropped_with_its_reason() -> None:
    made = cut(
        ready={"g0": kept("g0", 0), "g1": kept("g1", 4)},
        open_order=[],
        step=5,
        groups_per_step=1,
        bound=2,
        policy="mask",
        lookahead=0,
    )
    assert made.drop == (("g0", "stale"),)
    assert made.take == ("g1",)


def test_a_token_of_a_lost_future_counts_its_distance_in_steps() -> None:
    assert group_age(3, kept("g0", 5)) == 2
