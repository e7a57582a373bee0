"""What the objective's settings name is there. Rules between settings are not asked here: settings are held to them where they
are loaded and where live ones are changed."""

from __future__ import annotations

from actors.trainer.objective.corrections import CORRECTIONS
from actors.trainer.objective.custom import HOOKS
from actors.trainer.objective.kl import KL_ESTIMATORS
from actors.trainer.objective.losses import POLICY_LOSSES
from actors.trainer.objective_config import ObjectiveConfig, hooks_of
from actors.trainer.objective_estimators import ESTIMATORS


class ObjectiveConfigError(ValueError):
    """Settings that this objective cannot follow. The message holds one line per problem."""


def check(cfg: ObjectiveConfig) -> ObjectiveConfig:
    """Return `cfg`, or raise `ObjectiveConfigError` with every name that stands for nothing."""
    found: list[str] = []
    for name, table in (
        ("advantage_estimator", ESTIMATORS),
        ("policy_loss", POLICY_LOSSES),
        ("kl_loss_type", KL_ESTIMATORS),
        ("correction", CORRECTIONS),
    ):
        value = getattr(cfg, name)
        if value not in table:
            found.append(f"{name}={value!r} is unknown. Choose one of {sorted(table)}.")
    found += [f"{f}={p!r} is not loaded. Call hooks.install first." for f, p in hooks_of(cfg).items() if p not in HOOKS]
    if found:
        raise ObjectiveConfigError("objective settings refused:\n" + "\n".join(f"- {line}" for line in found))
    return cfg
