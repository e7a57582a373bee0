"""Groups from the bus as samples of a step (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np

from actors.trainer.backend import BatchSample
from actors.trainer.objective.samples import TrainSample
from actors.trainer.spread import lives_of, spread_metrics
from bus.messages.base import Packed, unpack_ints
from bus.messages.groups import GroupKept
from bus.messages.samples import Response, Routed, Scored, Strand, shown
from bus.messages.versions import staleness

EMPTY: Mapping[str, bytes] = MappingProxyType({})


def to_trajectories(scored: Scored, *, known: tuple[float, ...] = (), images: Mapping[str, bytes] = EMPTY) -> list[BatchSample]:
    """One scored rollout: a training sample for each of its trajectories, which share its reward and count once in the statistics
    of their group and in the averages of the loss. `known`: see GroupKept. `images`: pictures' bytes, by blob."""
    strands, taught = scored.rollout.strands, scored.teacher_logprobs
    found = [_of_strand(scored, at, strand, known, images) for at, strand in enumerate(strands)]
    if taught is not msgspec.UNSET:  # the teacher was asked for the last one
        found[-1].train.teacher_logp = np.frombuffer(taught, dtype=np.float32)
    return found


def _of_strand(scored: Scored, at: int, strand: Strand, known: tuple[float, ...], images: Mapping[str, bytes]) -> BatchSample:
    task, response, several = scored.rollout.task, strand.response, scored.rollout.several
    prompts = [unpack_ints(prompt) for prompt in (task.prompt_tokens, strand.prompt_tokens)] if task.pictures else ((), ())
    tokens = np.frombuffer(response.tokens, dtype=np.int32)
    return BatchSample(
        prompt_tokens=np.frombuffer(strand.prompt_tokens, dtype=np.int32),
        response_tokens=tokens,
        temperature=task.sampling.temperature,
        train=TrainSample(
            sample_id=f"{task.sample_id}#{at}" if several else task.sample_id,
            group=task.group_id,
            rollout=task.index if several else None,
            response_length=len(tokens),
            reward=scored.reward,
            prompt_length=len(strand.prompt_tokens) // 4,
            loss_mask=np.frombuffer(response.loss_mask, dtype=np.uint8),
            rollout_logp=np.frombuffer(response.logprobs, dtype=np.float32),
            spans=_steps(response),
            known_rewards=known,
        ),
        pictures=tuple((picture, images[picture.blob]) for picture in shown(task.pictures, *prompts)),
        experts=None if response.experts is msgspec.UNSET else _experts(response.experts),
    )


def _experts(routed: Routed) -> np.ndarray:
    """Integers [n, layers * top_k], or none where the blob with them is lost; of no whole number of rows [1, bytes], which fits no
    model."""
    if not routed.data:
        return np.zeros((0, 0), dtype=np.uint8)
    size = routed.n * (2 if routed.wide else 1)
    if routed.n <= 0 or len(routed.data) % size:
        return np.frombuffer(routed.data, dtype=np.uint8)[None]
    return np.frombuffer(routed.data, dtype=np.int16 if routed.wide else np.uint8).reshape(routed.n, -1)


def _steps(response: Response) -> list[tuple[int, int]]:
    """Step and tokens of each span. What nobody made is as old as what was made before it (or, at the start, after it): it has no
    gradient, and must not look stale."""
    steps: list[tuple[int, int]] = []
    last = next((span.step for span in response.made), 0)
    for span in response.spans:
        last = span.step if span.made else last
        steps.append((last, span.n))
    return steps


def to_samples(groups: Sequence[GroupKept], images: Mapping[str, bytes] = EMPTY) -> list[BatchSample]:
    """All trajectories of all samples in group order. `images`: bytes of their pictures, by blob."""
    every = ((scored, group.known) for group in groups for scored in group.samples)
    return [one for scored, known in every for one in to_trajectories(scored, known=known, images=images)]


class BatchFacts(NamedTuple):
    """What the bus is told of a batch beside what its step gave: see `batch_metrics` and `lives_of`."""

    metrics: dict[str, float]
    lives: Packed


def facts_of(groups: Sequence[GroupKept], *, step: int, bound: int) -> BatchFacts:
    """Of a batch that is trained on weights of `step` updates; `bound` in steps."""
    return BatchFacts(batch_metrics(groups, step=step, bound=bound), lives_of(groups))


def batch_metrics(groups: Sequence[GroupKept], *, step: int, bound: int) -> dict[str, float]:
    """What the batch was made of: rewards, lengths, spreads (spread.py), staleness of what is within the bound (token-weighted
    mean, maximum), and how much was over it before the mask. `bound` in steps."""
    samples = [s for g in groups for s in g.samples]
    lengths = [s.rollout.response.n_tokens for s in samples]
    turns = [s.rollout.episode.turns if s.rollout.episode is not msgspec.UNSET else 1 for s in samples]
    spans = [(staleness(step, span.step), span.n) for s in samples for span in s.rollout.made]
    fresh = [(age, n) for age, n in spans if age <= bound]
    tokens, trained = max(1, sum(n for _, n in spans)), max(1, sum(n for _, n in fresh))
    n = max(1, len(samples))
    return {
        **spread_metrics(groups, step=step),
        "rollout/samples": float(len(samples)),
        "rollout/raw_reward": sum(s.reward for s in samples) / n,
        "rollout/response_len/mean": sum(lengths) / n,
        "rollout/response_len/max": float(max(lengths, default=0)),
        "rollout/truncated_ratio": sum(s.rollout.finish == "length" for s in samples) / n,
        "rollout/fully_async/avg_staleness": sum(age * k for age, k in fresh) / trained,
        "rollout/fully_async/max_staleness": float(max((age for age, _ in fresh), default=0)),
        "rollout/fully_async/oldest_token": float(max((age for age, _ in spans), default=0)),
        "rollout/masked_fraction": sum(k for age, k in spans if age > bound) / tokens,
        "rollout/part_samples": float(sum(len(g.samples) for g in groups if g.known)),
        "rollout/tokens": float(sum(s.rollout.n_made for s in samples)),
        "rollout/turns/mean": sum(turns) / n,
        "rollout/trajectories": float(sum(len(s.rollout.strands) for s in samples)),
        "rollout/resumed_tokens": float(sum(s.rollout.resumed_tokens for s in samples)),
        "rollout/mixed_version_ratio": sum(len({v.version for v in s.rollout.made}) > 1 for s in samples) / n,
    }
