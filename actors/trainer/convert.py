"""Groups from the bus as samples of a step (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from actors.trainer.backend import BatchSample
from actors.trainer.objective.samples import TrainSample
from actors.trainer.spread import spread_metrics
from bus.messages.groups import GroupKept
from bus.messages.samples import Scored
from bus.messages.versions import staleness


def to_sample(scored: Scored, *, known: tuple[float, ...] = ()) -> BatchSample:
    """One scored rollout; `known`: see GroupKept."""
    rollout = scored.rollout
    response, task = rollout.response, rollout.task
    tokens, taught = np.frombuffer(response.tokens, dtype=np.int32), scored.teacher_logprobs
    return BatchSample(
        prompt_tokens=np.frombuffer(task.prompt_tokens, dtype=np.int32),
        response_tokens=tokens,
        temperature=task.sampling.temperature,
        train=TrainSample(
            sample_id=task.sample_id,
            group=task.group_id,
            response_length=len(tokens),
            reward=scored.reward,
            prompt_length=len(task.prompt_tokens) // 4,
            loss_mask=np.frombuffer(response.loss_mask, dtype=np.uint8),
            rollout_logp=np.frombuffer(response.logprobs, dtype=np.float32),
            teacher_logp=None if taught is msgspec.UNSET else np.frombuffer(taught, dtype=np.float32),
            spans=[(s.step, s.n) for s in response.spans],
            known_rewards=known,
        ),
    )


def to_samples(groups: Sequence[GroupKept]) -> list[BatchSample]:
    """All samples in group order."""
    return [to_sample(scored, known=group.known) for group in groups for scored in group.samples]


def batch_metrics(groups: Sequence[GroupKept], *, step: int, bound: int) -> dict[str, float]:
    """What the batch was made of: rewards, lengths, spreads (spread.py), staleness of what is within the bound (token-weighted
    mean, maximum), and how much was over it before the mask. `bound` in steps."""
    samples = [s for g in groups for s in g.samples]
    lengths = [s.rollout.response.n_tokens for s in samples]
    spans = [(staleness(step, span.step), span.n) for s in samples for span in s.rollout.response.spans]
    fresh = [(age, n) for age, n in spans if age <= bound]
    tokens, trained = max(1, sum(n for _, n in spans)), max(1, sum(n for _, n in fresh))
    n = max(1, len(samples))
    return {
        **spread_metrics(groups, step=step),
        "rollout/raw_reward": sum(s.reward for s in samples) / n,
        "rollout/response_len/mean": sum(lengths) / n,
        "rollout/response_len/max": float(max(lengths, default=0)),
        "rollout/truncated_ratio": sum(s.rollout.finish == "length" for s in samples) / n,
        "rollout/fully_async/avg_staleness": sum(age * k for age, k in fresh) / trained,
        "rollout/fully_async/max_staleness": float(max((age for age, _ in fresh), default=0)),
        "rollout/fully_async/oldest_token": float(max((age for age, _ in spans), default=0)),
        "rollout/masked_fraction": sum(k for age, k in spans if age > bound) / tokens,
        "rollout/part_samples": float(sum(len(g.samples) for g in groups if g.known)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/resumed_tokens": float(sum(s.rollout.resumed_tokens for s in samples)),
        "rollout/mixed_version_ratio": sum(len(s.rollout.response.spans) > 1 for s in samples) / n,
    }
