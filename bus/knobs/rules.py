"""Rules between knobs (pure): each looks at the whole; a fact that is not known is not held against a patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bus.errors import KnobRejected
from bus.knobs.slots import broken_rule

Values = Mapping[str, Any]


def _oversampling_covers_a_batch(v: Values) -> None:
    over, batch = v["over_sampling_batch_size"], v["rollout_batch_size"]
    if 0 < over < batch:
        raise KnobRejected(
            knob="over_sampling_batch_size",
            value=over,
            rule=f"smaller than rollout_batch_size = {batch}",
            remedy=f"Set over_sampling_batch_size >= {batch}, in the same patch if both change, or 0 for what the bound admits.",
        )


def _parts_have_a_turn(v: Values) -> None:
    policy, bound = v["staleness_policy"], v["max_weight_staleness"]
    if policy in ("split", "member") and bound == 0:
        raise KnobRejected(
            knob="staleness_policy",
            value=policy,
            rule="with max_weight_staleness = 0 every batch is of one version, and no group has a turn to be split on",
            remedy="Set staleness_policy to whole or auto, or max_weight_staleness >= 1, in the same patch.",
        )
    if policy in ("split", "member") and v.get("needs_whole_groups", False):
        raise KnobRejected(
            knob="staleness_policy",
            value=policy,
            rule="it trains parts of groups, and this run's estimator or reward hook needs all rewards of a group at once",
            remedy="Set it to whole, wait or drop.",
        )


def _four_knobs_agree(v: Values) -> None:
    steps, total = v.get("num_steps_per_rollout", 1), v["rollout_batch_size"] * v.get("n_samples_per_prompt", 1)
    if total % steps:
        raise KnobRejected(
            knob="rollout_batch_size",
            value=v["rollout_batch_size"],
            rule=f"{total} samples do not divide into num_steps_per_rollout = {steps} steps",
            remedy=f"Choose one that times {v.get('n_samples_per_prompt', 1)} is a multiple of {steps}.",
        )


def _stale_data_is_corrected(v: Values) -> None:
    bound = v["max_weight_staleness"]
    if bound > 0 and v.get("correction", "") == "none" and not v.get("no_correction", False):
        raise KnobRejected(
            knob="max_weight_staleness",
            value=bound,
            rule="off-policy data without a correction, and this run was started without one",
            remedy="Keep it 0, or start a run with --use-tis (or another correction, or --no-correction).",
        )


def _wait_leaves_room(v: Values) -> None:
    per_version = v["rollout_batch_size"] * v.get("update_weights_interval", 1)
    ahead, bound = v.get("staleness_lookahead", 0), v["max_weight_staleness"]
    extra = -(-(ahead - 1) // per_version)
    if v["staleness_policy"] == "wait" and ahead > 1 and extra > bound:
        raise KnobRejected(
            knob="staleness_policy",
            value="wait",
            rule=f"staleness_lookahead = {ahead} adds {extra} versions to the staleness with {per_version} groups per "
            f"version, above max_weight_staleness = {bound}",
            remedy=f"Set max_weight_staleness >= {extra} in the same patch, or another staleness_policy.",
        )


def _response_fits_the_context(v: Values) -> None:
    context, length = v.get("rollout_max_context_len", 0), v["rollout_max_response_len"]
    if context and length >= context:
        raise KnobRejected(
            knob="rollout_max_response_len",
            value=length,
            rule=f"leaves no room for a prompt in rollout_max_context_len = {context}",
            remedy=f"Set it below {context}.",
        )


def _kl_has_a_reference(v: Values) -> None:
    if v["kl_loss_coef"] > 0 and not v.get("use_kl_loss", True):
        raise KnobRejected(
            knob="kl_loss_coef",
            value=v["kl_loss_coef"],
            rule="this run has no reference policy loaded",
            remedy="Start a run with --use-kl-loss; with coefficient 0 it only reports the KL.",
        )


def _filter_can_keep_something(v: Values) -> None:
    name = v["dynamic_sampling_filter"]
    if name.endswith("nonzero_std") and v.get("n_samples_per_prompt", 2) == 1:
        raise KnobRejected(
            knob="dynamic_sampling_filter",
            value=name,
            rule="with n_samples_per_prompt = 1 the rewards of a group never differ, so every group would be dropped",
            remedy="Set it to none.",
        )


def _evaluation_has_data(v: Values) -> None:
    if v["eval_interval"] > 0 and not v.get("has_eval_data", True):
        raise KnobRejected(
            knob="eval_interval",
            value=v["eval_interval"],
            rule="this run was started without evaluation data",
            remedy="Start a run with --eval-prompt-data NAME PATH.",
        )


def _slots_are_possible(v: Values) -> None:
    if broken := broken_rule(v):
        raise KnobRejected(**broken._asdict())


RULES: tuple[Callable[[Values], None], ...] = (
    _slots_are_possible,
    _oversampling_covers_a_batch,
    _four_knobs_agree,
    _stale_data_is_corrected,
    _wait_leaves_room,
    _parts_have_a_turn,
    _response_fits_the_context,
    _kl_has_a_reference,
    _filter_can_keep_something,
    _evaluation_has_data,
)

__all__ = ("RULES",)
