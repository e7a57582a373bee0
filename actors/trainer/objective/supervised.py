"""The critic's loss on packed micro-batches, reduced like the policy loss. Reference section 4.7."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.trainer.objective.inputs import LossInputs, Norm
from actors.trainer.objective.reductions import reduce_sum
from actors.trainer.objective.segments import keep


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max((c - R)^2, (v - R)^2), c = v_old + clamp(v - v_old, +-clip), no factor 1/2 -> (loss, clipped bool), [T]."""
    step = values - old
    bounded = old + step.clamp(-clip, clip)
    return torch.maximum((bounded - returns).square(), (values - returns).square()), step.abs() > clip


def value_loss(clip: float, values: Tensor, mb: LossInputs, norm: Norm) -> tuple[Tensor, dict[str, Tensor]]:
    """Critic loss of one micro-batch: (loss [], sums). values float [T] with gradient; mb.old_values and mb.returns."""
    if mb.old_values is None or mb.returns is None:
        raise ValueError("value_loss needs old_values and returns for the micro-batch, none were given.")
    m = mb.mask
    loss, clipped = clipped_value_loss(keep(m, values), keep(m, mb.old_values), keep(m, mb.returns), clip)
    total = reduce_sum(loss, m, mb.weights)
    share = reduce_sum(clipped.to(loss.dtype), m, mb.metric_weights)
    sums = {"value_loss": total.detach(), "value_clipfrac": share}
    return total * (norm.scale / norm.divisor), sums
