"""All optimizer steps of one rollout batch.

Order: pack, plan, log-prob and value passes (only where the objective needs them), prepare, then per step: micro-batches
forward and backward (policy, then critic), gradient norms over all ranks, update. Always true: a step whose gradient is not
finite changes no weight, the critic's included, and no sample of it counts as trained.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from actors.trainer.backend import BackendConfig, StepBatch, StepResult
from actors.trainer.batch.batching import StepPlan
from actors.trainer.batch.packing import BatchingError
from actors.trainer.batch.plan import RolloutPlan, plan_steps
from actors.trainer.objective import (
    LossInputs,
    MissingInputError,
    ObjectiveConfig,
    ObjectiveConfigError,
    PreparedBatch,
    TrainSample,
    check,
    filled,
    finish,
    flatten,
    merge,
    policy_loss,
    prepare_batch,
    unflatten,
    value_loss,
)
from actors.trainer.objective.metrics import COUNTS, MAXIMA, name_nonfinite, value_metrics
from actors.trainer.objective_config import HookError
from actors.trainer.selfcheck import measure
from actors.trainer.training.clockwork import Stopwatch
from actors.trainer.training.dump import dump
from actors.trainer.training.verbs import Core, Packed, Rates, Work

REFUSALS = (BatchingError, HookError, MissingInputError, ObjectiveConfigError)
"""Raised from the batch alone, before anything changed, so on every rank or on none; they say what it is themselves."""
CONTENT = (ValueError, IndexError, KeyError, TypeError, ArithmeticError)
"""What numbers that fit nothing raise, wherever they are met, and functions of the user's."""


class BatchFault(ValueError):
    """What the content of a micro-batch raised, on this rank or another: raised on all of them."""


def as_line(error: Exception) -> str:
    """A fault in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (*REFUSALS, BatchFault)) else f"{type(error).__name__}: {text}"


@dataclass(slots=True)
class _Tally:
    """What the steps of one rollout batch add up to."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    flags: dict[str, list[str]] = field(default_factory=dict)
    updates: int = 0
    skipped: list[StepPlan] = field(default_factory=list)
    seen: list[dict[tuple[int, ...], LossInputs]] = field(default_factory=list)
    """By step, where it is asked for: what the loss of this rank's micro-batches was made of."""
    undumped: int = 0


def settle_objective(config: BackendConfig) -> ObjectiveConfig:
    """The objective as a backend runs it.

    With one optimizer step per rollout batch the policy before the step *is* the policy in the step, so its own log-probs,
    detached, replace the extra pass: the ratio is 1 and corrections compare the same numbers. The pass stays where the
    objective needs log-probs before the step (KL in the reward, distillation, batch-normalised weights).
    """
    objective = check(config.objective)
    several = config.num_steps_per_rollout > 1
    early = objective.keep_old_actor or objective.kl_coef != 0 or objective.needs_student_logp or objective.tis_batch_normalize
    if objective.proximal == "recompute" and not several and not early:
        return msgspec.structs.replace(objective, proximal="current")
    return objective


def train_batch(core: Core, batch: StepBatch) -> StepResult:
    """Train on one rollout batch; the same call on every rank with the same batch."""
    watch = Stopwatch(core.device)
    torch.manual_seed(batch.seed)
    cfg = core.objective_for(batch.knobs)
    rates = core.rates(batch.step, batch.knobs)
    with watch.phase("prepare"):
        packed = core.pack(batch.samples)
        names = [s.train.trajectory for s in batch.samples]
        plan, work = _planned(core, core.config, packed, names)
        passes, cap = work, core.config.log_probs_max_tokens_per_gpu
        if core.config.use_dynamic_batch_size and cap != core.config.max_tokens_per_gpu:
            _, passes = _planned(core, msgspec.structs.replace(core.config, max_tokens_per_gpu=cap), packed, names)
        if packed.routes is not None and packed.routes.records:
            passes = work  # what routers choose there is known by micro-batch
    with watch.phase("logprob_pass"):
        _own_passes(core, cfg, batch, packed, passes)
        lost = _old_actor_passes(core, batch, packed, passes, cfg.max_staleness or 0) if cfg.keep_old_actor else []
    with watch.phase("prepare"):
        samples = [s.train for s in batch.samples]
        for i in plan.trimmed:  # their rewards still belong to their group's baseline
            samples[i] = replace(samples[i], remove=True)
        prepared = prepare_batch(cfg, samples, current_step=batch.step)
    tally = _Tally()
    if lost:
        tally.flags["old_actor_gone"] = lost
    if packed.routes is not None:
        tally.flags |= packed.routes.flags
    for step, mine in zip(plan.steps, work, strict=True):
        _one_step(core, cfg, prepared, step, mine, rates, watch, tally)
    if core.config.save_debug_train_data:
        done = dump(core.config.save_debug_train_data, core.ranks.rank, batch, tally.seen)
        tally.undumped = int(core.ranks.total(torch.tensor([not done], dtype=torch.int64)))  # of all stages too
    if tally.updates and core.config.ref_update_interval and (batch.step + 1) % core.config.ref_update_interval == 0:
        core.refresh_reference()
    result = _result(core, packed, prepared, samples, plan, tally, rates, watch)
    # A first step that is done again may train on what lost weights made; nothing is to be expected of those.
    if batch.step == 0 and all(made == 0 for s in samples for made, _ in s.spans or ()):
        result.metrics |= measure(tally.metrics[0], core.config, cfg, equal_passes=core.equal_passes)
    return result


