"""What a simulated run is made of: its samples, its settings, its times."""

from __future__ import annotations

import msgspec

from actors.generation.slots import Limits

SHAPES = ("rollout_max_response_len", "dynamic_sampling_filter_path")  # what a change of makes other samples
ASKED = (
    *("max_weight_staleness", "staleness_policy", "staleness_lookahead", "over_sampling_batch_size"),
    *("rollout_batch_size", "n_samples_per_prompt", "update_weights_interval", "sglang_server_concurrency"),
    *("sglang_concurrency_min", "sglang_concurrency_max", "max_masked_fraction"),
    *("num_generation_workers", "tail_slots", "tail_after_tokens", "max_tokens_per_slice", "partial_rollout"),
)
"""Settings that the simulation knows."""


class Draw(msgspec.Struct, frozen=True):
    """What one sample asks for: tokens, seconds on an engine if it ran alone, seconds of scoring."""

    tokens: int
    seconds: float
    score_s: float = 0.0


class DrawnGroup(msgspec.Struct, frozen=True):
    """Samples of one prompt, and why the filter drops them; empty = it does not."""

    members: tuple[Draw, ...]
    reason: str = ""


class SimulatedKnobs(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the run under their own names; 0 for what is not set. `slots` are those of one worker; with `auto` those that it
    begins with, and moves within these limits."""

    max_weight_staleness: int
    staleness_policy: str
    rollout_batch_size: int
    n_samples_per_prompt: int
    over_sampling_batch_size: int = 0
    update_weights_interval: int = 1
    staleness_lookahead: int = 1
    slots: int = 64
    auto: Limits | None = None
    num_generation_workers: int = 1
    tail_slots: int = 0
    tail_after_tokens: int = 0
    max_tokens_per_slice: int = 0
    partial_rollout: bool = True
    aborts: bool = False  # running samples give their slots back at a weight update

    @property
    def size(self) -> int:
        """Samples of a batch."""
        return self.rollout_batch_size * self.n_samples_per_prompt


class SimulatedPace(msgspec.Struct, frozen=True, kw_only=True):
    """What takes time, in seconds; each list is drawn from at random. A training step takes `train_s + train_token_s * tokens`
    and one of `train_noise_s`; `between_s` pass from its end to the next look for a batch, `turned_s` until the filter has let
    go; a version is served `publish_s` after its step; then its engine stands still for `pause_s`. From one room to the next it
    takes `hop_s`. `slowdown`: see `Worker`."""

    train_s: float = 0.0
    train_token_s: float = 0.0
    train_noise_s: tuple[float, ...] = (0.0,)
    between_s: tuple[float, ...] = (0.0,)
    turned_s: tuple[float, ...] = (0.0,)
    publish_s: tuple[float, ...] = (0.0,)
    pause_s: tuple[float, ...] = (0.0,)
    hop_s: float = 0.0
    slowdown: float = 0.0
