"""Settings and patches of random runs, each from a seed: what the rules refuse is drawn again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.crash.house import Tables, evaluating, merged

Patch = list[str]


def settings_of(chance: Random, toy: Path, *, n_samples: int, shuffle: bool) -> Tables:
    """Tables of one start. `n_samples` and `shuffle` stay as they were when the run began: no other ones are taken up."""
    bound = chance.choice([0, 1, 2, 2, 3, 4])
    batch = chance.choice([2, 3, 4, 6])
    rules = ["auto", "split", "whole", "member", "wait", "drop"] if bound else ["auto", "whole"]
    tables: Tables = {
        "rollout": {
            "max_weight_staleness": bound,
            "n_samples_per_prompt": n_samples,
            "rollout_shuffle": shuffle,
            "rollout_batch_size": batch,
            "over_sampling_batch_size": chance.choice([None, batch, batch + 2, 3 * batch]),
            "staleness_policy": chance.choice(rules),
            "partial_rollout": chance.random() < 0.7,
            "rollout_max_response_len": chance.choice([24, 48, 64]),
            "max_tokens_per_slice": chance.choice([None, None, None, 12]),
            "update_weights_interval": chance.choice([1, 1, 1, 2, 3]),
            "dynamic_sampling_filter_path": chance.choice(["none", "check_reward_nonzero_std"]),
        },
        "sglang": {
            "num_generation_workers": chance.choice([1, 1, 2, 3]),
            "sglang_server_concurrency": chance.choice([4, 8, 16]),
        },
        "ckpt": {"save_interval": chance.choice([1, 2, 3])},
        "grpo": {
            "advantage_estimator": chance.choice(["grpo", "grpo", "gspo", "reinforce_plus_plus_baseline"]),
            "num_steps_per_rollout": chance.choice([1, 1, 2]),
        },
    }
    return merged(tables, evaluating(toy)) if chance.random() < 0.4 else tables


PATCHES: dict[str, Callable[[Random], Any]] = {
    "max_weight_staleness": lambda chance: chance.choice([0, 1, 2, 3, 4, 6]),
    "staleness_policy": lambda chance: chance.choice(["auto", "split", "whole", "member", "wait", "drop"]),
    "rollout_batch_size": lambda chance: chance.choice([2, 3, 4, 6]),
    "over_sampling_batch_size": lambda chance: chance.choice([0, 2, 4, 6, 12]),
    "global_batch_size": lambda chance: chance.choice([4, 8, 12, 16, 24]),
    "save_interval": lambda chance: chance.choice([1, 2, 3, 7]),
    "rollout_max_response_len": lambda chance: chance.choice([8, 24, 48, 64]),
    "partial_save_tokens": lambda chance: chance.choice([1, 8, 32]),
    "max_tokens_per_slice": lambda chance: chance.choice([5, 12, 40, "none"]),
    "eval_interval": lambda chance: chance.choice([1, 2, 3]),
    "eval_share": lambda chance: chance.choice([0.05, 0.5, 1]),
    "sglang_server_concurrency": lambda chance: chance.choice([1, 2, 4, 8, 16, "auto"]),
    "tail_slots": lambda chance: chance.choice([1, 2]),
    "tail_after_tokens": lambda chance: chance.choice([8, 30]),
    "pause_generation_mode": lambda chance: chance.choice(["retract", "in_place", "abort"]),
    "lr": lambda chance: chance.choice([0, 1e-3, 1e-2]),
    "clip_grad": lambda chance: chance.choice([0, 1]),
    "dynamic_sampling_filter_path": lambda chance: chance.choice(["none", "check_reward_nonzero_std"]),
    "reward_version": lambda chance: chance.choice([1, 2, 3, 4]),
    "max_masked_fraction": lambda chance: chance.choice([0.01, 0.5]),
}


def patch_of(chance: Random) -> Patch:
    """One to three live settings, as `miles-async tune` takes them."""
    return [f"{name}={PATCHES[name](chance)}" for name in chance.sample(sorted(PATCHES), chance.choice([1, 1, 2, 3]))]
