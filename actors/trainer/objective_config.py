"""Settings of the objective, sound when they come here (miles_async/settings/rules.py), and what the functions are that they name.

Field names follow the Miles flags where a flag exists (`--eps-clip` is `eps_clip`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.runtime.contained import named
from actors.trainer.objective_estimators import ESTIMATORS, Estimator

Proximal = Literal["recompute", "current", "rollout", "interpolate"]
Reduction = Literal["per_sample", "per_token", "constant"]
Level = Literal["token", "sequence", "geometric"]
Bounding = Literal["truncate", "clip", "mask"]


class ObjectiveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything the objective needs to know; frozen, so one value serves one step.

    Strings that name functions (`policy_loss`, `correction`, ...) are keys of the registries, so a custom
    function registered there before `check` is a legal value.
    """

    advantage_estimator: str
    """Key of `objective_estimators.ESTIMATORS`."""
    rewards_normalization: bool = True
    """Subtract the group baseline from rewards where the estimator has one."""
    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation (grpo, gspo, cispo). False is the Dr. GRPO form."""
    normalize_advantages: bool | None
    """Whiten advantages over all trained tokens of the batch. None: only where the estimator demands it."""
    gamma: float
    """Discount per token (reinforce_plus_plus, ppo)."""
    lambd: float
    """GAE lambda (ppo)."""
    kl_coef: float
    """KL penalty inside the reward, against the reference. Excludes use_kl_loss."""
    use_opd: bool
    """Subtract opd_kl_coef * (student - teacher) from any estimator's advantage."""
    opd_kl_coef: float

    policy_loss: str
    """Key of `losses.POLICY_LOSSES`."""
    eps_clip: float
    eps_clip_high: float | None
    """Upper clip width; None: equal to eps_clip. DAPO's clip-higher uses 0.28."""
    eps_clip_c: float | None
    """Dual clip for negative advantages, > 1. None: off."""
    dppo_divergence: Literal["tv", "kl"]
    dppo_delta: float
    """Trust region of the divergence mask, in probability (tv) or nats (kl; 0.05 is usual)."""
    dppo_cap: float
    """Upper bound of dppo's ratio."""

    use_kl_loss: bool
    kl_loss_coef: float
    """0.0 with use_kl_loss only monitors: no value, no gradient."""
    kl_loss_type: str
    """Key of `kl.KL_ESTIMATORS`; also used for kl_coef."""
    use_unbiased_kl: bool
    entropy_coef: float

    proximal: Proximal = "recompute"
    """Denominator of the clipped ratio. recompute: trainer's own pass before the step; current: the policy
    itself, detached (one step per rollout batch); rollout: engine log-probs (`--use-rollout-logprobs`);
    interpolate: between engine and current by staleness (decoupled PPO without the extra pass)."""
    keep_old_actor: bool
    """proximal=recompute with the weights that made each token in place of those before the step."""
    correction: str = "none"
    """Key of `corrections.CORRECTIONS`: none, tis, icepop, mis, decoupled."""
    report_only: bool = False
    """Compute the correction's metrics, apply nothing (`--get-mismatch-metrics`)."""
    tis_clip: float
    tis_clip_low: float
    decoupled_cap: float
    """Upper bound of the decoupled weight exp(prox - rollout)."""
    tis_level: Level
    tis_mode: Bounding
    tis_upper_bound: float
    tis_lower_bound: float | None
    """None: 1 / tis_upper_bound."""
    tis_batch_normalize: bool
    """Divide MIS weights by their mean over the whole step."""
    use_rs: bool
    rs_level: Level
    rs_upper_bound: float | None
    rs_lower_bound: float | None
    rs_veto_threshold: float | None
    """One trained token with a ratio below it rejects its whole sample; None and 0: none does."""
    use_opsm: bool
    opsm_delta: float
    max_staleness: int | None = None
    """Policy versions; older tokens never train. None: no bound is enforced here."""

    reduction: Reduction = "per_sample"
    """per_sample: mean of per-rollout means; per_token: mean over tokens; constant: token sum / loss_constant."""
    loss_constant: float = 1.0
    """Divisor per rollout of reduction=constant (Dr. GRPO: the longest response)."""
    value_clip: float
    diagnostics: bool = True
    """Off-policy diagnostics every step (ratio, ESS, mismatch). Off saves a few tensor operations."""

    custom_loss_function_path: str | None
    """Dotted paths of the user's functions, None = none; what they take and return: SIGNATURES."""
    custom_advantage_function_path: str | None
    custom_tis_function_path: str | None
    """In place of correction=tis."""
    custom_pg_loss_reducer_function_path: str | None
    custom_reward_post_process_path: str | None
    """In place of the group baseline."""

    @property
    def estimator(self) -> Estimator:
        """Its record; an empty one for an unknown name, which `check` refuses."""
        return ESTIMATORS.get(self.advantage_estimator, Estimator())

    @property
    def clip_high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def whiten(self) -> bool:
        if self.normalize_advantages is None:
            return self.estimator.whitens
        return self.normalize_advantages

    @property
    def needs_old_logp(self) -> bool:
        """Whether the trainer must run its own log-prob pass before the step (also for k-shaping and OPD)."""
        return self.proximal == "recompute" or self.kl_coef != 0 or self.needs_student_logp

    @property
    def needs_student_logp(self) -> bool:
        return self.use_opd or self.estimator.teacher

    @property
    def needs_ref_logp(self) -> bool:
        return self.use_kl_loss or self.kl_coef != 0

    @property
    def use_tis(self) -> bool:
        """What hooks written for Miles look at."""
        return self.correction == "tis" and not self.report_only

    @property
    def calculate_per_token_loss(self) -> bool:
        return self.reduction == "per_token"

    @property
    def needs_rollout_logp(self) -> bool:
        return self.correction != "none" or self.proximal in ("rollout", "interpolate")


SIGNATURES = {
    "custom_loss_function_path": "(args, batch, log_probs [T], reducer) -> (loss [], {name: sum []})",
    "custom_advantage_function_path": "(args, inputs) -> (advantages [T], returns [T])",
    "custom_tis_function_path": (
        "(*, args, pg_loss [T], train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, "
        "parallel_state, max_seq_lens) -> (pg_loss [T], loss_masks, {name: [T]})"
    ),
    "custom_pg_loss_reducer_function_path": (
        "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> function from [T] to []"
    ),
    "custom_reward_post_process_path": "(args, samples) -> (raw rewards, processed rewards)",
}
"""Setting -> what its function takes and returns. T: response tokens of a micro-batch, samples back to back."""


class HookError(ValueError):
    """A function of the user's that cannot be loaded, raised, or returned something else than its signature says."""

    def __init__(self, field: str, path: str | None, problem: str) -> None:
        self.field = field
        self.path = path or ""
        self.problem = " ".join(problem.split())[:400].rstrip(".")
        self.remedy = f"Its signature is {SIGNATURES[field]}; see docs/objective.md."
        super().__init__(f"{field} = {path!r}: {self.problem}. {self.remedy}")

    @classmethod
    def of(cls, error: BaseException, field: str, path: str | None, what: str = "") -> HookError:
        """For a function that raised `error`, whatever that is; `what` names a part of the function."""
        return cls(field, path, f"{what} raised {named(error)}".lstrip())


def hooks_of(cfg: ObjectiveConfig) -> dict[str, str]:
    """Setting -> dotted path, of those that are set."""
    return {field: getattr(cfg, field) for field in SIGNATURES if getattr(cfg, field)}
