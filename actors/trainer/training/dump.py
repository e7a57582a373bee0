"""`--save-debug-train-data`: what a rank trained in one rollout batch, as its loss saw it; one file for each batch and rank.

`torch.load(FILE, weights_only=True)` reads it. Written after the last optimizer step, also where a step was skipped. A rank that
computes no loss (a pipeline's first stage) writes none.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.trainer.backend import StepBatch
from actors.trainer.checkpoint import write_durably
from actors.trainer.objective import LossInputs
from actors.trainer.record import named

log = logging.getLogger(__name__)

Seen = Mapping[tuple[int, ...], LossInputs]
"""Sample positions of a micro-batch -> its inputs."""


def dump(pattern: str, rank: int, batch: StepBatch, steps: Sequence[Seen]) -> bool:
    """Store `{"rollout_id", "rank", "rollout_data"}`. rollout_data: name -> a list with one value for each sample that the rank
    trained, in the order of training; of a name with an array, [response_length]. What cannot be written (False) is left out, with
    a line in the log: the step is done, and other ranks go on."""
    data: dict[str, list[Any]] = {}
    for n, seen in enumerate(steps):
        for m, (ids, inputs) in enumerate(seen.items()):
            arrays = {name: x.detach().cpu().split(list(inputs.lengths)) for name, x in _arrays(inputs).items()}
            for at, i in enumerate(ids):
                sample = batch.samples[i]
                tokens = [torch.tensor(x, dtype=torch.int32) for x in (sample.prompt_tokens, sample.response_tokens)]
                row = {
                    "sample_ids": sample.train.sample_id, "optimizer_steps": n, "micro_batches": m, "tokens": torch.cat(tokens),
                    "response_lengths": len(tokens[1]), "raw_reward": sample.train.reward,
                }  # fmt: skip
                for name, value in (row | {name: parts[at].clone() for name, parts in arrays.items()}).items():
                    data.setdefault(name, []).append(value)
    if data:
        buffer = io.BytesIO()
        torch.save({"rollout_id": batch.step, "rank": rank, "rollout_data": data}, buffer)
        file = named(pattern, batch.step, rank)
        try:
            write_durably(file, buffer.getvalue())
        except OSError as error:
            log.warning("%s not written: %s. Training goes on without; free space there.", file, error.strerror or error)
            return False
    return True


def _arrays(inputs: LossInputs) -> dict[str, Tensor]:
    """What there is. `log_probs`: of the policy before the step; `new_log_probs`: in it, which is the same in the first."""
    before = inputs.new_logp if inputs.old_logp is None else inputs.old_logp
    found = {
        "loss_masks": inputs.mask.to(torch.uint8), "advantages": inputs.advantages, "returns": inputs.returns, "log_probs": before,
        "new_log_probs": inputs.new_logp, "rollout_log_probs": inputs.rollout_logp, "ref_log_probs": inputs.ref_logp,
        "values": inputs.old_values, "staleness": inputs.staleness,
    }  # fmt: skip
    return {name: x for name, x in found.items() if x is not None}
