"""KL estimators per token, of KL(new || base), from the log-probs of the sampled token.

With D = new - base [T]: k1 = D; k2 = D^2/2; k3 = e^-D - 1 + D (all: Schulman, "Approximating KL Divergence", 2020);
low_var_kl = k3 of -D held to [-20, 20], result held to [-10, 10] (reference section 4.4).
`unbiased` multiplies by exp(new - old) with gradient, before low_var_kl's last clamp (DeepSeek-V3.2).
All: float [T] in, float [T] out, gradient through new.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actors.trainer.objective.segments import LOG_RATIO_LIMIT, keep

LOW_VAR_LIMIT = 10.0


def k1(delta: Tensor) -> Tensor:
    """D. Unbiased value, constant gradient: as a loss only useful with the unbiased factor."""
    return delta


def k2(delta: Tensor) -> Tensor:
    """D^2 / 2. Biased value, gradient of the true KL in expectation."""
    return delta.square() * 0.5


def k3(delta: Tensor) -> Tensor:
    """e^-D - 1 + D >= 0. +inf when new gives probability 0 (the naive form has inf - inf there)."""
    return torch.exp(-delta) - 1 + keep(~torch.isneginf(delta), delta)


def low_var_kl(delta: Tensor) -> Tensor:
    """k3 on a clamped log-ratio; NaN counts 0. The final clamp is applied by `approx_kl`."""
    x = (-delta).nan_to_num(nan=0.0, posinf=LOG_RATIO_LIMIT, neginf=-LOG_RATIO_LIMIT)
    x = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(x) - 1 - x


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}


def approx_kl(kind: str, new: Tensor, base: Tensor, old: Tensor | None = None) -> Tensor:
    """Estimate per token [T]. `old` given: times exp(new - old). Unknown `kind`: ValueError."""
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"kl_loss_type={kind!r} is unknown. Choose one of {sorted(KL_ESTIMATORS)}.")
    kl = KL_ESTIMATORS[kind](new - base)
    if old is not None:
        kl = kl * torch.exp(new - old)
    return kl.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT) if kind == "low_var_kl" else kl


def masked_kl(kind: str, mask: Tensor, new: Tensor, base: Tensor, old: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`approx_kl` that is 0, value and gradient, at masked tokens and where it is not finite -> (kl [T], bad bool [T]).

    The inputs are cleaned before exp: cleaning the result would leave 0 * inf = NaN in the gradient. `bad` marks
    trained tokens whose estimate is not finite; the caller counts them.
    """
    with torch.no_grad():
        finite = torch.isfinite(approx_kl(kind, new, base, old))
        if kind == "low_var_kl":
            finite = finite & ~torch.isnan(new - base)
        usable = mask & finite
    kl = approx_kl(kind, keep(usable, new), keep(usable, base), None if old is None else keep(usable, old))
    return kl, mask & ~finite