def examine(core: Core, batch: StepBatch, *, forward: bool) -> None:
    """What `train_batch` does before it changes anything, and the loss, sample by sample: raises what it would raise. `forward`:
    the models run too; else their numbers are taken as 0."""
    cfg = core.objective_for(batch.knobs)
    packed = core.pack(batch.samples)
    work: list[Work] = [[((i,), packed.micro_batch((i,), core.device)) for i in range(len(batch.samples))]]
    places = [slice(first, first + n) for first, n in zip(packed.first_response, packed.response, strict=True)]
    for name in {"old_logp", *core.models(cfg)}:
        values = core.score(name, packed, work) if forward else torch.zeros(int(packed.response.sum()))
        for sample, place in zip(batch.samples, places, strict=True):
            setattr(sample.train, name, values[place])
    prepared = prepare_batch(cfg, [s.train for s in batch.samples], current_step=batch.step)
    norm = prepared.norm()
    for i, sample in enumerate(batch.samples):
        logp = torch.as_tensor(sample.train.old_logp)
        policy_loss(cfg, prepared.micro_batch((i,), logp, entropy=torch.zeros_like(logp)), norm)


def _own_passes(core: Core, cfg: ObjectiveConfig, batch: StepBatch, packed: Packed, work: list[Work]) -> None:
    """Fill old_logp, ref_logp, teacher_logp and values of every sample where the objective needs them. Uses the
    micro-batches of the gradient pass, so that equal weights give equal numbers to the last bit (KL to the reference is
    exactly 0 at step 1)."""
    for name in core.models(cfg):
        values = core.score(name, packed, work)
        for i, s in enumerate(batch.samples):
            setattr(s.train, name, values[packed.first_response[i] : packed.first_response[i] + packed.response[i]])


def _old_actor_passes(core: Core, batch: StepBatch, packed: Packed, work: list[Work], depth: int) -> list[str]:
    """Replace old_logp of tokens made before this step by those of the weights that made them; then keep this step's
    weights. Returns samples with tokens whose weights are not kept: they take the oldest that are."""
    lost = []
    made = [np.repeat(*np.array(s.train.spans or [(batch.step, s.train.response_length)]).T) for s in batch.samples]
    kept = core.old_actors.steps
    nearest = {
        int(step): max((k for k in kept if k <= step), default=min(kept, default=batch.step))
        for step in {int(v) for versions in made for v in np.unique(versions)}
        if step < batch.step
    }
    for step in sorted({k for k in nearest.values() if k < batch.step}):
        with core.old_actors.wearing(step, core.own_weights()):
            values = core.score("old_logp", packed, work)
        for i, sample in enumerate(batch.samples):
            here = torch.from_numpy(np.isin(made[i], [v for v, k in nearest.items() if k == step]))
            first, n = packed.first_response[i], packed.response[i]
            present = torch.as_tensor(sample.train.old_logp)
            sample.train.old_logp = torch.where(here, values[first : first + n], present)
    for sample, versions in zip(batch.samples, made, strict=True):
        if any(nearest.get(int(v), batch.step) != v for v in np.unique(versions)):
            lost.append(sample.train.sample_id)
    core.old_actors.keep(batch.step, core.own_weights(), depth=depth)
    return lost


def _planned(core: Core, config: BackendConfig, packed: Packed, trajectories: Sequence[Hashable]) -> tuple[RolloutPlan, list[Work]]:
    """The plan of a rollout batch, and this rank's micro-batches of each step."""
    plan = plan_steps(
        config,
        packed.total.tolist(),
        trajectories,
        responses=packed.response.tolist(),
        ranks=core.n_ranks,
        cp_size=core.cp_size,
        mb_group=core.mb_group,
        cost=core.cost,
    )
    mine = [step.ranks[core.rank] for step in plan.steps]
    return plan, [[(ids, packed.micro_batch(ids, core.device)) for ids in batches] for batches in mine]


