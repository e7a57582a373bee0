"""Group reward normalisation against the golden vectors."""

from __future__ import annotations

import pytest
import torch

from actors.trainer.objective.rewards import RewardError, normalize_group_rewards

ORACLE = ("group_reward_normalization",)


def test_group_rewards_match_the_oracle(case, dtype, agree):
    p, x = case["params"], case["inputs"]
    n = len(x["rewards"])
    groups = x["group_index"]
    if x.get("prompt_group_sizes"):
        groups = [g for g, size in enumerate(x["prompt_group_sizes"]) for _ in range(size)]
    elif n and all(g is None for g in groups):
        per = p["n_samples_per_prompt"]
        groups = [i // per if n == per * p["rollout_batch_size"] else 0 for i in range(n)]
    rollouts = x["rollout_id"]
    rollouts = [s if r is None else r for r, s in zip(rollouts, x["sample_index"], strict=True)]
    rewards = torch.tensor(x["rewards"], dtype=dtype).tolist()

    def run():
        return normalize_group_rewards(
            rewards,
            groups,
            rollouts,
            estimator=p["advantage_estimator"],
            std=p["grpo_std_normalization"],
            enabled=p["rewards_normalization"],
        )

    if "raises" in case["expected"]:
        with pytest.raises(RewardError, match="trajectory"):
            run()
        return
    assert agree(case, {"normalized_rewards": run().values}, dtype) == ["normalized_rewards"]
