"""All optimizer steps of one rollout batch.

Order: pack, plan, log-prob and value passes (only where the objective needs them), prepare, then per step: micro-batches
forward and backward (policy, then critic), gradient norms over all ranks, update. Always true: a step whose gradient is not
finite changes no weight, the critic's included, and no sample of it counts as trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from actors.trainer.backend import BackendConfig, StepBatch, StepResult
from actors.trainer.batching import StepPlan
from actors.trainer.objective import (
    ObjectiveConfig,
    PreparedBatch,
    TrainSample,
    finish,
    flatten,
    merge,
    policy_loss,
    prepare_batch,
    unflatten,
)
from actors.trainer.objective.metrics import COUNTS, MAXIMA, name_nonfinite
from actors.trainer.selfcheck import measure
from actors.trainer.torch_backend.clockwork import Stopwatch
from actors.trainer.torch_backend.core import Core
from actors.trainer.torch_backend.critic import value_metrics
from actors.trainer.torch_backend.layout import MicroBatch, PackedBatch
from actors.trainer.torch_backend.model import Policy
from actors.trainer.torch_backend.plan import RolloutPlan, plan_steps

Work = list[tuple[tuple[int, ...], MicroBatch]]
"""This rank's micro-batches of one step, with the sample positions in them."""


@dataclass(frozen=True, slots=True)
class _Rates:
    """What the live knobs and the schedule give this batch."""

    lr: float
    critic_lr: float
    clip: float
    policy_learns: bool


@dataclass(slots=True)
class _Tally:
    """What the steps of one rollout batch add up to."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)
    updates: int = 0
    skipped: list[StepPlan] = field(default_factory=list)


def train_batch(core: Core, batch: StepBatch) -> StepResult:
    """Train on one rollout batch; the same call on every rank with the same batch."""
    watch = Stopwatch(core.device)
    torch.manual_seed(batch.seed)
    cfg = core.objective_for(batch.knobs)
    rates = _Rates(
        lr=core.rate(batch.step, batch.knobs),
        critic_lr=core.critic.rate(batch.step) if core.critic else 0.0,
        clip=float(batch.knobs.get("clip_grad", core.config.clip_grad)),
        policy_learns=core.policy_learns(batch.step),
    )
    with watch.phase("prepare"):
        packed = PackedBatch(batch.samples)
        names = [s.train.trajectory for s in batch.samples]
        plan, work = _planned(core, core.config, packed, names)
        passes, cap = work, core.config.log_probs_max_tokens_per_gpu
        if core.config.use_dynamic_batch_size and cap != core.config.max_tokens_per_gpu:
            _, passes = _planned(core, msgspec.structs.replace(core.config, max_tokens_per_gpu=cap), packed, names)
    with watch.phase("logprob_pass"):
        _own_passes(core, cfg, batch, packed, passes)
        lost = _old_actor_passes(core, batch, packed, passes, cfg.max_staleness or 0) if cfg.keep_old_actor else []
    with watch.phase("prepare"):
        samples = [s.train for s in batch.samples]
        for i in plan.trimmed:  # their rewards still belong to their group's baseline
            samples[i] = replace(samples[i], remove=True)
        prepared = prepare_batch(cfg, samples, current_version=batch.step)
    tally = _Tally()
    if lost:
        tally.flags["old_actor_gone"] = lost
    for step, mine in zip(plan.steps, work, strict=True):
        _one_step(core, cfg, prepared, step, mine, rates, watch, tally)
    if (
        tally.updates
        and core.config.ref_update_interval
        and (batch.step + 1) % core.config.ref_update_interval == 0
    ):
        core.refresh_reference()
    result = _result(core, packed, prepared, samples, plan, tally, rates, watch)
    # A first step that is done again may train on what lost weights made; nothing is to be expected of those.
    if batch.step == 0 and all(made == 0 for s in samples for made, _ in s.spans or ()):
        result.metrics |= measure(tally.metrics[0], core.config, cfg)
    return result


def _own_passes(core: Core, cfg: ObjectiveConfig, batch: StepBatch, packed: PackedBatch, work: list[Work]) -> None:
    """Fill old_logp, ref_logp, teacher_logp and values of every sample where the objective needs them. Uses the
    micro-batches of the gradient pass, so that equal weights give equal numbers to the last bit (KL to the reference is
    exactly 0 at step 1)."""
    models: dict[str, Policy | None] = {
        "old_logp": core.policy if cfg.needs_old_logp else None,
        "ref_logp": core.reference if cfg.needs_ref_logp else None,
        "teacher_logp": core.teacher,
    }
    passes: dict[str, Callable[[MicroBatch], Tensor]] = {n: _logp_of(m) for n, m in models.items() if m is not None}
    if core.critic is not None:
        passes["values"] = core.critic.model
    for name, model in passes.items():
        values = _pass(core, model, packed, work)
        for i, s in enumerate(batch.samples):
            setattr(s.train, name, values[packed.first_response[i] : packed.first_response[i] + packed.response[i]])


def _old_actor_passes(
    core: Core, batch: StepBatch, packed: PackedBatch, work: list[Work], depth: int
) -> list[str]:
    """Replace old_logp of tokens made before this step by those of the weights that made them; then keep this step's
    weights. Returns samples with tokens whose weights are not kept: they take the oldest that are."""
    own, lost = core.policy.named_weights(), []
    made = [np.repeat(*np.array(s.train.spans or [(batch.step, s.train.response_length)]).T) for s in batch.samples]
    kept = core.old_actors.steps
    nearest = {
        int(step): max((k for k in kept if k <= step), default=min(kept, default=batch.step))
        for step in {int(v) for versions in made for v in np.unique(versions)}
        if step < batch.step
    }
    for step in sorted({k for k in nearest.values() if k < batch.step}):
        with core.old_actors.wearing(step, own):
            values = _pass(core, _logp_of(core.policy), packed, work)
        for i, sample in enumerate(batch.samples):
            here = torch.from_numpy(np.isin(made[i], [v for v, k in nearest.items() if k == step]))
            first, n = packed.first_response[i], packed.response[i]
            present = torch.as_tensor(sample.train.old_logp)
            sample.train.old_logp = torch.where(here, values[first : first + n], present)
    for sample, versions in zip(batch.samples, made, strict=True):
        if any(nearest.get(int(v), batch.step) != v for v in np.unique(versions)):
            lost.append(sample.train.sample_id)
    core.old_actors.keep(batch.step, own, depth=depth)
    return lost


def _planned(
    core: Core, config: BackendConfig, packed: PackedBatch, trajectories: Sequence[Hashable]
) -> tuple[RolloutPlan, list[Work]]:
    """The plan of a rollout batch, and this rank's micro-batches of each step."""
    plan = plan_steps(
        config,
        packed.total.tolist(),
        trajectories,
        responses=packed.response.tolist(),
        ranks=core.ranks.size,
        cost=core.cost,
    )
    mine = [step.ranks[core.ranks.rank] for step in plan.steps]
    return plan, [[(ids, packed.micro_batch(ids, core.device)) for ids in batches] for batches in mine]


