"""Judges rollouts of gpu_bench.py by the weights themselves, with the trainer's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_parts  # noqa: F401 - puts the repository on the path
import numpy as np


def logprobs(model: Path, rollouts: list[Any], asked: dict[str, list[int]], *, dtype: str) -> list[np.ndarray]:
    """Log-probs of the responses under a model, by the trainer's own forward."""
    import torch

    from actors.trainer.backend import BatchSample
    from actors.trainer.objective.samples import TrainSample
    from actors.trainer.torch_backend.core import narrow
    from actors.trainer.torch_backend.layout import PackedBatch
    from actors.trainer.torch_backend.model import load_policy, resolve_device, resolve_dtype

    device = resolve_device("auto")
    policy = load_policy(str(model), trainable=False).to(device)
    narrow(policy, resolve_dtype(dtype, device))
    samples = []
    for rollout in rollouts:
        ids = np.frombuffer(rollout.response.tokens, np.int32)
        prompt = np.array(asked[rollout.task.sample_id], np.int32)
        train = TrainSample(rollout.task.sample_id, rollout.task.group_id, len(ids), 0.0, prompt_length=len(prompt))
        samples.append(BatchSample(prompt, ids, 1.0, train))
    packed = PackedBatch(samples)
    found = []
    with torch.no_grad():
        for start in range(0, len(samples), 16):
            group = range(start, min(start + 16, len(samples)))
            values, _ = policy(packed.micro_batch(list(group), device))
            lengths = [len(samples[i].response_tokens) for i in group]
            found += [part.float().cpu().numpy() for part in values.split(lengths)]
    del policy
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def asked_of(name: str, ids: list[list[int]]) -> dict[str, list[int]]:
    return {f"{name}.{i}/0": prompt for i, prompt in enumerate(ids)}


def boundaries(rollouts: list[Any], one: list[np.ndarray], two: list[np.ndarray]) -> dict[str, Any]:
    """Where the weights changed inside each sample, as its log-probs tell, against where its spans say they did.

    `one`, `two`: log-probs of every token under versions 1 and 2. The cut that fits best is the one with the smallest sum
    of differences: version 1 before it, version 2 after it. A single token may fit the wrong version by chance (about one
    in a hundred does), so a cut can be off by one without being wrong; more than that cannot be chance.
    """
    offsets: list[int] = []
    worst = 0.0
    for rollout, first, second in zip(rollouts, one, two, strict=True):
        engine = np.frombuffer(rollout.response.logprobs, np.float32)
        spans = [(span.version, span.n) for span in rollout.response.spans]
        own = np.concatenate([np.full(count, version) for version, count in spans])
        worst = max(worst, float(np.abs(engine - np.where(own == 1, first, second)).max()))
        before = np.concatenate([[0.0], np.cumsum(np.abs(engine - first))])
        after = np.concatenate([np.cumsum(np.abs(engine - second)[::-1])[::-1], [0.0]])
        offsets.append(int((before + after).argmin()) - int((own == 1).sum()))
    return {
        "samples_across_versions": sum(len(r.response.spans) > 1 for r in rollouts),
        "tokens": sum(r.response.n_tokens for r in rollouts),
        "cuts_where_the_spans_say": sum(offset == 0 for offset in offsets),
        "cuts_off_by_one": sum(abs(offset) == 1 for offset in offsets),
        "cuts_further_off": [offset for offset in offsets if abs(offset) > 1],
        "largest_difference_to_own_version": worst,
    }
