"""The functions that estimators' records name: (config, tokens) -> (advantages [T], returns [T]) in float64.

Shapes: T packed response tokens of S samples, see `segments`. `rewards` [S] are already group-normalised where
the estimator has a baseline. KL inside the reward counts trained tokens only. Reference 4.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.trainer.objective.kl import masked_kl
from actors.trainer.objective.segments import keep, reverse_scan, segment_sum
from actors.trainer.objective_config import ObjectiveConfig
from actors.trainer.objective_estimators import ESTIMATORS


class MissingInputError(ValueError):
    """The estimator or loss needs a tensor that was not supplied; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """rewards float [S]; mask bool [T]; index int64 [T]; lengths int64 [S]; the rest float [T] or None."""

    rewards: Tensor
    mask: Tensor
    index: Tensor
    lengths: Tensor
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    values: Tensor | None = None


def needed(x: Tensor | None, name: str, why: str) -> Tensor:
    """The tensor, where it was given. Raises MissingInputError."""
    if x is None:
        raise MissingInputError(f"{why} needs {name} and no sample has it. Compute it or change the setting.")
    return x


def reward_kl(cfg: ObjectiveConfig, x: AdvantageInputs) -> Tensor:
    """kl_coef * KL(old || ref) per token [T], 0 at masked tokens: tokens the policy did not emit are not charged."""
    if cfg.kl_coef == 0:
        return torch.zeros(x.mask.numel(), dtype=torch.float64, device=x.mask.device)
    old = needed(x.old_logp, "old_logp", f"kl_coef={cfg.kl_coef}").to(torch.float64)
    ref = needed(x.ref_logp, "ref_logp", f"kl_coef={cfg.kl_coef}").to(torch.float64)
    return cfg.kl_coef * masked_kl(cfg.kl_loss_type, x.mask, old, ref)[0]


def _last_trained(x: AdvantageInputs) -> Tensor:
    """Positions [<= S] of the last trained token of each sample that has one, and nothing for the others."""
    position = torch.arange(x.mask.numel(), device=x.mask.device)
    last = torch.full((x.lengths.numel(),), -1, dtype=torch.int64, device=x.mask.device)
    last = last.scatter_reduce(0, x.index, torch.where(x.mask, position, -1), reduce="amax")
    return last[last >= 0]


def _shaped_rewards(cfg: ObjectiveConfig, x: AdvantageInputs) -> Tensor:
    """rho_t = -kl_coef kl_t, plus the sample's reward at its last trained token. float64 [T]."""
    rho = -reward_kl(cfg, x)
    last = _last_trained(x)
    rho[last] += x.rewards.to(torch.float64)[x.index[last]]
    return rho


def broadcast(cfg: ObjectiveConfig, x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """A_t = return_t = R_i on every token (grpo, gspo, cispo, rloo, maxrl)."""
    a = x.rewards.to(torch.float64)[x.index]
    return a, a.clone()


def _over_steps(x: AdvantageInputs, per_step: Tensor, factor: float) -> Tensor:
    """G_k = x_k + factor G_{k+1} over each sample's trained tokens: tokens of tools and environments are no steps of the policy.
    per_step float [K], K trained tokens of all samples -> float64 [K]."""
    return reverse_scan(per_step, segment_sum(x.mask.to(torch.int64), x.index, x.lengths.numel()), factor)


def _at_trained(x: AdvantageInputs, per_step: Tensor) -> Tensor:
    """[K] -> [T], 0 at masked tokens."""
    out = torch.zeros(x.mask.numel(), dtype=per_step.dtype, device=per_step.device)
    out[x.mask] = per_step
    return out


def discounted(cfg: ObjectiveConfig, x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++, over trained tokens only, k = 0..K-1: A_k = G_k = rho_k + gamma G_{k+1}; masked tokens 0. arXiv 2501.03262."""
    g = _at_trained(x, _over_steps(x, _shaped_rewards(cfg, x)[x.mask], cfg.gamma))
    return g, g.clone()


def reward_minus_kl(cfg: ObjectiveConfig, x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a baseline: A_t = R_i - kl_coef kl_t, R_i centred on its group."""
    a = x.rewards.to(torch.float64)[x.index] - reward_kl(cfg, x)
    return a, a.clone()


def gae(cfg: ObjectiveConfig, x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """PPO. Over trained tokens only, k = 0..K-1: delta_k = rho_k + gamma V_{k+1} - V_k, V_K = 0;
    A_k = delta_k + gamma lambda A_{k+1}; return_k = A_k + V_k; masked tokens 0. arXiv 1506.02438."""
    values = needed(x.values, "values", "advantage_estimator=ppo").to(torch.float64)
    rho = _shaped_rewards(cfg, x)[x.mask]
    index, v = x.index[x.mask], values[x.mask]
    v_next = torch.zeros_like(v)
    v_next[:-1] = torch.where(index[1:] == index[:-1], v[1:], 0.0)
    a = _over_steps(x, rho + cfg.gamma * v_next - v, cfg.gamma * cfg.lambd)
    return _at_trained(x, a), _at_trained(x, a + v)


def distilled(cfg: ObjectiveConfig, x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """On-policy distillation: A_t = teacher_t - student_t, the negative reverse-KL integrand; rewards are ignored. Reference A6."""
    teacher = needed(x.teacher_logp, "teacher_logp", "advantage_estimator=on_policy_distillation").to(torch.float64)
    student = needed(x.old_logp, "old_logp", "advantage_estimator=on_policy_distillation").to(torch.float64)
    a = keep(x.mask, teacher - student)
    return a, a.clone()


def advantage_of(estimator: str) -> Callable[[ObjectiveConfig, AdvantageInputs], tuple[Tensor, Tensor]]:
    """The function that an estimator's record names."""
    found: Callable[[ObjectiveConfig, AdvantageInputs], tuple[Tensor, Tensor]] = globals()[ESTIMATORS[estimator].advantage]
    return found


def opd_penalty(x: AdvantageInputs, advantages: Tensor, coef: float) -> tuple[Tensor, Tensor]:
    """On-policy distillation as a penalty on any estimator's advantage: A_t - coef * rk_t -> (new advantages [T], rk [T]);
    rk = student - teacher, 0 at masked tokens. Applied before whitening; returns never change. Reference A6 and section 4.5."""
    if x.teacher_logp is None or x.old_logp is None:
        raise MissingInputError("use_opd needs teacher and student log-probs; none was given. Set opd_teacher_load.")
    rk = keep(x.mask, (x.old_logp - x.teacher_logp).to(advantages.dtype))
    return advantages - coef * rk, rk