def _one_step(
    core: Core,
    cfg: ObjectiveConfig,
    prepared: PreparedBatch,
    step: StepPlan,
    mine: Work,
    rates: Rates,
    watch: Stopwatch,
    tally: _Tally,
) -> None:
    """One optimizer step over `step`'s samples, of which `mine` are this rank's."""
    norm = prepared.norm(step.samples, scale=core.average_over)
    totals: dict[str, Tensor] = {}
    seen: dict[tuple[int, ...], LossInputs] = {}
    if core.config.save_debug_train_data:
        tally.seen.append(seen)

    # All at once, before the device has work: a copy to it between forward and backward would wait for the forward to end.
    like = torch.empty(0, device=core.device)
    staged = {ids: prepared.stage(ids, like) for ids, _ in mine}

    def policy(ids: tuple[int, ...], logp: Tensor, entropy: Tensor) -> Tensor:
        inputs = filled(staged[ids], logp, entropy)
        loss, sums = policy_loss(cfg, inputs, norm)
        merge(totals, sums)
        seen[ids] = replace(inputs, new_logp=logp.detach(), entropy=None)
        return loss

    def value(ids: tuple[int, ...], values: Tensor) -> Tensor:
        loss, sums = value_loss(cfg.value_clip, values, seen[ids], norm)
        merge(totals, sums)
        return loss

    faults: list[Exception] = []

    def held(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A fault of one rank's micro-batch waits until all ranks are through: in between they would wait for it in vain."""

        def call(ids: tuple[int, ...], *given: Tensor) -> Tensor:
            try:
                return loss(ids, *given)
            except CONTENT as error:
                faults.append(error)
                return torch.stack([x.sum() for x in given]).sum() * 0

        return call

    core.forward_backward(
        mine, held(policy), held(value), learns=rates.policy_learns, entropy_gradient=cfg.entropy_coef != 0, watch=watch
    )
    if fault := core.ranks.first_said(as_line(faults[0]) if faults else ""):
        raise BatchFault(fault) from (faults[0] if faults else None)
    with watch.phase("optimizer"):
        norms, finite = core.apply(rates, update=norm.trained_tokens > 0)
    tally.updates += finite and norm.trained_tokens > 0
    if not finite:
        tally.skipped.append(step)
        tally.flags.setdefault("nonfinite_gradient", []).extend(prepared.sample_ids[i] for i in step.samples)
    report = finish(_over_ranks(core, cfg, totals), norm, per_token=cfg.reduction == "per_token")
    if report.get("nonfinite_tokens", 0) > 0:
        for inputs in seen.values():
            bad = name_nonfinite(inputs.new_logp, inputs.mask, inputs.index, inputs.sample_ids)
            if bad:
                tally.flags.setdefault("nonfinite_logp", []).extend(bad)
    tally.metrics.append(report | norms)


def _over_ranks(core: Core, cfg: ObjectiveConfig, totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """The step's sums over all ranks, on the CPU."""
    here = {name: value.cpu() for name, value in totals.items()}
    if core.n_ranks == 1:
        return here
    if cfg.custom_loss_function_path or cfg.custom_tis_function_path:  # ranks add up by place, and it may name what others do not
        known: set[str] = set()
        while said := core.ranks.first_said("\0".join(sorted(here.keys() - known))):
            known.update(said.partition(": ")[2].split("\0"))
        here |= {name: torch.zeros(()) for name in known - here.keys()}
    sums, tops = flatten(here)
    return unflatten(here, core.total(sums), core.largest(tops))


def _combine(reports: list[dict[str, float]]) -> dict[str, float]:
    """Means over the steps of a rollout batch; maxima and counts as such."""
    out = {}
    for name in sorted({name for report in reports for name in report}):
        values = [report[name] for report in reports if name in report]
        whole = max(values) if name in MAXIMA else sum(values)
        out[name] = whole if name in MAXIMA or name in COUNTS else whole / len(values)
    return out


def _second_model(prepared: PreparedBatch, rates: Rates) -> dict[str, float]:
    """What critic or teacher said of the batch before the step."""
    fields, mask = prepared.fields, prepared.mask
    out: dict[str, float] = {}
    if prepared.cfg.estimator.critic:
        out |= value_metrics(fields["values"], prepared.returns, mask) | {"critic_lr": rates.critic_lr}
    if prepared.cfg.needs_student_logp and "teacher_logp" in fields and bool(mask.any()):
        out["opd_reverse_kl"] = float((fields["old_logp"] - fields["teacher_logp"])[mask].mean())
    return out


def _result(
    core: Core,
    packed: Packed,
    prepared: PreparedBatch,
    samples: Sequence[TrainSample],
    plan: RolloutPlan,
    tally: _Tally,
    rates: Rates,
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
    if packed.routes is not None:
        metrics |= packed.routes.metrics(core.total)
    if torch.cuda.is_initialized():
        stats = torch.cuda.memory_stats()
        metrics["gpu_peak_bytes"] = float(stats.get("allocated_bytes.all.peak", 0))
        metrics["gpu_retries"] = float(stats.get("num_alloc_retries", 0))
    if core.n_ranks > 1:
        metrics["rank_imbalance"] = plan.imbalance
    packing = tuple(ids for step in steps for group in zip(*step.ranks, strict=True) for ids in group)
    return StepResult(
        metrics={f"train/{name}": value for name, value in metrics.items()},
        packing=packing,
        trained_spans=trained,
        flags=flags,
        shares=prepared.shares([step.samples for step in steps]),
        skipped=bool(tally.skipped) and tally.updates == 0,
        undumped=tally.undumped,
    )
