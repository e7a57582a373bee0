"""The policy loss of one micro-batch: everything the trainer calls backward on.

Order: clipped policy loss -> OPSM -> correction weights and rejection -> reduction -> entropy -> KL.
Always true: for fixed `Norm`, the sum over micro-batches does not depend on how samples were packed or ordered.
Reference sections 4.2 and 4.6.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from actors.trainer.objective import custom
from actors.trainer.objective import mis as _mis  # noqa: F401  registers the MIS correction
from actors.trainer.objective.advantages import needed
from actors.trainer.objective.corrections import CORRECTIONS, CorrectionInputs, interpolated_proximal, opsm_mask
from actors.trainer.objective.inputs import LossInputs, Norm
from actors.trainer.objective.kl import approx_kl, masked_kl
from actors.trainer.objective.losses import POLICY_LOSSES, Terms
from actors.trainer.objective.mis import perplexity_metrics
from actors.trainer.objective.reductions import reduce_sum
from actors.trainer.objective.segments import RAW_LIMIT, keep, ratio_of, safe_log_ratio
from actors.trainer.objective_config import ObjectiveConfig

Rows = dict[str, Tensor]


@dataclass(slots=True)
class TokenTerms:
    """Per-token results before reduction, all [T]. rows are metrics reduced with `accepted`, raw_rows with `usable`."""

    loss: Tensor
    """corrected loss, gradient through new_logp"""
    plain_loss: Tensor
    clipped: Tensor
    log_ratio: Tensor
    """exponent of the ratio used (GSPO: the sequence's)"""
    old_logp: Tensor
    usable: Tensor
    """bool: trained and not NaN"""
    accepted: Tensor
    """bool: usable and not rejected by the correction"""
    weights: Tensor | None = None
    leaf_of: tuple[Tensor, Tensor] | None = None
    """where the user's function weighed the loss: that before, and the leaf that `loss` was made of instead"""
    rows: Rows = field(default_factory=dict)
    raw_rows: Rows = field(default_factory=dict)
    sums: Rows = field(default_factory=dict)


def denominator(cfg: ObjectiveConfig, mb: LossInputs) -> Tensor:
    """The PPO denominator [T], without gradient, as `cfg.proximal` chooses it."""
    if cfg.proximal == "recompute":
        return needed(mb.old_logp, "old_logp", "proximal=recompute")
    if cfg.proximal == "rollout":
        return needed(mb.rollout_logp, "rollout_logp", "proximal=rollout")
    if cfg.proximal == "interpolate":
        rollout = needed(mb.rollout_logp, "rollout_logp", "proximal=interpolate")
        age = needed(mb.staleness, "staleness", "proximal=interpolate")
        return interpolated_proximal(mb.new_logp.detach(), rollout, age)
    return mb.new_logp.detach()


def token_terms(cfg: ObjectiveConfig, mb: LossInputs, norm: Norm) -> TokenTerms:
    """Everything up to the reduction."""
    old = denominator(cfg, mb)
    log_ratio, usable = safe_log_ratio(mb.mask, mb.new_logp, old)
    advantages = keep(usable, mb.advantages)
    part = POLICY_LOSSES[cfg.policy_loss](
        cfg,
        Terms(
            log_ratio=log_ratio,
            new_logp=keep(usable, mb.new_logp),
            old_logp=keep(usable, old),
            advantages=advantages,
            usable=usable,
            index=mb.index,
            counts=mb.counts,
        ),
    )
    t = TokenTerms(part.loss, part.loss, part.clipped, part.log_ratio, old, usable, usable)
    if cfg.use_opsm:
        inputs = CorrectionInputs(log_ratio, usable, mb.index, mb.counts)
        kept, share = opsm_mask(advantages, log_ratio, inputs, cfg.opsm_delta)
        t.loss = keep(kept, t.loss)
        if cfg.reduction == "per_sample":
            t.sums["opsm_clipfrac"] = share.sum()
        else:
            t.raw_rows["opsm_clipfrac"] = (~kept).to(share.dtype)
    if cfg.correction != "none":
        _correct(cfg, mb, norm, t)
    return t


def _correct(cfg: ObjectiveConfig, mb: LossInputs, norm: Norm, t: TokenTerms) -> None:
    """Applies the chosen correction to `t` and adds its metrics."""
    rollout = needed(mb.rollout_logp, "rollout_logp", f"correction={cfg.correction}")
    with torch.no_grad():
        gap, known = safe_log_ratio(t.usable, t.old_logp, rollout, RAW_LIMIT)
    if cfg.custom_tis_function_path:
        _correct_by_hook(cfg, mb, t, rollout, known)
        return
    with torch.no_grad():
        x = CorrectionInputs(gap, known, mb.index, mb.counts, norm.weight_mean)
        result = CORRECTIONS[cfg.correction](cfg, x)
        t.raw_rows |= result.metrics
        if cfg.correction == "mis" and cfg.diagnostics:
            t.raw_rows |= perplexity_metrics(keep(known, t.old_logp), keep(known, rollout), x)
    if cfg.report_only:
        return
    t.weights = result.weights
    t.accepted = result.mask
    if result.weights is not None:
        t.loss = t.loss * result.weights


def _correct_by_hook(cfg: ObjectiveConfig, mb: LossInputs, t: TokenTerms, rollout: Tensor, known: Tensor) -> None:
    """The same by the user's function, which weighs the loss itself."""
    leaf = t.loss.detach().clone().requires_grad_()
    loss, kept, rows = custom.corrected(cfg, mb, leaf, t.old_logp, rollout, known)
    t.raw_rows |= rows
    if not cfg.report_only:
        t.loss, t.leaf_of, t.accepted = loss, (t.loss, leaf), kept


def _loss_of_hook(cfg: ObjectiveConfig, mb: LossInputs, norm: Norm) -> tuple[Tensor, dict[str, Tensor]]:
    """`policy_loss` by the user's function, with the health metrics that need no policy loss."""
    old = denominator(cfg, mb)
    usable = mb.mask & ~torch.isnan(mb.new_logp.detach() - old)
    total, sums = custom.loss(cfg, mb, usable, old)
    sums["loss"] = total.detach()
    sums["nonfinite_tokens"] = (mb.mask & ~usable).sum()
    if cfg.diagnostics and mb.rollout_logp is not None:
        with torch.no_grad():
            gap = (mb.new_logp - mb.rollout_logp).abs()
            gap = keep(usable & torch.isfinite(gap), gap)
            for name in ("train_rollout_logprob_abs_diff", "forward_logp_abs_diff"):
                sums[name] = reduce_sum(gap, usable, mb.metric_weights)
            sums["forward_logp_max_diff"] = gap.amax() if gap.numel() else gap.sum()
    return total * (norm.scale / norm.divisor), sums


def policy_loss(cfg: ObjectiveConfig, mb: LossInputs, norm: Norm) -> tuple[Tensor, dict[str, Tensor]]:
    """-> (loss [], to call backward on; metrics of detached sums, see `metrics`).

    loss = norm.scale / norm.divisor * sum_t w_t (policy loss - entropy_coef H + kl_loss_coef KL): micro-batch
    losses of a step simply add up, over micro-batches and (gradients summed) over ranks. Nothing trained: 0 with
    zero gradient. A NaN log-prob at a trained token takes that token out of the loss and is counted in
    `nonfinite_tokens`; `metrics.name_nonfinite` names the sample. `loss` and `pg_loss` are reported as they are
    reduced; everything else, `kl_loss` and `entropy_loss` included, as a mean, also under reduction=constant.
    Raises MissingInputError when the settings need a tensor the micro-batch lacks, HookError when a function of the
    user's does not keep its signature.
    """
    if cfg.custom_loss_function_path:
        return _loss_of_hook(cfg, mb, norm)
    t = token_terms(cfg, mb, norm)
    total = pg = custom.reduced(cfg, mb, t.accepted, t.loss, t.leaf_of)
    sums: dict[str, Tensor] = {"pg_loss": pg.detach()}
    if cfg.entropy_coef != 0:
        entropy = needed(mb.entropy, "entropy", f"entropy_coef={cfg.entropy_coef}")
        total = total - cfg.entropy_coef * reduce_sum(entropy, t.accepted, mb.weights)
        sums["entropy_loss"] = reduce_sum(entropy.detach(), t.accepted, mb.metric_weights)
    elif mb.entropy is not None:
        t.rows["entropy_loss"] = mb.entropy.detach()
    if cfg.use_kl_loss:
        ref = needed(mb.ref_logp, "ref_logp", "use_kl_loss")
        new = mb.new_logp if cfg.kl_loss_coef != 0 else mb.new_logp.detach()
        old = t.old_logp if cfg.use_unbiased_kl else None
        kl, bad = masked_kl(cfg.kl_loss_type, t.accepted, new, ref, old)
        if cfg.kl_loss_coef != 0:
            total = total + cfg.kl_loss_coef * reduce_sum(kl, t.accepted, mb.weights)
        sums["kl_loss"] = reduce_sum(kl.detach(), t.accepted, mb.metric_weights)
        far = (mb.new_logp.detach() - ref).abs()
        t.rows["ref_logprob_abs_diff"] = keep(t.accepted & torch.isfinite(far), far)
        sums["kl_nonfinite_tokens"] = bad.sum()
    sums["loss"] = total.detach()
    with torch.no_grad():
        if cfg.diagnostics:
            _diagnostics(mb, t, norm, sums)
        sums["nonfinite_tokens"] = (mb.mask & ~t.usable).sum()
        same = t.accepted is t.usable
        groups = ((t.usable, t.rows | t.raw_rows),) if same else ((t.accepted, t.rows), (t.usable, t.raw_rows))
        for mask, rows in groups:
            if rows:
                reduced = reduce_sum(torch.stack(list(rows.values())), mask, mb.metric_weights)
                sums |= dict(zip(rows, reduced.unbind(), strict=True))
        sums |= t.sums
    factor = norm.scale / norm.divisor
    return total * factor, sums


def _diagnostics(mb: LossInputs, t: TokenTerms, norm: Norm, sums: dict[str, Tensor]) -> None:
    """Clip share, KL to the denominator, ESS per rollout, and train/rollout mismatch when engine log-probs exist."""
    log_ratio = t.log_ratio.detach()
    dtype = log_ratio.dtype
    t.rows["pg_clipfrac"] = t.clipped.to(dtype)
    t.rows["ppo_kl"] = -log_ratio
    ratio = keep(t.usable, ratio_of(log_ratio))
    parts = torch.stack((ratio, ratio * ratio))
    per_rollout = torch.zeros(2, norm.rollout_tokens.numel(), dtype=dtype, device=ratio.device)
    sums["ess_w"], sums["ess_w2"] = per_rollout.index_add_(1, mb.slots, parts).unbind()
    if mb.rollout_logp is None:
        return
    gap = t.old_logp - mb.rollout_logp
    gap = keep(t.accepted & torch.isfinite(gap), gap)
    t.raw_rows["ois"] = ratio_of(log_ratio, RAW_LIMIT)
    t.rows["train_rollout_logprob_abs_diff"] = gap.abs()
    t.rows["train_rollout_kl"] = approx_kl("low_var_kl", -gap, torch.zeros_like(gap))
    t.rows["train_rollout_chi2"] = ratio_of(gap).square() - 1
    measured = mb.new_logp.detach() if mb.old_logp is None else mb.old_logp
    forward = (measured - mb.rollout_logp).abs()
    forward = keep(t.usable & torch.isfinite(forward), forward)
    t.raw_rows["forward_logp_abs_diff"] = forward  # of the trainer's own pass, whatever the denominator is made of
    sums["forward_logp_max_diff"] = forward.amax() if forward.numel() else forward.sum()


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max((c - R)^2, (v - R)^2), c = v_old + clamp(v - v_old, +-clip), no factor 1/2 -> (loss, clipped bool), [T]."""
    step = values - old
    bounded = old + step.clamp(-clip, clip)
    return torch.maximum((bounded - returns).square(), (values - returns).square()), step.abs() > clip


def value_loss(clip: float, values: Tensor, mb: LossInputs, norm: Norm) -> tuple[Tensor, dict[str, Tensor]]:
    """Critic loss of one micro-batch: (loss [], sums). values float [T] with gradient; mb.old_values and mb.returns."""
    if mb.old_values is None or mb.returns is None:
        raise ValueError("value_loss needs old_values and returns for the micro-batch, none were given.")
    m = mb.mask
    loss, clipped = clipped_value_loss(keep(m, values), keep(m, mb.old_values), keep(m, mb.returns), clip)
    total = reduce_sum(loss, m, mb.weights)
    share = reduce_sum(clipped.to(loss.dtype), m, mb.metric_weights)
    sums = {"value_loss": total.detach(), "value_clipfrac": share}
    return total * (norm.scale / norm.divisor), sums
