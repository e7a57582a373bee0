"""Advantage estimators, OPD and whitening against the golden vectors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.trainer.objective.advantages import AdvantageInputs, advantage_of, opd_penalty
from actors.trainer.objective.segments import sample_index, whiten
from tests.declared import objective_of
from tests.objective.conftest import cases

ORACLE = ("advantages",)
OTHER_READING = "advantages/rfpp_gamma09_klcoef0"
"""The one vector that does not apply: Miles discounts REINFORCE++ over masked positions too, and this is the only one with both
gamma < 1 and holes in the masks. A token of a tool is no step of the policy; verl and our own GAE leave it out."""


def packed(rows, dtype):
    return None if rows is None else torch.tensor([v for row in rows for v in row], dtype=dtype)


def run_whiten(case, dtype, ragged):
    x = case["inputs"]
    mask = packed(x["loss_masks"], torch.bool)
    return {"whitened": ragged(whiten(packed(x["advantages"], dtype), mask), x["response_lengths"])}


def run_estimator(case, dtype, ragged):
    p, x = case["params"], case["inputs"]
    lengths = torch.tensor(x["response_lengths"])
    mask = packed(x["loss_masks"], torch.bool)
    cfg = objective_of(
        advantage_estimator=p["advantage_estimator"],
        kl_coef=p.get("kl_coef", 0.0),
        kl_loss_type=p.get("kl_loss_type", "k1"),
        gamma=p.get("gamma", 1.0),
        lambd=p.get("lambd", 1.0),
    )
    teacher = x.get("teacher_log_probs")
    if x.get("teacher_log_probs_full"):
        full = x["teacher_log_probs_full"]
        teacher = [row[len(row) - n :] for row, n in zip(full, x["response_lengths"], strict=True)]
    student = packed(x["log_probs"], dtype)
    inputs = AdvantageInputs(
        rewards=torch.tensor(x["rewards"], dtype=dtype),
        mask=mask,
        index=sample_index(lengths),
        lengths=lengths,
        old_logp=student,
        ref_logp=packed(x["ref_log_probs"], dtype),
        teacher_logp=packed(teacher, dtype),
        values=packed(x.get("values"), dtype),
    )
    advantages, returns = advantage_of(cfg.advantage_estimator)(cfg, inputs)
    got = {"returns": returns}
    if p.get("use_opd"):
        if "opd_reverse_kl" in x:
            inputs = replace(inputs, teacher_logp=student - packed(x["opd_reverse_kl"], dtype))
        advantages, got["opd_reverse_kl"] = opd_penalty(inputs, advantages, p["opd_kl_coef"])
    if p.get("normalize_advantages"):
        advantages = whiten(advantages, mask)
    got["advantages"] = advantages
    return {name: ragged(v, x["response_lengths"]) for name, v in got.items()}


def test_advantages_match_the_oracle(case, dtype, agree, ragged):
    run = run_whiten if "advantages" in case["inputs"] else run_estimator
    if "raises" in case["expected"] and not case["defect"]:
        with pytest.raises(ValueError):
            run(case, dtype, ragged)
        return
    got = run(case, dtype, ragged)
    if case["id"] == OTHER_READING:
        with pytest.raises(AssertionError, match="advantages"):
            agree(case, got, dtype)
        return
    checked = agree(case, got, dtype)
    assert set(checked) >= set(case["must_match"]) - {"raises"}
    if case["defect"]:
        assert set(checked) >= set(case["defect_info"]["right"])


def steps_of(mask, charges, reward, gamma):
    """G_k of one sample, by position: the recursion over trained tokens, 0 at the others."""
    out, carry, last = [0.0] * len(mask), 0.0, max((i for i, m in enumerate(mask) if m), default=-1)
    for i in reversed(range(len(mask))):
        if mask[i]:
            out[i] = carry = (reward if i == last else 0.0) - charges[i] + gamma * carry
    return out


@pytest.mark.parametrize("name", ["rfpp_gamma09_klcoef0", "rfpp_masked_tokens_charged_kl", "rfpp_fully_masked_sample_raises"])
def test_masked_tokens_are_no_time_steps_of_reinforce_plus_plus(name, ragged):
    [case] = [c for c in cases("advantages") if c["id"] == f"advantages/{name}"]
    p, x = case["params"], case["inputs"]
    assert any(0 in mask for mask in x["loss_masks"])
    for gamma in (p["gamma"], 0.5):
        want = []
        for mask, old, ref, reward in zip(x["loss_masks"], x["log_probs"], x["ref_log_probs"], x["rewards"], strict=True):
            charges = [p["kl_coef"] * (o - r) for o, r in zip(old, ref, strict=True)]  # k1
            want.append(pytest.approx(steps_of(mask, charges, reward, gamma), abs=1e-12))
        got = run_estimator({**case, "params": {**p, "gamma": gamma}}, torch.float64, ragged)
        assert got["returns"] == want and got["advantages"] == want
