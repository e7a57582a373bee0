"""Settings and kinds to start a test from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bus.messages.control import Kind

PLAIN: dict[str, Any] = {
    "rollout_batch_size": 4,
    "over_sampling_batch_size": 4,
    "max_weight_staleness": 1,
    "staleness_policy": "whole",
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_max_response_len": 16,
    "max_tokens_per_slice": 0,
    "partial_save_tokens": 8,
    "sglang_server_concurrency": 8,
    "sglang_concurrency_min": 1,
    "sglang_concurrency_max": 0,
    "max_masked_fraction": 0.0,
    "tail_slots": 0,
    "tail_after_tokens": 0,
    "pause_generation_mode": "retract",
    "reward_timeout_s": 5.0,
    "dynamic_sampling_filter_path": "none",
    "max_waves": 0,
    "lr": 1e-3,
    "clip_grad": 1.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "kl_loss_coef": 0.0,
    "entropy_coef": 0.0,
    "tis_clip": 2.0,
    "save_interval": 2,
    "eval_interval": 0,
    "eval_share": 0.25,
    "n_samples_per_prompt": 2,
    "num_steps_per_rollout": 1,
    "update_weights_interval": 1,
}


FIXED = ("n_samples_per_prompt", "num_steps_per_rollout", "update_weights_interval")


def plain_knobs(**changes: Any) -> dict[str, Any]:
    """`PLAIN` with changes, for `publish_initial`."""
    return {**PLAIN, **changes}


def plain_kinds(values: Mapping[str, Any] = PLAIN) -> dict[str, Kind]:
    """All but `FIXED` are live, without bounds, and of the type that they have now."""
    kinds: dict[str, Kind] = {}
    for name, value in values.items():
        for word, of in (("bool", bool), ("int", int), ("float", float), ("str", str)):
            if isinstance(value, of) and name not in FIXED:
                kinds.setdefault(name, Kind(type=word, optional=True))  # type: ignore[arg-type]
    return kinds


__all__ = ("FIXED", "PLAIN", "plain_kinds", "plain_knobs")
