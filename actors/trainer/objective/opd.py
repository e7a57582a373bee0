"""On-policy distillation as a penalty on any estimator's advantage. Reference A6 and section 4.5."""

from __future__ import annotations

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
