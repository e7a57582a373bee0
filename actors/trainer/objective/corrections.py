"""Off-policy corrections: weights on the policy loss from old (trainer) against rollout (engine) log-probs.

Each is a pure function (config, inputs) -> Correction. Weights are constants: no gradient. Rejection removes
tokens from numerators only; denominators stay what they were. Reference section 4.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from actors.trainer.objective.segments import RAW_LIMIT, ratio_of, segment_sum
from actors.trainer.objective_config import ObjectiveConfig


@dataclass(frozen=True, slots=True)
class CorrectionInputs:
    """What a correction sees, T tokens of S samples.

    log_ratio float [T]: old - rollout, clean (0 where unusable, infinite = +-80), else unclamped; mask bool [T]:
    trained tokens; index int64 [T]; counts float [S]: trained tokens per sample; weight_mean: the step's mean MIS
    weight, 1 to leave weights alone.
    """

    log_ratio: Tensor
    mask: Tensor
    index: Tensor
    counts: Tensor
    weight_mean: float = 1.0

    def sums(self, x: Tensor) -> Tensor:
        """Of x [T], by sample [S]."""
        return segment_sum(x, self.index, self.counts.numel())

    def means(self, x: Tensor) -> Tensor:
        """The same over trained tokens; x is 0 at the others."""
        return self.sums(x) / self.counts.clamp(min=1)


@dataclass(frozen=True, slots=True)
class Correction:
    """weights float [T] (None: all 1) and the tokens that still count, bool [T]; plus values to reduce as metrics."""

    weights: Tensor | None
    mask: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """name -> float [T], reduced with the mask before rejection"""


def none(cfg: ObjectiveConfig, x: CorrectionInputs) -> Correction:
    return Correction(weights=None, mask=x.mask)


def _tis_metrics(ratio: Tensor, weights: Tensor) -> dict[str, Tensor]:
    return {"tis": ratio, "tis_abs": (ratio - 1).abs(), "tis_clipfrac": (weights != ratio).to(ratio.dtype)}


def tis(cfg: ObjectiveConfig, x: CorrectionInputs) -> Correction:
    """w = clamp(exp(old - rollout), tis_clip_low, tis_clip). Truncated importance sampling; Reference A10."""
    ratio = ratio_of(x.log_ratio, RAW_LIMIT)
    weights = ratio.clamp(cfg.tis_clip_low, cfg.tis_clip)
    return Correction(weights, x.mask, _tis_metrics(ratio, weights))


def icepop(cfg: ObjectiveConfig, x: CorrectionInputs) -> Correction:
    """w = rho if tis_clip_low <= rho <= tis_clip else 0. Reference A12."""
    ratio = ratio_of(x.log_ratio, RAW_LIMIT)
    inside = (ratio >= cfg.tis_clip_low) & (ratio <= cfg.tis_clip)
    weights = torch.where(inside, ratio, torch.zeros_like(ratio))
    return Correction(weights, x.mask, _tis_metrics(ratio, weights))


def decoupled(cfg: ObjectiveConfig, x: CorrectionInputs) -> Correction:
    """w = min(exp(prox - rollout), decoupled_cap): decoupled PPO, the clip is around prox, the weight back to the
    behaviour policy. arXiv 2110.00641, AReaL arXiv 2505.24298."""
    ratio = ratio_of(x.log_ratio)
    weights = ratio.clamp(max=cfg.decoupled_cap)
    return Correction(weights, x.mask, _tis_metrics(ratio, weights))


def interpolated_proximal(new_logp: Tensor, rollout_logp: Tensor, staleness: Tensor) -> Tensor:
    """Stand-in for the recomputed proximal log-prob: alpha rollout + (1 - alpha) new, alpha = 1/d (0 for d = 0),
    d the token's staleness in policy versions; no gradient. All [T]. A-3PO, arXiv 2512.06547."""
    with torch.no_grad():
        alpha = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1).to(new_logp.dtype), 0.0)
        return torch.where(alpha == 0, new_logp, alpha * rollout_logp + (1 - alpha) * new_logp)


def opsm_mask(advantages: Tensor, log_ratio: Tensor, x: CorrectionInputs, delta: float) -> tuple[Tensor, Tensor]:
    """Off-policy sequence masking -> (keep bool [T], dropped share of each sample's trained tokens [S]).

    A token is dropped iff A_t < 0 and its sequence's mean(old - new) > delta. log_ratio is new - old [T], clean.
    Masked tokens count neither in the mean nor in the share. Reference A14.
    """
    with torch.no_grad():
        drift = -x.means(log_ratio.detach())
        drop = (advantages < 0) & (drift[x.index] > delta)
        return ~drop, x.means((drop & x.mask).to(log_ratio.dtype))


CORRECTIONS: dict[str, Callable[[ObjectiveConfig, CorrectionInputs], Correction]] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "decoupled": decoupled,
}
"""`mis` registers itself from mis.py, custom functions from the trainer, both before settings are checked."""
