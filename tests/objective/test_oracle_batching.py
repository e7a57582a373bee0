"""Batch plans against the golden cases: exact where static, invariants everywhere else."""

from __future__ import annotations

import pytest

from actors.trainer.batching import CostModel, plan_batches
from actors.trainer.packing import BatchingError, lower_bound

ORACLE = ("dynamic_batching",)
COST = CostModel.of_shape(hidden=16, layers=2, ffn=64, vocab=32, heads=2, kv_heads=2, head_dim=8)


def build(case):
    p, x = case["params"], case["inputs"]
    balance = "flops" if p.get("balance_by_flops") else "tokens" if p.get("balance_data") else "none"
    return plan_batches(
        x["total_lengths"],
        x["rollout_indices"],
        global_batch_size=p["global_batch_size"],
        dp_size=p["dp_size"],
        cp_size=p["cp_size"],
        max_tokens_per_gpu=p["max_tokens_per_gpu"] if p["dynamic"] else None,
        micro_batch_size=None if p["dynamic"] else p["micro_batch_size"],
        mb_group=p.get("mb_group", 1) if p.get("vpp_size", 1) > 1 else 1,
        allow_partial=p.get("allow_partial_train_step", False),
        balance=balance,
        costs=[COST(n) for n in x["total_lengths"]],
    )


def test_batch_plan_matches_the_oracle(case):
    want, p, x = case["expected"], case["params"], case["inputs"]
    if "raises" in want:
        with pytest.raises(BatchingError):
            build(case)
        return
    plan = build(case)
    lengths, cap = x["total_lengths"], case["cap"]
    align = p["dp_size"] * (p.get("mb_group", 1) if p.get("vpp_size", 1) > 1 else 1)
    assert [s.num_rollouts for s in plan.steps] == want["num_rollouts"]  # I7
    assert sorted(i for s in plan.steps for i in s.samples) == sorted(want["kept_samples"])
    assert not set(plan.dropped) & set(want["kept_samples"])
    for step, theirs in zip(plan.steps, want["steps"], strict=True):
        flat = [i for rank in step.ranks for mb in rank for i in mb]
        assert sorted(flat) == sorted(step.samples) == sorted(theirs["samples"])  # I1, I4
        assert len({len(rank) for rank in step.ranks}) == 1 and len(step.ranks) == p["dp_size"]  # I2
        assert all(mb for rank in step.ranks for mb in rank)  # I6
        total = sum(len(rank) for rank in step.ranks)
        assert total % align == 0  # I5
        if not p["dynamic"]:
            assert [[list(mb) for mb in rank] for rank in step.ranks] == theirs["micro_batches_by_rank"]
            continue
        for rank in step.ranks:
            for mb in rank:
                assert sum(lengths[i] for i in mb) <= cap or len(mb) == 1  # I3
        assert total >= theirs["lower_bound_total"]  # I5
        assert lower_bound([lengths[i] for i in step.samples], cap, align) == theirs["lower_bound_total"]
        assert total <= theirs["total_microbatches"] or case["defect"]  # I8
        if p.get("balance_data"):
            ours = [sum(lengths[i] for mb in rank for i in mb) for rank in step.ranks]
            assert max(ours) <= max(theirs["tokens_by_rank"]) * 1.01
    assert set(plan.over_cap) == {i for s in plan.steps for i in s.samples if cap and lengths[i] > cap}
    assert len(plan.warnings) == len(plan.over_cap)
