"""First-step self-check: what must hold before the first update, and the likely cause if not. Reference 1.2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerance:
    """exact: for quantities that are 0 by construction; reference: |old - ref| of identical weights;
    engine: mean |trainer - engine| log-prob (0.03: bf16 engines; 1e-4: the embedded engine);
    grad_norm: upper limit for one step per rollout batch."""

    exact: float = 1e-9
    reference: float = 1e-8
    engine: float = 0.03
    grad_norm: float = 10.0


def first_step_failures(
    report: Mapping[str, float],
    *,
    grad_norm: float | None = None,
    reference_diff: float | None = None,
    same_policy: bool = True,
    tolerance: Tolerance | None = None,
) -> list[str]:
    """One line per failed check, empty when all hold. report: `metrics.finish` of the first micro-batches.

    same_policy: the denominator comes from the weights being trained (first step, not proximal=rollout), so the
    ratio is 1. reference_diff: mean |old - ref| log-prob, when the reference holds the initial weights. Checks whose
    numbers are absent are skipped.
    """
    limit = tolerance or Tolerance()
    failures = []

    def check(name: str, value: float | None, most: float, cause: str) -> None:
        if value is not None and not abs(value) <= most:
            failures.append(f"{name} = {value:g}, allowed {most:g}. Likely cause: {cause}")

    if same_policy:
        cause = "the log-prob pass and the training pass differ (dropout, another temperature, another packing)."
        check("ppo_kl", report.get("ppo_kl"), limit.exact, cause)
        check("pg_clipfrac", report.get("pg_clipfrac"), limit.exact, cause)
    check(
        "reference log-prob difference",
        reference_diff,
        limit.reference,
        "up to 1e-4 is kernel noise; about 0.8 per token is a chat template mismatch; above 1 the reference checkpoint "
        "or its configuration is another one.",
    )
    check(
        "train_rollout_logprob_abs_diff",
        report.get("train_rollout_logprob_abs_diff"),
        limit.engine,
        "the engine does not serve the trained weights (publish, then compare checksums), or samples at another "
        "temperature, or tokenizes the prompt differently.",
    )
    check(
        "gradient norm",
        grad_norm,
        limit.grad_norm,
        "advantages of a group should add up to about 0 at ratio 1: check group normalisation and the loss mask.",
    )
    check("non-finite tokens", report.get("nonfinite_tokens"), 0.0, "NaN log-probs: check weights and precision.")
    for name in ("pg_loss", "kl_loss", "entropy_loss"):
        if name in report and not math.isfinite(report[name]):
            failures.append(f"{name} = {report[name]}. Likely cause: half-precision overflow or a corrupt checkpoint.")
    return failures
