"""Reducers, final scaling, critic and supervised losses against the golden vectors."""

from __future__ import annotations

import torch

from actors.trainer.objective import LossInputs, value_loss
from actors.trainer.objective.inputs import Norm
from actors.trainer.objective.reductions import divisor, reduce_sum, token_weights
from actors.trainer.objective.segments import sample_index, segment_sum
from tests.objective.reference import token_logprobs

ORACLE = ("reductions", "value_and_sft_loss")


def packed(rows, dtype):
    return torch.tensor([v for row in rows for v in row], dtype=dtype)


def layout(case, dtype):
    """(mask, index, weights, counts, reduction) of a case."""
    x = case["inputs"]
    name = "per_token" if case["params"]["calculate_per_token_loss"] else "per_sample"
    mask = packed(x["loss_masks"], torch.bool)
    index = sample_index(torch.tensor(x["response_lengths"]))
    counts = segment_sum(mask.to(dtype), index, len(x["response_lengths"]))
    totals = torch.tensor(x["rollout_mask_sums"], dtype=dtype) if x.get("rollout_mask_sums") else counts
    return mask, index, token_weights(name, totals, index), counts, name


def run_reduction(case, dtype, ragged):
    p, x = case["params"], case["inputs"]
    lengths = x["response_lengths"]
    mask, index, weights, counts, name = layout(case, dtype)
    values = packed(x["x"], dtype).requires_grad_()
    reduced = reduce_sum(values, mask, weights)
    got = {"reduced": reduced}
    if "microbatches" in x:
        chosen = [torch.isin(index, torch.tensor(mb)) for mb in x["microbatches"]]
        got["per_microbatch"] = [reduce_sum(values[c], mask[c], weights[c]).item() for c in chosen]
    if "num_rollouts" in p:
        loss = -reduced
        tokens = int(counts.sum())
        got["normalizer"] = divisor(name, 1, tokens)
        got["log_values"] = [got["normalizer"] if name == "per_token" else len(lengths), loss.item()]
        # What a framework that averages by itself makes of it: Megatron divides by its micro-batches and ranks.
        dp, cp = p["dp_size"], p["cp_size"]
        if name == "per_token":
            loss = loss * (cp if p["megatron_scaling"] else 1)
        else:
            loss = loss * (p["num_microbatches"] * dp * cp if p["megatron_scaling"] else dp) / max(p["num_rollouts"], 1)
        got["scaled_loss"] = loss
        loss.backward()
    else:
        reduced.backward()
    got["grad_x"] = ragged(values.grad, lengths)
    return got


def run_loss(case, dtype, ragged):
    p, x = case["params"], case["inputs"]
    lengths = x["response_lengths"]
    mask, index, weights, counts, _ = layout(case, dtype)
    norm = Norm(1.0, len(lengths), int(mask.sum()), counts)
    grad_of, name = None, ""

    def inputs(logp, **more):
        return LossInputs(logp, torch.zeros_like(logp), mask, index, weights, counts, index, **more)

    got = {}
    if "new_values" in x:
        name, grad_of = "grad_new_values", packed(x["new_values"], dtype).requires_grad_()
        mb = inputs(grad_of, old_values=packed(x["old_values"], dtype), returns=packed(x["returns"], dtype))
        loss, got = value_loss(p["value_clip"], grad_of, mb, norm)
        got["value_loss"] = loss
    elif "logits" in x:
        name = "grad_logits"
        grad_of = torch.tensor([row for sample in x["logits"] for row in sample], dtype=dtype).requires_grad_()
        total, response = torch.tensor(x["total_lengths"]), torch.tensor(lengths)
        tokens = packed(x["tokens"], torch.int64)
        ends = total.cumsum(0)
        rows = torch.cat([torch.arange(int(e - n) - 1, int(e) - 1) for e, n in zip(ends, response, strict=True)])
        logp, entropy = token_logprobs(grad_of[rows], tokens[rows + 1], temperature=p["temperature"], with_entropy=True)
        got |= {"log_probs": ragged(logp, lengths), "entropy": ragged(entropy, lengths)}
        loss = -reduce_sum(logp, mask, weights)  # supervised: the same reduction over log-probs
        got["loss"] = loss
    else:
        name, grad_of = "grad_new_logp", packed(x["new_logp"], dtype).requires_grad_()
        loss = -reduce_sum(grad_of, mask, weights)
        got["loss"] = loss
    loss.backward()
    if name == "grad_logits":
        parts = torch.split(grad_of.grad, x["total_lengths"])
        got[name] = [row for part in parts for row in part.tolist()]
    else:
        got[name] = ragged(grad_of.grad, lengths)
    return got


def test_reductions_and_supervised_losses_match_the_oracle(case, dtype, agree, ragged):
    run = run_reduction if "x" in case["inputs"] else run_loss
    checked = agree(case, run(case, dtype, ragged), dtype)
    assert set(checked) >= set(case["must_match"])
    if case["defect"]:
        assert set(checked) >= set(case["defect_info"]["right"])
