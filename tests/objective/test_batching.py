"""Batch plans on random input: the promises of `batching` hold, and packing stays near the lower bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trainer.batch.batching import (
    CostModel,
    dynamic_global_batch_size,
    plan_step,
)
from actors.trainer.batch.packing import BatchingError, lower_bound, pack
from tests.objective.reference import strong_lower_bound

LENGTHS = st.lists(st.integers(1, 3000), min_size=8, max_size=60)
COST = CostModel.of_shape(hidden=64, layers=4, ffn=256, vocab=1000, heads=4, kv_heads=2, head_dim=32)


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    dp=st.integers(1, 4),
    cp=st.integers(1, 2),
    siblings=st.integers(1, 3),
    balance=st.sampled_from(["none", "tokens", "flops"]),
)
def test_every_plan_keeps_its_promises(lengths, dp, cp, siblings, balance):
    rollouts = [i // siblings for i in range(len(lengths))]
    cap = 1024 * cp
    try:
        step = plan_step(
            lengths,
            rollouts,
            dp_size=dp,
            cp_size=cp,
            max_tokens_per_gpu=1024,
            balance=balance,
            costs=[COST(n, n // 2) for n in lengths],
        )
    except BatchingError as error:
        assert "cannot fill" in str(error)  # only when the step has fewer samples than the ranks need micro-batches
        assert len(lengths) < -(-len(pack(lengths, cap, dp)) // dp) * dp
        return
    assert sorted(i for rank in step.ranks for mb in rank for i in mb) == list(range(len(lengths)))
    assert len(step.ranks) == dp and len({len(r) for r in step.ranks}) == 1
    assert step.num_rollouts == len(set(rollouts))
    for rank in step.ranks:
        for mb in rank:
            assert mb and (len(mb) == 1 or sum(lengths[i] for i in mb) <= cap)


@pytest.mark.parametrize("dp", [1, 4, 8])
@pytest.mark.parametrize(("mu", "sigma", "cap"), [(6, 1.0, 2048), (6.5, 0.7, 4096), (7, 1.2, 8192), (7, 0.3, 16384)])
def test_packing_of_512_lognormal_lengths_is_near_the_lower_bound(mu, sigma, cap, dp):
    for seed in range(3):
        rng = random.Random(seed)
        lengths = [min(max(1, int(rng.lognormvariate(mu, sigma))), cap) for _ in range(512)]
        plan = plan_step(lengths, range(512), dp_size=dp, max_tokens_per_gpu=cap)
        count = sum(len(rank) for rank in plan.ranks)
        assert lower_bound(lengths, cap, dp) <= strong_lower_bound(lengths, cap, dp) <= count
        assert strong_lower_bound(lengths, cap, dp) / count >= 0.97


@pytest.mark.parametrize("sizes", [{"max_tokens_per_gpu": 4096}, {"micro_batch_size": 2}], ids=["dynamic", "static"])
def test_balancing_evens_out_what_it_measures(sizes):
    rng = random.Random(0)
    lengths = [min(max(1, int(rng.lognormvariate(6, 1.0))), 4000) for _ in range(256)]
    costs = [CostModel(quadratic=1e-3)(n) for n in lengths]

    def gap(balance, measure):
        """The busiest rank over the mean."""
        plan = plan_step(lengths, range(256), dp_size=4, balance=balance, costs=costs, **sizes)
        load = [sum(measure[i] for mb in rank for i in mb) for rank in plan.ranks]
        return max(load) / (sum(load) / 4)

    for balance, measure in (("tokens", lengths), ("flops", costs)):
        assert gap(balance, measure) <= gap("none", measure)
        assert gap(balance, measure) < 1.01
    assert gap("flops", costs) < gap("tokens", costs)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=8, max_size=60),
    dp=st.integers(1, 4),
    size=st.integers(1, 3),
    balance=st.sampled_from(["none", "tokens", "flops"]),
)
def test_static_micro_batches_are_the_same_whoever_gets_them(lengths, dp, size, balance):
    whole = len(lengths) // (dp * size) * dp * size
    kept = lengths[: max(whole, dp * size)] + [1] * max(dp * size - len(lengths), 0)
    step = plan_step(
        kept,
        range(len(kept)),
        dp_size=dp,
        micro_batch_size=size,
        balance=balance,
        costs=[COST(n) for n in kept],
    )
    chunks = sorted(mb for rank in step.ranks for mb in rank)
    assert chunks == [tuple(range(k, k + size)) for k in range(0, len(kept), size)]
    assert len({len(rank) for rank in step.ranks}) == 1


def test_flops_need_the_cost_of_every_sample():
    with pytest.raises(BatchingError, match="balance=flops needs the cost"):
        plan_step([1], [0], micro_batch_size=1, balance="flops")


def test_over_cap_sample_is_alone():
    assert (0,) in plan_step([5000, 10, 10], range(3), max_tokens_per_gpu=100).ranks[0]


def test_plans_do_not_depend_on_anything_but_their_input():
    lengths = [random.Random(3).randint(1, 900) for _ in range(64)]
    plans = {plan_step(lengths, range(64), dp_size=2, max_tokens_per_gpu=1024) for _ in "ab"}
    assert len(plans) == 1


def test_dynamic_global_batch_size_takes_whole_multiples():
    assert dynamic_global_batch_size(13, 4) == 12
    with pytest.raises(BatchingError, match="cannot feed"):
        dynamic_global_batch_size(3, 4)


def test_exactly_one_kind_of_batching():
    with pytest.raises(BatchingError, match="exactly one"):
        plan_step([1], [0])