def _logp_of(policy: Policy) -> Callable[[MicroBatch], Tensor]:
    return lambda micro: policy(micro)[0]


@torch.no_grad()
def _pass(core: Core, model: Callable[[MicroBatch], Tensor], packed: PackedBatch, work: list[Work]) -> Tensor:
    """One number of a model per response token of the batch, float32 [N] on the CPU, equal on every rank."""
    values = torch.zeros(packed.response_tokens)
    for mine in work:
        for _, micro in mine:
            values[torch.from_numpy(micro.response_slots)] = model(micro).float().cpu()
    return core.ranks.total(values)


def _one_step(
    core: Core,
    cfg: ObjectiveConfig,
    prepared: PreparedBatch,
    step: StepPlan,
    mine: Work,
    rates: _Rates,
    watch: Stopwatch,
    tally: _Tally,
) -> None:
    """One optimizer step over `step`'s samples, of which `mine` are this rank's."""
    norm = prepared.norm(step.samples, scale=float(core.ranks.size))  # FSDP averages over ranks: undone here
    totals: dict[str, Tensor] = {}
    seen: list[tuple[Tensor, Tensor, Tensor, tuple[str, ...]]] = []
    learners = {"grad_norm": (core.weights, core.optimizer, rates.lr)} if rates.policy_learns else {}
    if core.critic is not None:
        learners["critic_grad_norm"] = (core.critic.weights, core.critic.optimizer, rates.critic_lr)
    for weights, _, _ in learners.values():
        weights.clear()
    for k, (ids, micro) in enumerate(mine):
        core.sync_gradients(k == len(mine) - 1)
        with watch.phase("forward"), torch.set_grad_enabled(rates.policy_learns):
            logp, entropy = core.policy(micro, cfg.entropy_coef != 0)
            inputs = prepared.micro_batch(ids, logp, entropy=entropy)
            loss, sums = policy_loss(cfg, inputs, norm)
        if rates.policy_learns:
            with watch.phase("backward"):
                loss.backward()
        merge(totals, sums)
        if core.critic is not None:
            with watch.phase("critic"):
                merge(totals, core.critic.backward(micro, inputs, norm, cfg.value_clip))
        seen.append((logp.detach(), inputs.mask, inputs.index, inputs.sample_ids))
    with watch.phase("optimizer"):
        norms = {name: weights.clip(rates.clip) for name, (weights, _, _) in learners.items()}
        finite = all(map(math.isfinite, norms.values()))
        if finite and norm.trained_tokens > 0:
            for weights, optimizer, lr in learners.values():
                optimizer.step(lr)
                weights.publish()
            tally.updates += 1
    if not finite:
        tally.skipped.append(step)
        tally.flags.setdefault("nonfinite_gradient", []).extend(prepared.sample_ids[i] for i in step.samples)
    report = finish(_over_ranks(core, totals), norm, per_token=cfg.reduction == "per_token")
    if report.get("nonfinite_tokens", 0) > 0:
        for logp, mask, index, ids_ in seen:
            bad = name_nonfinite(logp, mask, index, ids_)
            if bad:
                tally.flags.setdefault("nonfinite_logp", []).extend(bad)
    tally.metrics.append(report | norms)


