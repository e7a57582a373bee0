"""On-policy distillation as a penalty on any estimator's advantage. Reference A6 and section 4.5."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from actors.trainer.objective.advantages import MissingInputError
from actors.trainer.objective.segments import keep


def opd_penalty(
    advantages: Tensor,
    mask: Tensor,
    coef: float,
    *,
    student: Tensor | None = None,
    teacher: Tensor | None = None,
    reverse_kl: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A_t - coef * rk_t -> (new advantages [T], rk [T]); rk = student - teacher unless given, 0 at masked tokens.

    A new tensor: returns never change. Applied before whitening. Neither teacher nor reverse_kl: MissingInputError.
    """
    if reverse_kl is None:
        if teacher is None or student is None:
            raise MissingInputError(
                "use_opd needs teacher and student log-probs or a precomputed reverse KL; none was given. Set "
                "opd_teacher_load."
            )
        reverse_kl = student - teacher
    rk = keep(mask, reverse_kl.to(advantages.dtype))
    return advantages - coef * rk, rk


def topk_reverse_kl(
    student: Tensor, teacher: Tensor, chosen: Tensor, *, weight: Literal["student_p", "teacher_p", "none"] = "student_p"
) -> Tensor:
    """sum_k w_k (s_k - t_k) per token over a chosen set of vocabulary entries.

    student, teacher float [T, K] log-probs; chosen bool [T, K]; w = probabilities of student or teacher
    normalised over the chosen set, or 1. Returns float [T], 0 where nothing is chosen.
    """
    gap = keep(chosen, student - teacher)
    if weight == "none":
        return gap.sum(-1)
    source = student if weight == "student_p" else teacher
    logits = torch.where(chosen, source, torch.full_like(source, -torch.inf))
    any_chosen = chosen.any(-1, keepdim=True)
    w = torch.softmax(torch.where(any_chosen, logits, torch.zeros_like(logits)), -1)
    return (keep(chosen, w) * gap).sum(-1)
