"""Batch plans against the golden cases: exact where static, invariants everywhere else."""

from __future__ import annotations

import pytest

from actors.trainer.batch.batching import CostModel, StepPlan, plan_step
from actors.trainer.batch.packing import BatchingError, lower_bound

ORACLE = ("dynamic_batching",)
COST = CostModel.of_shape(hidden=16, layers=2, ffn=64, vocab=32, heads=2, kv_heads=2, head_dim=8)


def steps_of(case):
    """Samples of each step: whole trajectories in order, and a partial last step where the case allows one."""
    p, rollouts = case["params"], case["inputs"]["rollout_indices"]
    groups = {r: [i for i, other in enumerate(rollouts) if other == r] for r in rollouts}
    whole, size = list(groups.values()), p["global_batch_size"]
    cuts = [whole[k : k + size] for k in range(0, len(whole), size)]
    partial = p.get("allow_partial_train_step", False) and p["dynamic"]
    steps = [sorted(i for group in cut for i in group) for cut in cuts if len(cut) == size or partial]
    return [step for step in steps if len(step) >= p["dp_size"] or len(step) == size]


def build(case):
    p, x = case["params"], case["inputs"]
    balance = "flops" if p.get("balance_by_flops") else "tokens" if p.get("balance_data") else "none"
    plans = []
    for at in steps_of(case) or [[]]:
        lengths = [x["total_lengths"][i] for i in at]
        plan = plan_step(
            lengths,
            [x["rollout_indices"][i] for i in at],
            dp_size=p["dp_size"],
            cp_size=p["cp_size"],
            max_tokens_per_gpu=p["max_tokens_per_gpu"] if p["dynamic"] else None,
            micro_batch_size=None if p["dynamic"] else p["micro_batch_size"],
            mb_group=p.get("mb_group", 1) if p.get("vpp_size", 1) > 1 else 1,
            balance=balance,
            costs=[COST(n) for n in lengths],
        )
        ranks = tuple(tuple(tuple(at[i] for i in mb) for mb in rank) for rank in plan.ranks)
        plans.append(StepPlan(tuple(at), plan.num_rollouts, ranks))
    return plans


def test_batch_plan_matches_the_oracle(case):
    want, p, x = case["expected"], case["params"], case["inputs"]
    if "raises" in want:
        with pytest.raises(BatchingError):
            build(case)
        return
    steps = build(case)
    lengths, cap = x["total_lengths"], case["cap"]
    align = p["dp_size"] * (p.get("mb_group", 1) if p.get("vpp_size", 1) > 1 else 1)
    assert [s.num_rollouts for s in steps] == want["num_rollouts"]  # I7
    assert sorted(i for s in steps for i in s.samples) == sorted(want["kept_samples"])
    for step, theirs in zip(steps, want["steps"], strict=True):
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
