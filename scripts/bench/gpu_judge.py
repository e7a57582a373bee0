"""Judges rollouts of gpu_bench.py by the weights themselves, with the trainer's own forward."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np


def logprobs(
    model: Path, rollouts: list[Any], asked: dict[str, list[int]], *, dtype: str, matched: bool = False
) -> list[np.ndarray]:
    """Log-probs of the responses under a model, by the trainer's own forward, or by the one that repeats the engine's."""
    import torch

    policy, device = _policy(model, dtype, matched)
    packed = _packed(rollouts, asked)
    found = []
    with torch.no_grad():
        for start in range(0, len(rollouts), 16):
            group = range(start, min(start + 16, len(rollouts)))
            values, _ = policy(packed.micro_batch(list(group), device))
            found += [part.float().cpu().numpy() for part in values.split([rollouts[i].response.n_tokens for i in group])]
    del policy
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def gradients(model: Path, rollouts: list[Any], asked: dict[str, list[int]]) -> dict[str, float]:
    """Gradient of the summed log-probs: the matched forward's against the plain one's, and the seconds of each."""
    import torch

    found, seconds = {}, {}
    for matched in (False, True):
        policy, device = _policy(model, "auto", matched, trainable=True)
        batch = _packed(rollouts, asked).micro_batch(range(len(rollouts)), device)
        for _ in range(2):  # the first one compiles
            policy.zero_grad()
            began = time.monotonic()
            policy(batch)[0].sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[matched] = time.monotonic() - began
        found[matched] = {name: p.grad.double() for name, p in policy.named_weights().items()}
        del policy
    apart = sum(float((found[True][name] - g).square().sum()) for name, g in found[False].items()) ** 0.5
    size = sum(float(g.square().sum()) for g in found[False].values()) ** 0.5
    return {"relative_difference": apart / size, "plain_s": round(seconds[False], 4), "matched_s": round(seconds[True], 4)}


def _policy(model: Path, dtype: str, matched: bool, *, trainable: bool = False) -> tuple[Any, Any]:
    import torch

    from actors.trainer.torch_backend.core import narrow
    from actors.trainer.torch_backend.matched import FORMULAS, MatchedPolicy
    from actors.trainer.torch_backend.model import load_policy, resolve_device

    device = resolve_device("auto")
    policy = load_policy(str(model), trainable=trainable).to(device)
    narrow(policy, torch.bfloat16 if dtype == "auto" and device.type == "cuda" else torch.float32)
    if matched:
        policy = MatchedPolicy(policy.hf, None if device.type == "cuda" else FORMULAS)
    return policy, device


def _packed(rollouts: list[Any], asked: dict[str, list[int]]) -> Any:
    from actors.trainer.backend import BatchSample
    from actors.trainer.objective.samples import TrainSample
    from actors.trainer.torch_backend.layout import PackedBatch

    samples = []
    for rollout in rollouts:
        ids = np.frombuffer(rollout.response.tokens, np.int32)
        prompt = np.array(asked[rollout.task.sample_id], np.int32)
        train = TrainSample(rollout.task.sample_id, rollout.task.group_id, len(ids), 0.0, prompt_length=len(prompt))
        samples.append(BatchSample(prompt, ids, 1.0, train))
    return PackedBatch(samples)


def asked_of(name: str, ids: list[list[int]]) -> dict[str, list[int]]:
    return {f"{name}.{i}/0": prompt for i, prompt in enumerate(ids)}


def boundaries(rollouts: list[Any], one: list[np.ndarray], two: list[np.ndarray]) -> dict[str, Any]:
    """Where the weights changed inside each sample, as its log-probs tell, against where its spans say they did.

    `one`, `two`: log-probs of every token under versions 1 and 2. The cut that fits best is the one with the smallest sum
    of differences: version 1 before it, version 2 after it. A single token may fit the wrong version by chance (about one
    in a hundred does), so a cut can be off by one without being wrong; more than that cannot be chance. `old_part`: largest
    difference to the first version before the span's end; `crossings_seen`: samples whose next token is not that version's.
    """
    offsets: list[int] = []
    worst = old_part = 0.0
    seen = 0
    for rollout, first, second in zip(rollouts, one, two, strict=True):
        engine = np.frombuffer(rollout.response.logprobs, np.float32)
        spans = [(span.version, span.n) for span in rollout.response.spans]
        own = np.concatenate([np.full(count, version) for version, count in spans])
        own = np.where(own == own[0], 1, 2)
        n_old = int((own == 1).sum())
        apart = np.abs(engine - first)
        old_part = max(old_part, float(apart[:n_old].max()))
        seen += n_old < len(apart) and bool(apart[n_old] > 0.05)
        worst = max(worst, float(np.abs(engine - np.where(own == 1, first, second)).max()))
        before = np.concatenate([[0.0], np.cumsum(np.abs(engine - first))])
        after = np.concatenate([np.cumsum(np.abs(engine - second)[::-1])[::-1], [0.0]])
        offsets.append(int((before + after).argmin()) - n_old)
    return {
        "samples_across_versions": sum(len(r.response.spans) > 1 for r in rollouts),
        "tokens": sum(r.response.n_tokens for r in rollouts),
        "cuts_where_the_spans_say": sum(offset == 0 for offset in offsets),
        "cuts_off_by_one": sum(abs(offset) == 1 for offset in offsets),
        "cuts_further_off": [offset for offset in offsets if abs(offset) > 1],
        "largest_difference_to_own_version": worst,
        "old_part": old_part,
        "crossings_seen": seen,
    }
