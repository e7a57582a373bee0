"""Policy losses and off-policy corrections against the golden vectors: values and gradients."""

from __future__ import annotations

import pytest
import torch

from actors.trainer.objective import LossInputs, MissingInputError, ObjectiveConfigError, check, policy_loss
from actors.trainer.objective.corrections import CORRECTIONS, CorrectionInputs, opsm_mask
from actors.trainer.objective.inputs import Norm
from actors.trainer.objective.loss import token_terms
from actors.trainer.objective.metrics import ess_sum
from actors.trainer.objective.mis import norm_factor, norm_sums
from actors.trainer.objective.reductions import token_weights
from actors.trainer.objective.segments import RAW_LIMIT, safe_log_ratio, sample_index, segment_sum
from tests.declared import objective_of

OPTIONS = (
    "advantage_estimator",
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "use_unbiased_kl",
    "entropy_coef",
    "tis_clip",
    "tis_clip_low",
    "tis_level",
    "tis_mode",
    "tis_lower_bound",
    "tis_upper_bound",
    "use_rs",
    "rs_level",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
    "tis_batch_normalize",
    "opsm_delta",
)
ORACLE = ("policy_loss", "corrections")
UNREPORTED = {"mis_is_ratio_min_final", "mis_is_ratio_max_final"}


def packed(rows, dtype):
    return None if rows is None else torch.tensor([v for row in rows for v in row], dtype=dtype)


def build(case, dtype):
    """Oracle case -> (config, micro-batch, norm, new_logp, entropy)."""
    p, x = case["params"], case["inputs"]
    correction = p.get("correction")
    known = {k: p[k] for k in OPTIONS if p.get(k) is not None}
    proximal = "recompute"
    if p.get("use_rollout_logprobs"):
        proximal = "rollout"
    if p.get("skip_actor_forward_only"):
        proximal = "current"
    cfg = objective_of(
        **known,
        proximal=proximal,
        correction={"opsm": "none", None: "none"}.get(correction, (correction or "").removesuffix("_metrics_only")),
        report_only=bool(correction) and correction.endswith("_metrics_only"),
        use_opsm=correction == "opsm",
        reduction="per_token" if p.get("calculate_per_token_loss") else "per_sample",
    )
    lengths = torch.tensor(x["response_lengths"])
    mask = packed(x["loss_masks"], torch.bool)
    index = sample_index(lengths)
    counts = segment_sum(mask.to(dtype), index, len(lengths))
    totals = counts if x.get("rollout_mask_sums") is None else torch.tensor(x["rollout_mask_sums"], dtype=dtype)
    ids = x.get("rollout_id") or list(range(len(lengths)))
    numbers = {r: i for i, r in enumerate(dict.fromkeys(ids))}
    rollouts = torch.tensor([numbers[r] for r in ids])
    new = packed(x["new_logp"], dtype).requires_grad_()
    entropy = packed(x.get("entropy"), dtype)
    mb = LossInputs(
        new_logp=new,
        advantages=packed(x["advantages"], dtype),
        mask=mask,
        index=index,
        weights=token_weights(cfg.reduction, totals, index),
        counts=counts,
        slots=rollouts[index],
        old_logp=packed(x["old_logp"], dtype),
        rollout_logp=packed(x.get("rollout_logp"), dtype),
        ref_logp=packed(x.get("ref_logp"), dtype),
        entropy=None if entropy is None else entropy.requires_grad_(),
    )
    norm = Norm(1.0, len(numbers), int(mask.sum()), segment_sum(counts, rollouts, len(numbers)))
    if cfg.tis_batch_normalize:
        gap, usable = safe_log_ratio(mask, mb.old_logp, mb.rollout_logp, RAW_LIMIT)
        factor = norm_factor(norm_sums(cfg, CorrectionInputs(gap, usable, index, counts)))
        norm = Norm(1.0, norm.rollouts, norm.trained_tokens, norm.rollout_tokens, factor)
    return cfg, mb, norm


def run(case, dtype, ragged):
    cfg, mb, norm = build(case, dtype)
    lengths = case["inputs"]["response_lengths"]
    t = token_terms(cfg, mb, norm)
    loss, sums = policy_loss(cfg, mb, norm)
    loss.backward()
    got = dict(sums)
    got["loss"] = loss
    got["grad_new_logp"] = ragged(mb.new_logp.grad, lengths)
    if mb.entropy is not None:
        got["grad_entropy"] = ragged(mb.entropy.grad, lengths)
    got["token_pg_loss"] = ragged(t.plain_loss, lengths)
    got["token_clipped"] = ragged(t.clipped.int(), lengths)
    got["modified_masks"] = ragged(t.accepted.int(), lengths)
    per_token = cfg.reduction == "per_token"
    got["ess_ratio"] = ess_sum(sums["ess_w"], sums["ess_w2"], norm.rollout_tokens, per_token=per_token)
    if t.weights is not None:
        got["weights"] = ragged(t.weights, lengths)
    return got, cfg, mb


def test_policy_loss_matches_the_oracle(case, dtype, agree, ragged):
    if "raises" in case["expected"]:
        with pytest.raises((ObjectiveConfigError, MissingInputError, ValueError)):
            cfg, mb, norm = build(case, dtype)
            check(cfg)
            policy_loss(cfg, mb, norm)
        return
    got, cfg, mb = run(case, dtype, ragged)
    if cfg.use_opsm:
        gap, usable = safe_log_ratio(mb.mask, mb.new_logp.detach(), mb.old_logp)
        kept, _ = opsm_mask(mb.advantages, gap, CorrectionInputs(gap, usable, mb.index, mb.counts), cfg.opsm_delta)
        got["opsm_mask"] = ragged(kept.int(), case["inputs"]["response_lengths"])
    if cfg.correction in ("tis", "icepop") and not cfg.report_only:
        # Weights are a function of the raw log-ratio, masked tokens included; the loss cleans it first.
        raw = CorrectionInputs(mb.old_logp - mb.rollout_logp, mb.mask, mb.index, mb.counts)
        got["weights"] = ragged(CORRECTIONS[cfg.correction](cfg, raw).weights, case["inputs"]["response_lengths"])
    checked = agree(case, got, dtype)
    assert set(checked) >= set(case["must_match"]) - UNREPORTED
    if case["defect"]:
        assert set(checked) >= set(case["defect_info"]["right"]) - UNREPORTED
