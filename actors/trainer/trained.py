"""How the samples of a batch came to be trained, for whoever asks after one of them later (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.trainer.backend import StepResult
from actors.trainer.cut import Part
from bus.messages.groups import GroupKept
from bus.messages.policy import SamplesTrained, SampleTrained, life_of

A_MESSAGE = 50  # samples: some 10 kB


def trained_samples(
    batch: Sequence[tuple[Part, GroupKept]], result: StepResult, *, step: int
) -> Iterator[SamplesTrained]:
    """Messages about all samples of a batch, in training order. `step`: the number of the step just done."""
    found: list[SampleTrained] = []
    position = 0
    for part, group in batch:
        for scored in group.samples:
            first = position
            position += len(scored.rollout.strands)
            shares = result.shares[first:position]
            trained = sum(map(sum, result.trained_spans[first:position]))
            share = round(sum(shares), 6) if shares else -1.0
            found.append(life_of(scored, judged=part.at, trained=trained, share=share))
    return (
        SamplesTrained(step=step, samples=tuple(found[at : at + A_MESSAGE])) for at in range(0, len(found), A_MESSAGE)
    )
