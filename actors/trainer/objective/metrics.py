"""Metrics of the objective: sums that add over micro-batches and ranks, turned into means once per step.

A metrics dict maps names to detached tensors. Most are [] sums over the micro-batch, reduced like the loss and
not yet divided; `ess_w`, `ess_w2` are [R] sums per rollout; names in MAXIMA are maxima; names in COUNTS are plain
counts. `merge` combines two dicts, `finish` divides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actors.trainer.objective.inputs import Norm

MAXIMA = frozenset({"forward_logp_max_diff"})
COUNTS = frozenset({"nonfinite_tokens", "kl_nonfinite_tokens"})
PER_ROLLOUT = ("ess_w", "ess_w2")


def merge(total: dict[str, Tensor], part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adds `part` into `total` (maxima: the larger) and returns it. Start with an empty dict."""
    for name, value in part.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = torch.maximum(total[name], value) if name in MAXIMA else total[name] + value
    return total


def flatten(metrics: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(all sums as one float64 vector, all maxima as one), names sorted: what ranks all-reduce (SUM and MAX)."""
    sums = [v.double().reshape(-1) for k, v in sorted(metrics.items()) if k not in MAXIMA]
    tops = [v.double().reshape(-1) for k, v in sorted(metrics.items()) if k in MAXIMA]
    nothing = torch.zeros(0, dtype=torch.float64)
    return torch.cat(sums) if sums else nothing, torch.cat(tops) if tops else nothing


def unflatten(metrics: Mapping[str, Tensor], sums: Tensor, tops: Tensor) -> dict[str, Tensor]:
    """Inverse of `flatten`; `metrics` gives names and shapes."""
    out: dict[str, Tensor] = {}
    at_sum = at_top = 0
    for name, value in sorted(metrics.items()):
        n = value.numel()
        if name in MAXIMA:
            out[name] = tops[at_top : at_top + n].reshape(value.shape)
            at_top += n
        else:
            out[name] = sums[at_sum : at_sum + n].reshape(value.shape)
            at_sum += n
    return out


def ess_sum(w: Tensor, w2: Tensor, tokens: Tensor, *, per_token: bool = False) -> float:
    """sum over rollouts of (sum w)^2 / (n sum w^2): 1 for a rollout with equal weights, 1/n when one dominates.

    w, w2, tokens float [R], pooled over all samples of a rollout and scale-invariant; rollouts with nothing
    trained add 0. per_token weighs each rollout by its tokens.
    """
    w, w2, tokens = w.double(), w2.double(), tokens.to(w.device).double()
    scale = torch.where(w2 > 0, w2, torch.ones_like(w2)) * tokens.clamp(min=1)
    ess = w * w / scale
    return float((ess * tokens if per_token else ess).sum())


def finish(metrics: Mapping[str, Tensor], norm: Norm, *, per_token: bool = False) -> dict[str, float]:
    """Step means: reduced sums over norm.divisor, ESS per rollout, maxima and counts as they are."""
    out: dict[str, float] = {}
    for name, value in metrics.items():
        if name in PER_ROLLOUT:
            continue
        out[name] = float(value) if name in MAXIMA or name in COUNTS else float(value) / norm.divisor
    if "ess_w" in metrics:
        total = ess_sum(metrics["ess_w"], metrics["ess_w2"], norm.rollout_tokens, per_token=per_token)
        out["ess_ratio"] = total / norm.divisor
    return out


def length_bias(sampled: Sequence[int], trained: Sequence[int]) -> float:
    """Mean response length of what was trained over what was sampled, minus 1. Away from 0: the pipeline
    (staleness, filters, drops) prefers short (< 0) or long (> 0) answers. 0.0 when either side is empty."""
    if not sampled or not trained or sum(sampled) == 0:
        return 0.0
    return (sum(trained) / len(trained)) / (sum(sampled) / len(sampled)) - 1.0


def mean_staleness(staleness: Tensor, mask: Tensor) -> tuple[float, int]:
    """(sum over trained tokens, largest) of staleness, int64 [T], mask bool [T]; divide by trained tokens."""
    kept = torch.where(mask, staleness, 0)
    return float(kept.sum()), int(kept.max()) if kept.numel() else 0


def name_nonfinite(values: Tensor, mask: Tensor, index: Tensor, sample_ids: Sequence[str]) -> list[str]:
    """Ids of the samples with a NaN or infinite value at a trained token. values [T], mask bool [T], index [T]."""
    bad = mask & ~torch.isfinite(values.detach())
    return [sample_ids[i] for i in torch.unique(index[bad]).tolist()]


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """How well the values before the step foretold the returns, over trained tokens; float [N] each, mask bool [N].

    explained_variance = 1 - Var(R - V) / Var(R): 1 foretells everything, 0 no more than the mean; 0 where returns do not
    vary. Nothing trained: no metrics.
    """
    v, r = values[mask].double(), returns[mask].double()
    if v.numel() == 0:
        return {}
    spread, missed = float(r.var(correction=0)), float((r - v).var(correction=0))
    explained = 1.0 - missed / spread if spread > 0 and math.isfinite(missed) else 0.0
    return {"values_mean": float(v.mean()), "returns_mean": float(r.mean()), "explained_variance": explained}
