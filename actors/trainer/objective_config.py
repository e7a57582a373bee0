"""Settings of the objective; the rules between them are in `rules.py`.

Field names follow the Miles flags where a flag exists (`--eps-clip` is `eps_clip`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from actors.trainer.objective_estimators import ESTIMATORS, Estimator

Proximal = Literal["recompute", "current", "rollout", "interpolate"]
Reduction = Literal["per_sample", "per_token", "constant"]
Level = Literal["token", "sequence", "geometric"]
Bounding = Literal["truncate", "clip", "mask"]

class ObjectiveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the objective needs to know; frozen, so one value serves one step.

    Strings that name functions (`policy_loss`, `correction`, ...) are keys of the registries, so a custom
    function registered there before `check` is a legal value.
    """

    advantage_estimator: str = "grpo"
    """Key of `objective_estimators.ESTIMATORS`."""
    rewards_normalization: bool = True
    """Subtract the group baseline from rewards where the estimator has one."""
    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation (grpo, gspo, cispo). False is the Dr. GRPO form."""
    normalize_advantages: bool | None = None
    """Whiten advantages over all trained tokens of the batch. None: only where the estimator demands it."""
    gamma: float = 1.0
    """Discount per token (reinforce_plus_plus, ppo)."""
    lambd: float = 1.0
    """GAE lambda (ppo)."""
    kl_coef: float = 0.0
    """KL penalty inside the reward, against the reference. Excludes use_kl_loss."""
    use_opd: bool = False
    """Subtract opd_kl_coef * (student - teacher) from any estimator's advantage."""
    opd_kl_coef: float = 1.0

    policy_loss: str | None = None
    """Key of `losses.POLICY_LOSSES`. None: the estimator's."""
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    """Upper clip width; None: equal to eps_clip. DAPO's clip-higher uses 0.28."""
    eps_clip_c: float | None = None
    """Dual clip for negative advantages, > 1. None: off."""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    dppo_delta: float = 0.15
    """Trust region of the divergence mask, in probability (tv) or nats (kl; 0.05 is usual)."""

    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    """0.0 with use_kl_loss only monitors: no value, no gradient."""
    kl_loss_type: str = "k1"
    """Key of `kl.KL_ESTIMATORS`; also used for kl_coef."""
    use_unbiased_kl: bool = False
    entropy_coef: float = 0.0

    proximal: Proximal = "recompute"
    """Denominator of the clipped ratio. recompute: trainer's own pass before the step; current: the policy
    itself, detached (one step per rollout batch); rollout: engine log-probs (`--use-rollout-logprobs`);
    interpolate: between engine and current by staleness (decoupled PPO without the extra pass)."""
    keep_old_actor: bool = False
    """proximal=recompute with the weights that made each token in place of those before the step."""
    correction: str = "none"
    """Key of `corrections.CORRECTIONS`: none, tis, icepop, mis, decoupled."""
    allow_no_correction: bool = False
    """Explicit permission to train stale data without a correction."""
    report_only: bool = False
    """Compute the correction's metrics, apply nothing (`--get-mismatch-metrics`)."""
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    decoupled_cap: float = 5.0
    """Upper bound of the decoupled weight exp(prox - rollout)."""
    tis_level: Level = "token"
    tis_mode: Bounding = "truncate"
    tis_upper_bound: float = 2.0
    tis_lower_bound: float | None = None
    """None: 1 / tis_upper_bound."""
    tis_batch_normalize: bool = False
    """Divide MIS weights by their mean over the whole step."""
    use_rs: bool = False
    rs_level: Level = "token"
    rs_upper_bound: float | None = None
    rs_lower_bound: float | None = None
    rs_veto_threshold: float | None = None
    """One trained token with a ratio below it rejects its whole sample; None and 0: none does."""
    use_opsm: bool = False
    opsm_delta: float = 1e-4
    max_staleness: int | None = None
    """Policy versions; older tokens never train. None: no bound is enforced here."""

    reduction: Reduction = "per_sample"
    """per_sample: mean of per-rollout means; per_token: mean over tokens; constant: token sum / loss_constant."""
    loss_constant: float = 1.0
    """Divisor per rollout of reduction=constant (Dr. GRPO: the longest response)."""
    value_clip: float = 0.2
    diagnostics: bool = True
    """Off-policy diagnostics every step (ratio, ESS, mismatch). Off saves a few tensor operations."""

    custom_loss_function_path: str = ""
    """Dotted paths of the user's functions, empty = none; what they take and return: `objective_hooks.SIGNATURES`."""
    custom_advantage_function_path: str = ""
    custom_tis_function_path: str = ""
    """In place of correction=tis."""
    custom_pg_loss_reducer_function_path: str = ""
    custom_reward_post_process_path: str = ""
    """In place of the group baseline."""

    @property
    def estimator(self) -> Estimator:
        """Its record; an empty one for an unknown name, which `check` refuses."""
        return ESTIMATORS.get(self.advantage_estimator, Estimator())

    @property
    def clip_high(self) -> float:
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def loss_name(self) -> str:
        if self.policy_loss is not None:
            return self.policy_loss
        return self.estimator.policy_loss

    @property
    def whiten(self) -> bool:
        if self.normalize_advantages is None:
            return self.estimator.whitens
        return self.normalize_advantages

    @property
    def corrects(self) -> bool:
        """Whether anything bounds the influence of data from an older policy."""
        return (
            (self.correction != "none" and not self.report_only)
            or (self.use_opsm and self.proximal != "current")
            or self.proximal in ("rollout", "interpolate")
            or self.keep_old_actor
            or self.loss_name == "dppo"
        )

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
