"""What a batch tells about the spread of its samples' lengths, seconds and ages."""

import msgspec
import numpy as np
import pytest

from actors.trainer.convert import batch_metrics
from actors.trainer.spread import (
    BORN,
    LENGTH,
    PACE,
    QUANTILES,
    RUNNING,
    SECONDS,
    SPANNED,
    STRAGGLER,
    lives_of,
    spread_metrics,
)
from bus.messages.base import pack_ints, unpack_ints
from bus.messages.groups import GroupKept
from bus.messages.samples import Response, Scored
from bus.messages.versions import VersionSpan
from tests.actors.house import rollout


def sample(group, index, *, tokens, seconds=0.0, steps=(3,), **more):
    """A scored sample whose tokens were made by these steps in equal parts."""
    spans = tuple(VersionSpan(step + 1, step, tokens // len(steps)) for step in steps)
    done = msgspec.structs.replace(
        rollout(group, index),
        response=Response(tokens=pack_ints(range(tokens)), spans=spans),
        generate_s=seconds,
        **more,
    )
    return Scored(rollout=done, reward=1.0)


def kept(group, *samples):
    return GroupKept(group_id=f"g{group}", prompt_id="p", samples=samples)


def test_quantiles_of_lengths_and_seconds_are_those_of_the_samples():
    lengths = [10, 20, 30, 40, 50, 60]
    batch = [kept(g, *(sample(g, i, tokens=lengths[3 * g + i], seconds=lengths[3 * g + i] / 10) for i in range(3))) for g in (0, 1)]
    found = spread_metrics(batch, step=5)
    assert [found[f"{LENGTH}/p{q}"] for q in QUANTILES] == pytest.approx(list(np.percentile(lengths, QUANTILES)))
    assert found[f"{SECONDS}/p100"] == 6.0
    assert found[f"{SECONDS}/mean"] == pytest.approx(3.5)
    assert found[f"{STRAGGLER}/p0"] == pytest.approx(6.0 / 5.0)
    assert found[f"{STRAGGLER}/p100"] == pytest.approx(3.0 / 2.0)


def test_ages_of_first_tokens_and_versions_spanned_are_shares():
    batch = [
        kept(0, sample(0, 0, tokens=4, steps=(5,)), sample(0, 1, tokens=4, steps=(3, 4))),
        kept(1, sample(1, 0, tokens=4, steps=(5,)), sample(1, 1, tokens=20, steps=(0, 9))),
    ]
    found = spread_metrics(batch, step=12)
    assert {k: v for k, v in found.items() if k.startswith(BORN)} == {f"{BORN}/7": 0.5, f"{BORN}/8_up": 0.5}
    assert {k: v for k, v in found.items() if k.startswith(SPANNED)} == {
        f"{SPANNED}/0": 0.5, f"{SPANNED}/1": 0.25, f"{SPANNED}/8_up": 0.25,
    }  # fmt: skip


def test_a_resumed_sample_counts_the_seconds_that_its_prefix_took_at_the_same_pace():
    batch = [kept(0, sample(0, 0, tokens=30, seconds=2.0, resumed_tokens=10), sample(0, 1, tokens=30, resumed_tokens=30))]
    found = spread_metrics(batch, step=3)
    assert found[f"{SECONDS}/p0"] == found[f"{SECONDS}/p100"] == pytest.approx(3.0)


def test_how_much_one_sample_more_slows_the_others_is_found():
    samples = [
        sample(0, i, tokens=50 + i, seconds=(50 + i) * (0.002 + 0.0001 * running), running=running)
        for i, running in enumerate((4, 8, 30, 31, 60))
    ]
    found = spread_metrics([kept(0, *samples)], step=3)
    assert found[f"{PACE}/per_running"] == pytest.approx(0.0001)
    assert found[f"{PACE}/mean"] - found[f"{PACE}/per_running"] * found[f"{RUNNING}/mean"] == pytest.approx(0.002)


def test_it_is_found_where_what_runs_changes_in_the_middle_of_samples():
    """Their mean over tokens is what counts, as the worker tells it: in each tenth of a second an engine makes as many tokens of
    a sample as fit at the pace of what runs then."""
    rng = np.random.default_rng(4)
    running = 40 + np.cumsum(rng.integers(-6, 7, 4000)) % 300  # in each tenth of a second
    made = 0.1 / (0.002 + 0.0001 * running)
    samples = []
    for i in range(200):
        begin, length = rng.integers(0, 3800), rng.integers(5, 200)
        tokens = made[begin : begin + length]
        mean = float(np.average(running[begin : begin + length], weights=tokens))
        samples.append(sample(0, i, tokens=round(tokens.sum()), seconds=length / 10, running=mean))
    found = spread_metrics([kept(0, *samples)], step=3)
    assert found[f"{PACE}/per_running"] == pytest.approx(0.0001, rel=0.01)


def test_tokens_over_the_bound_are_masked_and_no_staleness_of_what_is_trained():
    batch = [kept(0, sample(0, 0, tokens=4, steps=(3, 10)), sample(0, 1, tokens=4, steps=(9,)))]
    found = batch_metrics(batch, step=10, bound=2)
    assert (found["rollout/fully_async/max_staleness"], found["rollout/fully_async/oldest_token"]) == (1.0, 7.0)
    assert found["rollout/masked_fraction"] == 0.25


def test_a_batch_of_another_release_without_seconds_or_tokens_is_described_as_far_as_it_goes():
    empty = kept(1, sample(1, 0, tokens=0, steps=()), sample(1, 1, tokens=0, steps=()))
    found = batch_metrics([kept(0, sample(0, 0, tokens=5), sample(0, 1, tokens=7)), empty], step=3, bound=8)
    assert found[f"{LENGTH}/p100"] == 7.0
    assert not any(k.startswith((SECONDS, STRAGGLER, PACE)) for k in found)
    assert not any(k.startswith((LENGTH, BORN)) for k in spread_metrics([empty], step=3))


def test_a_batch_tells_the_tokens_and_seconds_of_its_samples_and_of_a_large_one_whole_groups():
    slow = msgspec.structs.replace(sample(1, 0, tokens=7, seconds=2.5), score_s=0.25)
    batch = [kept(1, slow), kept(2, sample(2, 1, tokens=4, seconds=1.0)), kept(1, sample(1, 3, tokens=9, seconds=4.0))]
    assert unpack_ints(lives_of(batch)) == [0, 7, 2500, 250, 0, 9, 4000, 0, 1, 4, 1000, 0]
    large = [kept(g, *(sample(g, i, tokens=4, seconds=1.0) for i in range(8))) for g in range(128)]
    told = unpack_ints(lives_of(large))[::4]
    assert 128 < len(told) < 512
    assert {told.count(group) for group in told} == {8}
    late = [kept(g, sample(g, 8, tokens=4, seconds=1.0)) for g in range(128)]
    assert set(told) == set(unpack_ints(lives_of(late * 8))[::4])
