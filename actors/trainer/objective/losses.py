"""Policy losses per token: (config, terms) -> TokenLoss.

Terms are clean: 0 log-ratio and 0 advantage at every masked or unusable token. Losses are minimised; a positive
advantage raises the token's probability. Reference sections 4.2 and 4.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.trainer.objective.segments import LOG_RATIO_LIMIT, keep, ratio_of, segment_sum
from actors.trainer.objective_config import ObjectiveConfig


@dataclass(frozen=True, slots=True)
class Terms:
    """All [T] float except `usable` bool [T], `index` int64 [T] and `counts` float [S] (trained tokens)."""

    log_ratio: Tensor
    """new - old, gradient through new"""
    new_logp: Tensor
    """log-probs of the current policy, 0 where unusable"""
    old_logp: Tensor
    """the denominator, 0 where unusable; no gradient"""
    advantages: Tensor
    usable: Tensor
    index: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """loss float [T], before corrections; clipped bool [T]; log_ratio float [T]: the exponent of the ratio used."""

    loss: Tensor
    clipped: Tensor
    log_ratio: Tensor


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> tuple[Tensor, Tensor]:
    """L = max(-rA, -clip(r, 1-low, 1+high) A); clipped where the second is larger. arXiv 1707.06347.

    high > low is DAPO's clip-higher (arXiv 2503.14476). dual = c > 1 bounds the loss of A < 0 by -cA
    (arXiv 1912.09729).
    """
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - low, 1.0 + high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual is not None:
        if dual <= 1:
            raise ValueError(f"eps_clip_c={dual}: dual clip needs a value > 1.")
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss, clipped


def _clipped(cfg: ObjectiveConfig, t: Terms, log_ratio: Tensor) -> TokenLoss:
    loss, clipped = ppo_clip(ratio_of(log_ratio), t.advantages, cfg.eps_clip, cfg.clip_high, cfg.eps_clip_c)
    return TokenLoss(loss, clipped, log_ratio)


def ppo(cfg: ObjectiveConfig, t: Terms) -> TokenLoss:
    """Token-level PPO with clip-higher and dual clip."""
    return _clipped(cfg, t, t.log_ratio)


def sequence_log_ratio(t: Terms) -> Tensor:
    """Mean log-ratio of the trained tokens of each sample, broadcast to its tokens [T]; gradient through the mean."""
    mean = segment_sum(t.log_ratio, t.index, t.counts.numel()) / t.counts.clamp(min=1)
    return keep(t.usable, mean[t.index])


def gspo(cfg: ObjectiveConfig, t: Terms) -> TokenLoss:
    """PPO with one ratio per sequence, exp(mean log-ratio). arXiv 2507.18071."""
    return _clipped(cfg, t, sequence_log_ratio(t))


def cispo(cfg: ObjectiveConfig, t: Terms) -> TokenLoss:
    """-sg(clip(r, 1-low, 1+high)) A log pi: clips the weight, keeps every token's gradient. arXiv 2506.13585.

    eps_clip = 1 switches the lower bound off, as in the paper. `clipped` marks ratios outside the bounds.
    """
    ratio = ratio_of(t.log_ratio.detach())
    weight = ratio.clamp(1.0 - cfg.eps_clip, 1.0 + cfg.clip_high)
    logp = t.new_logp.nan_to_num(neginf=-LOG_RATIO_LIMIT)
    return TokenLoss(-weight * t.advantages * logp, (weight != ratio) & t.usable, t.log_ratio)


def binary_divergence(kind: str, new_logp: Tensor, old_logp: Tensor) -> Tensor:
    """Divergence of the two-outcome distributions {sampled token, any other}, no gradient. float [T] -> [T].

    tv: |p - q|; kl: KL(q || p) with q the old and p the new probability.
    """
    with torch.no_grad():
        p, q = new_logp.exp().clamp(max=1.0), old_logp.exp().clamp(max=1.0)
        if kind == "tv":
            return (p - q).abs()
        tiny = torch.finfo(p.dtype).tiny
        rest_p, rest_q = (1 - p).clamp(min=tiny), (1 - q).clamp(min=tiny)
        p, q = p.clamp(min=tiny), q.clamp(min=tiny)
        return q * (q.log() - p.log()) + rest_q * (rest_q.log() - rest_p.log())


def dppo(cfg: ObjectiveConfig, t: Terms) -> TokenLoss:
    """-M w A with w = min(r, dppo_cap) and gradient -M sg(w) A grad log pi. M = 0 where the update would leave the trust region
    further: the binary divergence exceeds dppo_delta and the ratio already moved in the advantage's direction.
    DPPO, arXiv 2602.04879."""
    ratio = ratio_of(t.log_ratio.detach())
    outward = torch.where(t.advantages > 0, ratio > 1, ratio < 1) & (t.advantages != 0)
    blocked = outward & t.usable & (binary_divergence(cfg.dppo_divergence, t.new_logp, t.old_logp) > cfg.dppo_delta)
    logp = t.new_logp.nan_to_num(neginf=-LOG_RATIO_LIMIT)
    surrogate = 1.0 + logp - logp.detach()  # 1, with the gradient of log pi: the cap bounds a token's pull and does not end it
    return TokenLoss(keep(~blocked, -ratio.clamp(max=cfg.dppo_cap) * t.advantages * surrogate), blocked, t.log_ratio)


def nll(cfg: ObjectiveConfig, t: Terms) -> TokenLoss:
    """-log pi of the data's own tokens: supervised training. Advantages and ratios have no part in it."""
    logp = t.new_logp.nan_to_num(neginf=-LOG_RATIO_LIMIT)
    return TokenLoss(-logp, torch.zeros_like(t.usable), t.log_ratio)


POLICY_LOSSES: dict[str, Callable[[ObjectiveConfig, Terms], TokenLoss]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "nll": nll,
}
"""Choosing gspo or cispo as the estimator chooses the loss too; any loss combines with any estimator."""
