"""Once per rollout batch: rewards -> advantages, final masks and global divisors; then micro-batches are cut freely.

`prepare_batch` sees the whole batch and fixes everything that is global: group baselines, whitening statistics, trained
tokens per trajectory. Always true: what it returns does not depend on sample order, and no token beyond the staleness
bound, with a NaN log-prob or of a sample without a reward is in a mask.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.trainer.objective import custom
from actors.trainer.objective import metrics as metric
from actors.trainer.objective.advantages import AdvantageInputs, MissingInputError, advantage_of, opd_penalty
from actors.trainer.objective.kl import masked_kl
from actors.trainer.objective.prepared import PreparedBatch
from actors.trainer.objective.rewards import GroupRewards, normalize_group_rewards
from actors.trainer.objective.samples import (
    FLOAT_FIELDS,
    UNKNOWN_STEP,
    Flags,
    TrainSample,
    pack_floats,
    pack_masks,
    pack_steps,
)
from actors.trainer.objective.segments import sample_index, segment_sum, starts, whiten
from actors.trainer.objective.staleness import assert_fresh, fresh, staleness
from actors.trainer.objective_config import ObjectiveConfig

TOO_LARGE = 1e15  # an advantage: gradients are squared and added up in float32, which ends at 3e38


def _untrainable(
    cfg: ObjectiveConfig,
    own: Sequence[TrainSample],
    fields: dict[str, Tensor],
    mask: Tensor,
    index: Tensor,
    flags: Flags,
) -> Tensor:
    """bool [len(own)]: samples with a NaN (values: any non-finite) at a trained token of a field the loss uses."""
    uses = {
        "rollout_logp": cfg.needs_rollout_logp,
        "old_logp": cfg.needs_old_logp,
        "ref_logp": cfg.needs_ref_logp,
        "teacher_logp": cfg.needs_student_logp,
        "values": cfg.estimator.critic,
    }
    drop = torch.zeros(len(own), dtype=torch.bool)
    for name, needed in uses.items():
        if not needed or name not in fields:
            continue
        x = fields[name]
        bad = mask & (torch.isnan(x) if name != "values" else ~torch.isfinite(x))
        hit = segment_sum(bad.to(torch.int64), index, len(own)) > 0
        flags.add(f"nan_{name}", _named(own, hit & ~drop))
        drop |= hit
    return drop


def prepare_batch(
    cfg: ObjectiveConfig,
    samples: Sequence[TrainSample],
    *,
    current_step: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> PreparedBatch:
    """Advantages, masks and counts of a rollout batch.

    samples: the whole batch, on every rank the same, in the same order. current_step: step being trained, in the
    numbering of the spans; needed when cfg.max_staleness is set. Bad samples are masked and listed in `flags`, nothing is
    raised for data; MissingInputError when the settings need a field that no sample has. Arrays lie on the CPU in `dtype`.
    """
    flags = Flags()
    rewards, conflicting = _agreed_rewards(samples)
    flags.add("conflicting_rewards", [s.sample_id for i, s in enumerate(samples) if i in conflicting])
    baseline = normalize_group_rewards(
        [0.0] * len(samples) if cfg.estimator.teacher else rewards,
        [s.group for s in samples],
        [s.trajectory for s in samples],
        estimator=cfg.advantage_estimator,
        std=cfg.grpo_std_normalization,
        enabled=cfg.rewards_normalization,
        known_rewards=[s.known_rewards for s in samples],
    )
    if cfg.custom_reward_post_process_path:
        rewards, values = custom.post_processed_rewards(cfg, samples, rewards, frozenset(baseline.missing))
        missing = [i for i, value in enumerate(values) if value is None]
        baseline = replace(baseline, values=[value or 0.0 for value in values], missing=missing)
    own = [v if s.processed is None else s.processed for s, v in zip(samples, baseline.values, strict=True)]
    baseline = replace(baseline, values=own)
    lengths = torch.tensor([s.response_length for s in samples], dtype=torch.int64)
    index = sample_index(lengths)
    mask = pack_masks(samples, flags)
    packed = {name: pack_floats(samples, name, dtype, flags) for name in FLOAT_FIELDS}
    fields = {name: x for name, x in packed.items() if x is not None}

    unrewarded = set(baseline.missing)
    drop = torch.tensor([i in unrewarded for i in range(len(samples))], dtype=torch.bool)
    flags.add("missing_reward", [s.sample_id for i, s in enumerate(samples) if i in unrewarded - conflicting])
    drop |= _untrainable(cfg, samples, fields, mask, index, flags)
    mask = mask & ~drop[index]
    steps = pack_steps(samples, flags)
    age, mask = _apply_staleness(cfg, samples, steps, current_step, mask, index, flags)

    advantages, returns = _advantages(cfg, baseline.values, fields, mask, index, lengths)
    mask = mask & ~_unusable_groups(samples, advantages, returns, mask, index, flags)
    if cfg.kl_coef != 0 and fields.keys() >= {"old_logp", "ref_logp"}:
        _, uncharged = masked_kl(cfg.kl_loss_type, mask, fields["old_logp"], fields["ref_logp"])
        flags.add("kl_not_finite", _ids(samples, uncharged, index))
    counts = segment_sum(mask.to(torch.int64), index, len(samples))
    if int(counts.sum()) == 0:
        flags.add("all_masked", [s.sample_id for s in samples])
    elif cfg.whiten:
        advantages = whiten(advantages, mask)
    flags.add("nothing_to_train", _named(samples, counts == 0))

    known: dict[Hashable, int] = {}
    rollout_of = torch.tensor([known.setdefault(s.trajectory, len(known)) for s in samples], dtype=torch.int64)
    return PreparedBatch(
        cfg=cfg,
        sample_ids=tuple(s.sample_id for s in samples),
        lengths=lengths,
        rollout_of=rollout_of,
        counts=counts,
        rewards=tuple(baseline.values),
        mask=mask,
        advantages=advantages.to(dtype),
        returns=returns.to(dtype),
        fields=fields,
        staleness=age,
        flags=flags.by_reason,
        metrics=_metrics(baseline, rewards, counts, lengths, age, mask),
        prompt_lengths=tuple(s.prompt_length or 0 for s in samples),
        offsets=starts(lengths),
    )


def _named(own: Sequence[TrainSample], chosen: Tensor) -> list[str]:
    """Those of `chosen`, bool [len(own)]."""
    return [own[i].sample_id for i in torch.nonzero(chosen).flatten().tolist()]


def _ids(own: Sequence[TrainSample], tokens: Tensor, index: Tensor) -> list[str]:
    """Samples that have one of `tokens`, bool [T]."""
    return [own[i].sample_id for i in torch.unique(index[tokens]).tolist()]


def _unusable_groups(
    own: Sequence[TrainSample], advantages: Tensor, returns: Tensor, mask: Tensor, index: Tensor, flags: Flags
) -> Tensor:
    """bool [T]: tokens of groups in which a trained token's advantage or return cannot be trained. One such value makes the
    gradient of everybody infinite, and its siblings were compared with it; so their group is left out and its samples named."""
    bad = mask & ~((advantages.abs() < TOO_LARGE) & (returns.abs() < TOO_LARGE))
    flags.add("nonfinite_advantage", _ids(own, bad, index))
    groups = {own[i].group for i in torch.unique(index[bad]).tolist()}
    out = torch.tensor([s.group in groups for s in own], dtype=torch.bool)[index]
    flags.add("sibling_of_nonfinite", sorted({*_ids(own, mask & out, index)} - {*_ids(own, bad, index)}))
    return out


def _agreed_rewards(samples: Sequence[TrainSample]) -> tuple[list[float | None], set[int]]:
    """Rewards [S], None for every sample of a trajectory whose samples carry different ones, and those positions."""
    seen: dict[Hashable, set[float | None]] = {}
    for s in samples:
        seen.setdefault(s.trajectory, set()).add(None if s.reward is None or s.reward != s.reward else float(s.reward))
    torn = {i for i, s in enumerate(samples) if len(seen[s.trajectory]) > 1}
    return [None if i in torn or s.reward is None else float(s.reward) for i, s in enumerate(samples)], torn


def _apply_staleness(
    cfg: ObjectiveConfig,
    own: Sequence[TrainSample],
    steps: Tensor | None,
    current: int | None,
    mask: Tensor,
    index: Tensor,
    flags: Flags,
) -> tuple[Tensor | None, Tensor]:
    """(staleness [N] or None, mask without over-age tokens). Tokens of unknown version are over age under a bound."""
    if current is None:
        if cfg.max_staleness is not None:
            raise MissingInputError(f"max_staleness={cfg.max_staleness} needs current_step, none was given.")
        return None, mask
    bound = cfg.max_staleness
    if steps is None:
        if bound is None:
            return None, mask
        steps = torch.full((mask.numel(),), UNKNOWN_STEP)
    known = steps > UNKNOWN_STEP
    young = fresh(steps, current, bound)
    touched = segment_sum((mask & ~young).to(torch.int64), index, len(own)) > 0
    unknown = segment_sum((mask & ~known).to(torch.int64), index, len(own)) > 0
    flags.add("stale_tokens", _named(own, touched & ~unknown))
    if bound is not None:
        flags.add("unknown_version", _named(own, unknown))
    mask = mask & young
    flags.add("stale_sample", _named(own, touched & (segment_sum(mask.to(torch.int64), index, len(own)) == 0)))
    assert_fresh(steps, mask, current, bound)
    return torch.where(known, staleness(steps, current), 0), mask


def _advantages(
    cfg: ObjectiveConfig,
    rewards: Sequence[float],
    fields: dict[str, Tensor],
    mask: Tensor,
    index: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """(advantages before whitening, returns), float64 [N]."""
    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        mask=mask,
        index=index,
        lengths=lengths,
        **{name: fields.get(name) for name in ("old_logp", "ref_logp", "teacher_logp", "values")},
    )
    estimate = custom.advantages if cfg.custom_advantage_function_path else advantage_of(cfg.advantage_estimator)
    advantages, returns = estimate(cfg, inputs)
    if cfg.use_opd:
        advantages, _ = opd_penalty(inputs, advantages, cfg.opd_kl_coef)
    return advantages, returns


def _metrics(
    groups: GroupRewards, rewards: Sequence[float | None], counts: Tensor, lengths: Tensor, age: Tensor | None, mask: Tensor
) -> dict[str, float]:
    """Health of the batch. Staleness is a mean over trained tokens."""
    known = [r for r in rewards if r is not None and r == r]
    trained = [n for n, c in zip(lengths.tolist(), counts.tolist(), strict=True) if c > 0]
    out = {
        "reward_mean": sum(r / len(known) for r in known),
        "zero_variance_share": (groups.zero_variance_groups + groups.single_groups) / max(groups.groups, 1),
        "single_groups": float(groups.single_groups),
        "non_positive_mean_groups": float(groups.non_positive_mean_groups),
        "trained_tokens": float(counts.sum()),
        "trained_samples": float(len(trained)),
        "response_length": float(lengths.sum()) / max(lengths.numel(), 1),
        "length_bias": metric.length_bias(lengths.tolist(), trained),
    }
    if age is not None:
        total, worst = metric.mean_staleness(age, mask)
        out |= {"staleness": total / max(int(mask.sum()), 1), "staleness_max": float(worst)}
    return out
