"""How the samples of a batch came to be trained, for whoever asks after one of them later (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.trainer.backend import StepResult
from actors.trainer.cut import Part
from bus.messages.groups import GroupKept
from bus.messages.policy import SamplesTrained, SampleTrained

A_MESSAGE = 50  # samples: some 10 kB


def trained_samples(
    batch: Sequence[tuple[Part, GroupKept]], result: StepResult, *, step: int
) -> Iterator[SamplesTrained]:
    """Messages about all samples of a batch, in training order. `step`: the number of the step just done."""
    found: list[SampleTrained] = []
    position = 0
    for part, group in batch:
        for scored in group.samples:
            rollout, first = scored.rollout, position
            position += len(rollout.strands)
            shares = result.shares[first:position]
            found.append(
                SampleTrained(
                    sample_id=rollout.task.sample_id,
                    marks=rollout.response.marks or (),
                    spans=rollout.response.spans,
                    finish=rollout.finish,
                    turns=rollout.episode.turns if rollout.episode else 1,
                    generate_s=round(rollout.generate_s, 3),
                    reward=scored.reward,
                    scorer=scored.scorer,
                    score_s=round(scored.score_s, 3),
                    judged=part.at,
                    trained=sum(map(sum, result.trained_spans[first:position])),
                    share=round(sum(shares), 6) if shares else -1.0,
                )
            )
    return (
        SamplesTrained(step=step, samples=tuple(found[at : at + A_MESSAGE])) for at in range(0, len(found), A_MESSAGE)
    )