def _over_ranks(core: Core, totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """The step's sums over all ranks, on the CPU."""
    here = {name: value.cpu() for name, value in totals.items()}
    if core.ranks.alone:
        return here
    sums, tops = flatten(here)
    return unflatten(here, core.ranks.total(sums), core.ranks.largest(tops))


def _combine(reports: list[dict[str, float]]) -> dict[str, float]:
    """Means over the steps of a rollout batch; maxima and counts as such."""
    out = {}
    for name in sorted({name for report in reports for name in report}):
        values = [report[name] for report in reports if name in report]
        whole = max(values) if name in MAXIMA else sum(values)
        out[name] = whole if name in MAXIMA or name in COUNTS else whole / len(values)
    return out


def _second_model(prepared: PreparedBatch, rates: _Rates) -> dict[str, float]:
    """What critic or teacher said of the batch before the step."""
    fields, mask = prepared.fields, prepared.mask
    out: dict[str, float] = {}
    if prepared.cfg.advantage_estimator == "ppo":
        out |= value_metrics(fields["values"], prepared.returns, mask) | {"critic_lr": rates.critic_lr}
    if prepared.cfg.needs_student_logp and "teacher_logp" in fields and bool(mask.any()):
        out["opd_reverse_kl"] = float((fields["old_logp"] - fields["teacher_logp"])[mask].mean())
    return out


def _result(
    core: Core,
    packed: PackedBatch,
    prepared: PreparedBatch,
    samples: Sequence[TrainSample],
    plan: RolloutPlan,
    tally: _Tally,
    rates: _Rates,
    watch: Stopwatch,
) -> StepResult:
    steps = plan.steps
    trimmed = {prepared.sample_ids[i] for i in plan.trimmed}  # listed under one reason only
    listed = {reason: [i for i in ids if i not in trimmed] for reason, ids in (prepared.flags | tally.flags).items()}
    listed["trimmed"] = [prepared.sample_ids[i] for i in plan.trimmed]
    listed["over_token_cap"] = [prepared.sample_ids[i] for i in plan.over_cap]
    flags = {reason: ids for reason, ids in listed.items() if ids}
    skipped = {i for step in tally.skipped for i in step.samples}
    trained = [tuple(n * (i not in skipped) for n in spans) for i, spans in enumerate(prepared.trained_spans(samples))]
    seconds, phases = watch.read()
    tokens = sum(int(packed.total[list(step.samples)].sum()) for step in steps)
    metrics = {
        **prepared.metrics,
        **_combine(tally.metrics),
        **_second_model(prepared, rates),
        "lr": rates.lr,
        "tokens": float(tokens),
        "response_tokens": float(packed.response_tokens),
        "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
        "global_batch_size": sum(step.num_rollouts for step in steps) / len(steps),
        "updates": float(tally.updates),
        "skipped_updates": float(len(tally.skipped)),
        "micro_batches": float(sum(len(rank) for step in steps for rank in step.ranks)),
        "step_s": seconds,
        **{f"{name}_s": value for name, value in phases.items()},
    }
    if not core.ranks.alone:
        metrics["rank_imbalance"] = plan.imbalance
    packing = tuple(ids for step in steps for group in zip(*step.ranks, strict=True) for ids in group)
    return StepResult(
        metrics={f"train/{name}": value for name, value in metrics.items()},
        packing=packing,
        trained_spans=trained,
        flags=flags,
        skipped=bool(tally.skipped) and tally.updates == 0,
    )


__all__ = ("train_batch",)
