"""Rules of asynchrony: how much is under way, how old it may get, and what happens then."""

from __future__ import annotations

from miles_async.settings.derive import reward_hook
from miles_async.settings.errors import listing
from miles_async.settings.flat import Flat

CORRECTION_FLAGS = (
    *("--use-tis", "--use-icepop", "--use-mis", "--use-decoupled-loss", "--use-rollout-logprobs", "--keep-old-actor"),
)


def oversampling_covers_a_batch(s: Flat) -> None:
    over, batch = s.over_sampling_batch_size, s.rollout_batch_size
    if 0 < over < batch:
        remedy = f"Set it to {batch} or more, or leave it out for what the bound admits."
        raise s.refusal("over_sampling_batch_size", f"smaller than rollout_batch_size = {batch}", remedy)


def parts_have_a_turn(s: Flat) -> None:
    policy, bound = s.staleness_policy, s.max_weight_staleness
    if policy not in ("split", "member"):
        return
    if bound == 0:
        why = "with max_weight_staleness = 0 every batch is of one version, and no group has a turn to be split on"
        raise s.refusal("staleness_policy", why, "Leave it out, or set max_weight_staleness to 1 or more.")
    if s.needs_whole_groups:
        needs = reward_hook(s.values) or f"advantage_estimator {s.advantage_estimator}"
        why = f"it trains parts of groups, and {needs} needs all rewards of a group at once"
        raise s.refusal("staleness_policy", why, "Use whole, wait or drop, or another estimator.")


def stale_data_is_corrected(s: Flat) -> None:
    bound = s.max_weight_staleness
    corrected = s.off_policy_correction == "rollout_logprobs" or s.keep_old_actor or s.policy_loss == "dppo"
    corrected = corrected or (s.off_policy_correction != "none" and not s.get_mismatch_metrics)
    if bound > 0 and not (corrected or s.no_correction or s.supervised):
        remedy = f"Choose {listing(CORRECTION_FLAGS)}, or accept the bias with --no-correction, or set it to 0."
        raise s.refusal("max_weight_staleness", "off-policy data without a correction", remedy)


def wait_leaves_room_for_its_lookahead(s: Flat) -> None:
    bound, extra, per_version = s.max_weight_staleness, s.lookahead_versions, s.groups_per_version
    if extra > bound:
        why = (
            f"looking so far ahead adds {extra} versions of staleness with {per_version} groups per version, above "
            f"max_weight_staleness = {bound}"
        )
        remedy = f"Set it to {bound * per_version + 1} or less, or raise max_weight_staleness."
        raise s.refusal("staleness_lookahead", why, remedy)


RULES = (oversampling_covers_a_batch, parts_have_a_turn, stale_data_is_corrected, wait_leaves_room_for_its_lookahead)
