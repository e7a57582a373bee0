"""Rules between objective settings: what is refused at start, and why.

Always true: a config that passed `check` names only registered functions and trains stale data only with a
correction or with explicit permission.
"""

from __future__ import annotations

from actors.trainer.objective.corrections import CORRECTIONS
from actors.trainer.objective.custom import HOOKS
from actors.trainer.objective.kl import KL_ESTIMATORS
from actors.trainer.objective.losses import POLICY_LOSSES
from actors.trainer.objective_config import ObjectiveConfig
from actors.trainer.objective_estimators import ESTIMATORS
from actors.trainer.objective_hooks import hooks_of


class ObjectiveConfigError(ValueError):
    """A combination of objective settings that would train the wrong thing. The message holds one line per problem."""


def problems(cfg: ObjectiveConfig) -> list[str]:
    """Every rule the config breaks, one line each, with both values and the remedy. Empty when it is sound."""
    found: list[str] = []

    def rule(ok: bool, text: str) -> None:
        if not ok:
            found.append(text)

    for name, table in (
        ("advantage_estimator", ESTIMATORS),
        ("loss_name", POLICY_LOSSES),
        ("kl_loss_type", KL_ESTIMATORS),
        ("correction", CORRECTIONS),
    ):
        value = getattr(cfg, name)
        rule(value in table, f"{name}={value!r} is unknown. Choose one of {sorted(table)}.")
    for field, path in hooks_of(cfg).items():
        rule(path in HOOKS, f"{field}={path!r} is not loaded. Call hooks.install first.")
    rule(
        not cfg.custom_tis_function_path or cfg.correction == "tis",
        f"custom_tis_function_path={cfg.custom_tis_function_path!r} replaces correction=tis, but correction is "
        f"{cfg.correction}. Set correction=tis.",
    )
    rule(
        0 <= cfg.eps_clip <= 1 and cfg.clip_high >= 0,
        f"eps_clip={cfg.eps_clip}, eps_clip_high={cfg.clip_high}: need 0 <= eps_clip <= 1 and eps_clip_high >= 0.",
    )
    rule(cfg.eps_clip_c is None or cfg.eps_clip_c > 1, f"eps_clip_c={cfg.eps_clip_c}: dual clip needs a value > 1.")
    rule(
        not (cfg.use_kl_loss and cfg.kl_coef != 0),
        f"kl_coef={cfg.kl_coef} with use_kl_loss counts the KL twice. Set kl_coef=0 or use_kl_loss=false.",
    )
    rule(0 <= cfg.gamma <= 1 and 0 <= cfg.lambd <= 1, f"gamma={cfg.gamma}, lambd={cfg.lambd}: both within [0, 1].")
    rule(
        cfg.normalize_advantages is not False or not cfg.estimator.whitens,
        f"{cfg.advantage_estimator} is only defined with whitened advantages. Drop normalize_advantages=false.",
    )
    rule(
        0 <= cfg.tis_clip_low <= cfg.tis_clip,
        f"tis_clip_low={cfg.tis_clip_low}, tis_clip={cfg.tis_clip}: need 0 <= low <= high.",
    )
    lower = cfg.tis_lower_bound if cfg.tis_lower_bound is not None else 1 / max(cfg.tis_upper_bound, 1e-30)
    rule(
        cfg.tis_upper_bound > 0 and 0 <= lower <= cfg.tis_upper_bound,
        f"MIS bounds [{lower:g}, {cfg.tis_upper_bound:g}] are not an interval of positive ratios.",
    )
    rule(
        not (cfg.tis_batch_normalize and cfg.tis_level == "geometric"),
        "tis_batch_normalize is undefined for tis_level=geometric. Choose token or sequence.",
    )
    rule(
        not (cfg.tis_batch_normalize and cfg.correction == "mis" and cfg.proximal in ("current", "interpolate")),
        f"tis_batch_normalize needs the step's mean weight before the step; proximal={cfg.proximal} has no log-probs "
        "then. Use proximal=recompute.",
    )
    rule(
        not (cfg.proximal == "rollout" and cfg.correction not in ("none",)),
        f"proximal=rollout makes every {cfg.correction} weight 1. Set correction=none or proximal=recompute.",
    )
    rule(
        not cfg.keep_old_actor or cfg.proximal == "recompute",
        f"keep_old_actor recomputes log-probs, proximal={cfg.proximal} does not. Use proximal=recompute.",
    )
    rule(cfg.reduction != "constant" or cfg.loss_constant > 0, f"loss_constant={cfg.loss_constant} must be > 0.")
    rule(
        cfg.reduction == "constant" or cfg.loss_constant == 1.0,
        f"loss_constant={cfg.loss_constant} divides nothing with reduction={cfg.reduction}. Set reduction=constant.",
    )
    rule(cfg.max_staleness is None or cfg.max_staleness >= 0, f"max_staleness={cfg.max_staleness} must be >= 0.")
    rule(
        not cfg.max_staleness or cfg.corrects or cfg.allow_no_correction,
        f"max_staleness={cfg.max_staleness} trains data of older policies with no off-policy correction. Choose "
        "correction=tis|mis|icepop|decoupled, proximal=rollout, use_opsm, or say --no-correction.",
    )
    return found


def check(cfg: ObjectiveConfig) -> ObjectiveConfig:
    """Return `cfg`, or raise `ObjectiveConfigError` listing every broken rule."""
    found = problems(cfg)
    if found:
        raise ObjectiveConfigError("objective settings refused:\n" + "\n".join(f"- {line}" for line in found))
    return cfg
