"""Masked importance sampling: ratio per token, sequence or geometric mean; truncated, clipped or masked; with
rejection sampling, veto and normalisation over the whole step. Reference section 4.6.

l_t = old - rollout. token: l_t; sequence: sum m l; geometric: mean of trained l (both broadcast).
rho = exp(clamp(l, +-20)). truncate: min(rho, up); clip: clamp(rho, lo, up); mask: rho, and tokens with rho
outside [lo, up] leave the numerators. lo defaults to 1/up. Weights are 0 at masked tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actors.trainer.objective.corrections import CORRECTIONS, Correction, CorrectionInputs
from actors.trainer.objective.segments import RAW_LIMIT, keep, ratio_of
from actors.trainer.objective_config import Level, ObjectiveConfig

NORM_FLOOR = 1e-8
"""A mean weight at or below this is no normaliser: weights stay as they are."""


def level_ratio(level: Level, x: CorrectionInputs) -> Tensor:
    """rho [T] at a level; meaningless at masked tokens."""
    if level == "token":
        return ratio_of(x.log_ratio)
    of_sample = x.sums if level == "sequence" else x.means
    return ratio_of(of_sample(keep(x.mask, x.log_ratio)))[x.index]


def _bounds(cfg: ObjectiveConfig) -> tuple[float, float]:
    upper = cfg.tis_upper_bound
    return (1.0 / upper if cfg.tis_lower_bound is None else cfg.tis_lower_bound), upper


def bounded_weights(cfg: ObjectiveConfig, x: CorrectionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(rho, weights before normalisation, tokens kept), all [T]."""
    lower, upper = _bounds(cfg)
    rho = level_ratio(cfg.tis_level, x)
    if cfg.tis_mode == "truncate":
        return rho, keep(x.mask, rho.clamp(max=upper)), x.mask
    if cfg.tis_mode == "clip":
        return rho, keep(x.mask, rho.clamp(lower, upper)), x.mask
    return rho, keep(x.mask, rho), x.mask & (rho >= lower) & (rho <= upper)


def rejection(cfg: ObjectiveConfig, x: CorrectionInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens accepted by the rs_level ratio within [rs_lower, rs_upper], and by the veto: one trained token with
    ratio below rs_veto_threshold rejects its whole sample -> (bool [T], metrics)."""
    lower, upper = _bounds(cfg)
    lower = lower if cfg.rs_lower_bound is None else cfg.rs_lower_bound
    upper = upper if cfg.rs_upper_bound is None else cfg.rs_upper_bound
    rho = level_ratio(cfg.rs_level, x)
    dtype = rho.dtype
    metrics = {
        "mis_rs_mask_fraction_low": (rho < lower).to(dtype),
        "mis_rs_mask_fraction_high": (rho > upper).to(dtype),
    }
    accepted = x.mask & (rho >= lower) & (rho <= upper)
    if cfg.rs_veto_threshold:
        worst = x.mask & (x.log_ratio < math.log(cfg.rs_veto_threshold))
        vetoed = (x.sums(worst.to(dtype)) > 0)[x.index]
        metrics["mis_rs_catastrophic_token_fraction"] = worst.to(dtype)
        metrics["mis_rs_catastrophic_seq_fraction"] = vetoed.to(dtype)
        accepted = accepted & ~vetoed
    return accepted, metrics


def norm_sums(cfg: ObjectiveConfig, x: CorrectionInputs) -> Tensor:
    """float64 [2]: numerator and count of the step's mean weight; add over micro-batches and ranks, then divide.

    token level: sum of weights, trained tokens. sequence level: sum over samples of their mean weight, samples
    with at least one trained token. Masks before rejection.
    """
    _, weights, _ = bounded_weights(cfg, x)
    if cfg.tis_level == "sequence":
        return torch.stack([x.means(weights).double().sum(), (x.counts > 0).double().sum()])
    if cfg.tis_level == "geometric":
        raise ValueError("tis_batch_normalize is undefined for tis_level=geometric. Choose token or sequence.")
    return torch.stack([weights.double().sum(), x.mask.double().sum()])


def norm_factor(sums: Tensor) -> float:
    """The divisor of all weights of the step, 1 when there is nothing to divide by."""
    total, count = sums.tolist()
    mean = total / count if count > 0 else 0.0
    return mean if mean > NORM_FLOOR else 1.0


def divergence_metrics(log_ratio: Tensor, x: CorrectionInputs) -> dict[str, Tensor]:
    """k1 and k3 of rollout against old, token and sequence chi-square, per token [T] (sequence values broadcast)."""
    limit2 = log_ratio.clamp(-20.0, 20.0) * 2
    token_chi2 = x.means(keep(x.mask, torch.exp(limit2))) - 1
    total = x.sums(keep(x.mask, log_ratio))
    return {
        "mis_kl": -log_ratio,
        "mis_k3_kl": ratio_of(log_ratio, RAW_LIMIT) - log_ratio - 1,
        "mis_chi2_token": token_chi2[x.index],
        "mis_chi2_seq": (torch.exp(total.clamp(-20.0, 20.0) * 2) - 1)[x.index],
    }


def perplexity_metrics(old: Tensor, rollout: Tensor, x: CorrectionInputs) -> dict[str, Tensor]:
    """Log-perplexities of both policies per sample, broadcast to tokens, and their gap. Inputs clean, [T]."""
    train, roll = -x.means(keep(x.mask, old)), -x.means(keep(x.mask, rollout))
    gap = train - roll
    per_sample = {
        "mis_training_log_ppl": train,
        "mis_training_ppl": train.exp(),
        "mis_rollout_log_ppl": roll,
        "mis_rollout_ppl": roll.exp(),
        "mis_log_ppl_diff": gap,
        "mis_log_ppl_abs_diff": gap.abs(),
        "mis_ppl_ratio": gap.exp(),
    }
    return {name: value[x.index] for name, value in per_sample.items()}


def mis(cfg: ObjectiveConfig, x: CorrectionInputs) -> Correction:
    """Weights, accepted tokens and metrics for one micro-batch; `weight_mean` carries the step's normaliser."""
    lower, upper = _bounds(cfg)
    rho, weights, accepted = bounded_weights(cfg, x)
    dtype = rho.dtype
    metrics = divergence_metrics(x.log_ratio, x)
    metrics["mis_tis_weight_before_bound"] = rho
    low, high = (rho < lower).to(dtype), (rho > upper).to(dtype)
    if cfg.tis_mode == "truncate":
        metrics["mis_tis_truncate_fraction"] = high
    else:
        metrics[f"mis_tis_{cfg.tis_mode}_fraction_low"] = low
        metrics[f"mis_tis_{cfg.tis_mode}_fraction_high"] = high
    metrics["mis_tis_weight_after_bound"] = weights
    if cfg.use_rs:
        passed, rs_metrics = rejection(cfg, x)
        accepted = accepted & passed
        metrics |= rs_metrics
    metrics["mis_is_ratio_mean_after_tis_rs"] = weights
    if cfg.tis_batch_normalize:
        metrics["mis_batch_norm_factor"] = torch.full_like(weights, x.weight_mean)
        weights = weights / x.weight_mean
    metrics["mis_is_ratio_mean_final"] = weights
    metrics["mis_rejected_fraction"] = (x.mask & ~accepted).to(dtype)
    return Correction(weights, accepted, metrics)


CORRECTIONS["mis"] = mis
