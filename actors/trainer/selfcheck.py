"""First-step self-check: what must hold before the first update, and the likely cause if not. Reference 1.1 D19, 1.2.

The trainer measures at the first optimizer step of a run and puts value and limit among the step's metrics; whoever reads
the step, the trainer itself or the doctor, judges them with `failures`. Importable without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from actors.runtime.context import Context
from actors.runtime.run import RunEnds
from actors.trainer.backend import BackendConfig
from actors.trainer.objective_config import ObjectiveConfig
from bus.messages.events import EventKind

VALUE, LIMIT = "train/selfcheck/", "train/selfcheck_limit/"
ENGINE = "forward_logp_abs_diff"  # trainer against engine, also where the loss takes the engine's log-probs for its own
PASSES = "the log-prob pass and the training pass differ (dropout, another temperature, another packing)."
REFERENCE = (
    "up to 1e-4 is kernel noise; about 0.8 per token is a chat template mismatch; above 1 the reference checkpoint or its "
    "configuration is another one."
)
FINITE = sys.float_info.max
SEEN = 1e-3  # nats a token

CHECKS: dict[str, tuple[float, str]] = {
    "ppo_kl": (1e-9, PASSES),
    "pg_clipfrac": (1e-10, PASSES),
    "kl_loss": (1e-9, REFERENCE),
    "ref_logprob_abs_diff": (1e-8, REFERENCE),
    ENGINE: (
        0.1,
        "the engine serves other weights (--check-weight-update-equal compares checksums), samples at another temperature, or is "
        "shown another prompt; the difference alone does not tell which. Engines that serve FP8 round more: for them raise "
        "--selfcheck-logprob-tolerance.",
    ),
    "grad_norm": (
        100.0,  # the quickstart task shows 4 to 8
        "advantages of a group should add up to about 0 at ratio 1: check group normalisation and the loss mask.",
    ),
    "nonfinite_tokens": (0.0, "NaN log-probs: check weights and precision."),
    "loss": (FINITE, "half-precision overflow or a corrupt checkpoint."),
}
"""Metric of the step -> largest absolute value allowed, likely cause of a larger one; of ENGINE, each that it may have."""

ROUNDED = {"ppo_kl": 1e-4, "kl_loss": 1e-4}
"""Limits where a pass without gradients rounds otherwise than one with them: layers that torch compiles are two programs."""


def measure(
    report: Mapping[str, float], config: BackendConfig, objective: ObjectiveConfig, *, equal_passes: bool = True
) -> dict[str, float]:
    """Values and limits of the checks that apply, as metrics. report: the first optimizer step's (`metrics.finish` and
    grad_norm). The ratio is 1 unless the denominator is the engine's; the reference is the policy, since a run without a
    checkpoint starts from it; the gradient is small where a group's advantages cancel and the step is the only one, and
    the loss is a mean. equal_passes: equal weights give equal log-probs to the last bit, with and without gradients."""
    if objective.policy_loss == "nll":
        return {}  # nobody sampled these tokens
    own = objective.proximal in ("recompute", "current")
    shaped = objective.custom_reward_post_process_path or objective.custom_advantage_function_path or objective.use_opd
    centred = bool(objective.estimator.baseline) and not shaped and not objective.custom_loss_function_path
    applies = {
        "ppo_kl": own,
        "pg_clipfrac": own,
        "grad_norm": centred and config.num_steps_per_rollout == 1 and objective.reduction != "constant",
    }
    found: dict[str, float] = {}
    for name, (limit, _) in CHECKS.items():
        if name in report and applies.get(name, True):
            found[VALUE + name] = report[name]
            found[LIMIT + name] = limit
            if name == ENGINE or (name == "ref_logprob_abs_diff" and not equal_passes):
                found[LIMIT + name] = config.selfcheck_logprob_tolerance
            elif name in ROUNDED and not equal_passes:
                found[LIMIT + name] = ROUNDED[name]
    return found


def failures(metrics: Mapping[str, float | None]) -> list[str]:
    """One line per check that failed, in the metrics of a run's first step; empty when all hold or none was made.
    A value that JSON could not write (None) was not finite."""
    lines = []
    for name, (_, cause) in CHECKS.items():
        limit = metrics.get(LIMIT + name)
        if limit is None:
            continue
        value = metrics.get(VALUE + name)
        if value is None or not abs(value) <= limit:
            shown = "not finite" if value is None else f"{value:g}"
            allowed = "any finite number" if limit == FINITE else f"{limit:g}"
            lead = "Possible causes" if name == ENGINE else "Likely cause"
            lines.append(f"{name} = {shown}, allowed {allowed}. {lead}: {cause}")
    return lines


def checks_made(metrics: Mapping[str, float | None]) -> int:
    """How many checks a step's metrics hold."""
    return sum(name.startswith(LIMIT) for name in metrics)


def rounding(metrics: Mapping[str, float | None]) -> str:
    """What a difference between trainer and engine is that was allowed; empty where it is smaller than anybody would see."""
    value, limit, kl = metrics.get(VALUE + ENGINE), metrics.get(LIMIT + ENGINE), metrics.get("train/train_rollout_kl")
    if value is None or limit is None or value < SEEN:
        return ""
    apart = f"log-probs of trainer and engine differ by {value:.2g} nats a token" + (f" (KL {kl:.1g})" if kl is not None else "")
    return f"; {apart}, which is rounding: {limit:g} is allowed for the type of the weights"


async def tell(context: Context, metrics: Mapping[str, float | None], *, ends: bool) -> None:
    """Say what the first step's checks found. Raises RunEnds for a failure if `ends` (--ci-test), nothing acknowledged."""
    found, made = failures(metrics), checks_made(metrics)
    for line in found:
        await context.event(EventKind.SELF_CHECK, f"step 1: {line}", level="error")
    if not found and metrics:
        unchecked = "step 1 is done again and trains on what lost weights made: not checked"
        await context.event(EventKind.SELF_CHECK, f"step 1 passed its {made} checks{rounding(metrics)}" if made else unchecked)
    if found and ends:
        raise RunEnds(f"step 1 failed {len(found)} of its {made} checks (--ci-test): {found[0]}")
