"""(pure) Rules of what the policy is trained towards: corrections of off-policy data, KL, advantages."""

from actors.trainer.objective_estimators import ESTIMATORS
from miles_async.settings.errors import refusal
from miles_async.settings.flat import Flat


def one_correction_at_most(s: Flat) -> None:
    on = {
        "use_tis": s.use_tis,
        "use_icepop": s.use_icepop,
        "use_mis": s.use_mis,
        "use_decoupled_loss": s.use_decoupled_loss,
        "use_rollout_logprobs": s.use_rollout_logprobs,
        "no_correction": s.no_correction,
    }
    chosen = [name for name, is_on in on.items() if is_on]
    if chosen == ["use_mis", "use_decoupled_loss"]:  # the weights of the one, the clip of the other
        return
    if len(chosen) > 1:
        raise refusal(chosen[1], True, f"cannot go together with {chosen[0]}", f"Keep one of {', '.join(chosen)}.")


def old_logprobs_have_one_source(s: Flat) -> None:
    for other in ("use_rollout_logprobs", "interpolate_proximal"):
        if s.keep_old_actor and getattr(s, other):
            raise s.refusal("keep_old_actor", f"cannot go together with {other}", "Keep one of them.")
    if s.interpolate_proximal and s.use_rollout_logprobs:
        raise s.refusal("interpolate_proximal", "cannot go together with use_rollout_logprobs", "Keep one of them.")
    if s.interpolate_proximal and s.use_mis and s.tis_batch_normalize:
        why = "leaves no log-probs before the step, which tis_batch_normalize needs"
        raise s.refusal("interpolate_proximal", why, "Add --no-tis-batch-normalize.")


def correction_bounds_are_ordered(s: Flat) -> None:
    for low_name, low, high_name, high in (
        ("tis_clip_low", s.tis_clip_low, "tis_clip", s.tis_clip),
        ("tis_lower_bound", s.tis_lower_bound, "tis_upper_bound", s.tis_upper_bound),
        ("rs_lower_bound", s.rs_lower_bound, "rs_upper_bound", s.rs_upper_bound),
    ):
        if low > high:
            raise refusal(low_name, low, f"above {high_name} = {high}", f"Set {low_name} <= {high_name}.")


def rejection_belongs_to_mis(s: Flat) -> None:
    if s.use_rs and not s.use_mis:
        raise s.refusal("use_rs", "rejection is a part of use_mis, which is off", "Add --use-mis or leave it out.")
    if s.use_mis and s.tis_level == "geometric" and s.tis_batch_normalize:
        why = "has no meaning with tis_level = 'geometric'"
        raise s.refusal("tis_batch_normalize", why, "Add --no-tis-batch-normalize.")


def one_kl_at_most(s: Flat) -> None:
    if s.kl_coef and s.kl_loss_coef:
        why = f"KL is also in the loss (kl_loss_coef = {s.kl_loss_coef})"
        raise s.refusal("kl_coef", why, "Set one of the two to 0.")
    if s.kl_coef and not s.estimator.charges_kl and s.custom_advantage_function_path is None:
        why = f"has no effect with advantage_estimator = {s.advantage_estimator!r}, which takes no KL off the reward"
        raise s.refusal("kl_coef", why, "Set --use-kl-loss --kl-loss-coef in its place, or leave it out.")
    if s.kl_loss_coef and not s.use_kl_loss:
        raise s.refusal("kl_loss_coef", "has no effect while use_kl_loss is off", "Add --use-kl-loss.")


def whitening_where_it_is_part_of_the_estimator(s: Flat) -> None:
    if s.estimator.whitens and not s.normalize_advantages:
        why = f"{s.advantage_estimator} is defined with whitened advantages"
        raise s.refusal("normalize_advantages", why, "Leave out --no-normalize-advantages.")


def a_group_has_something_to_compare(s: Flat) -> None:
    """A reward less the mean of its group is 0 where the group is itself. Whatever else makes the advantage or the loss is asked
    for by name."""
    elsewhere = s.supervised or s.debug_rollout_only or s.disable_rewards_normalization or s.use_opd
    hooks = (
        s.custom_advantage_function_path,
        s.custom_loss_function_path,
        s.custom_reward_post_process_path,
        s.custom_convert_samples_to_train_data_path,
    )
    if s.n_samples_per_prompt == 1 and s.estimator.baseline and not elsewhere and not any(hooks):
        why = f"{s.advantage_estimator} compares a sample with others of its group: of one, every advantage is 0"
        alone = ", ".join(name for name, record in ESTIMATORS.items() if not (record.baseline or record.teacher))
        remedy = f"Set it to 2 or more, or --advantage-estimator to one of {alone}, or --disable-rewards-normalization."
        raise s.refusal("n_samples_per_prompt", why, remedy)


RULES = (
    one_correction_at_most,
    correction_bounds_are_ordered,
    old_logprobs_have_one_source,
    rejection_belongs_to_mis,
    one_kl_at_most,
    whitening_where_it_is_part_of_the_estimator,
    a_group_has_something_to_compare,
)
