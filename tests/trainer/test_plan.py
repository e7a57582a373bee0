"""Which samples go into which step and rank: promises of the plan, and the FLOPs it balances by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from actors.trainer.backend import BackendConfig
from actors.trainer.batch.batching import CostModel
from actors.trainer.batch.packing import BatchingError
from actors.trainer.batch.plan import cost_of, plan_steps
from tests.declared import backend_of
from tests.trainer.conftest import SHAPE


def config(**fields: Any) -> BackendConfig:
    return backend_of(hf_checkpoint="", max_tokens_per_gpu=512, **fields)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=12, max_size=60),
    siblings=st.integers(1, 3),
    ranks=st.integers(1, 4),
    balance=st.sampled_from(["none", "tokens", "flops"]),
)
def test_a_dynamic_global_batch_is_one_step_that_leaves_out_the_youngest(
    lengths: list[int], siblings: int, ranks: int, balance: str
) -> None:
    owners = [i // siblings for i in range(len(lengths))]
    arrived = owners[-1] + 1
    plan = plan_steps(
        config(use_dynamic_global_batch_size=True, balance=balance),
        lengths,
        owners,
        responses=[n // 2 for n in lengths],
        ranks=ranks,
        cost=CostModel(linear=1.0, quadratic=0.01, head=3.0),
    )
    [step] = plan.steps
    assert step.num_rollouts == arrived // ranks * ranks
    assert {owners[i] for i in plan.trimmed} == set(range(step.num_rollouts, arrived))
    dealt = [i for rank in step.ranks for batch in rank for i in batch]
    assert sorted([*dealt, *plan.trimmed]) == list(range(len(lengths)))
    assert len(step.ranks) == ranks and len({len(rank) for rank in step.ranks}) == 1
    assert all(sum(lengths[i] for i in batch) <= 512 for rank in step.ranks for batch in rank)
    assert plan.imbalance >= 1 - 1e-9


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=40), steps=st.integers(1, 5))
def test_static_steps_leave_nobody_out(lengths: list[int], steps: int) -> None:
    plan = plan_steps(config(num_steps_per_rollout=steps), lengths, range(len(lengths)))
    assert len(plan.steps) == min(steps, len(lengths)) and not plan.trimmed
    assert sorted(i for step in plan.steps for i in step.samples) == list(range(len(lengths)))


def test_too_few_trajectories_for_the_ranks_are_refused() -> None:
    with pytest.raises(BatchingError, match="2 trajectories cannot feed dp_size=3 ranks"):
        plan_steps(config(use_dynamic_global_batch_size=True), [5, 5, 5, 5], [0, 0, 1, 1], ranks=3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_choice_of_balance_decides_what_is_even(ranks: int) -> None:
    """A few long samples beside many short ones: as many tokens are not as much work."""
    lengths = [500] * 3 + [60] * 41
    price = CostModel(linear=1.0, quadratic=0.02)
    gaps = {}
    for balance in ("none", "tokens", "flops"):
        plan = plan_steps(config(balance=balance), lengths, range(len(lengths)), ranks=ranks, cost=price)
        [step] = plan.steps
        tokens = [sum(lengths[i] for batch in rank for i in batch) for rank in step.ranks]
        work = [sum(price(lengths[i]) for batch in rank for i in batch) for rank in step.ranks]
        gaps[balance] = {name: max(of) / (sum(of) / ranks) for name, of in (("tokens", tokens), ("flops", work))}
        assert plan.imbalance == pytest.approx(gaps[balance]["flops"])
    for measure in ("tokens", "flops"):
        assert gaps[measure][measure] <= min(gap[measure] for gap in gaps.values()) + 1e-9


@pytest.mark.parametrize(
    "shape",
    [
        Qwen3Config(**{**SHAPE, "head_dim": 16}, tie_word_embeddings=True),  # heads wider than the hidden size
        LlamaConfig(**{**SHAPE, "head_dim": None, "num_key_value_heads": 4}, tie_word_embeddings=False),
    ],
    ids=["qwen3", "llama"],
)
@pytest.mark.parametrize("tokens", [7, 40])
def test_the_cost_of_a_sample_is_what_the_model_computes(shape: Any, tokens: int) -> None:
    model: Any = AutoModelForCausalLM.from_config(shape, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    cost = cost_of(shape)
    # Eager attention also computes the half of the pairs that the causal mask leaves out; two operations a multiply-add.
    masked = cost.quadratic * tokens**2
    assert counter.get_total_flops() == 2 * (cost(tokens, tokens) + masked)
