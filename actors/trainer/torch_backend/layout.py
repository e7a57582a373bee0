"""Samples as packed tensors: cut once per rollout batch in numpy, micro-batches by index arithmetic, no loop over samples.

Always true: the model never sees the last token of a sample as input (nothing is predicted from it), positions restart at 0
for each sample, and response tokens of a micro-batch come back to back in the order of the sample positions asked for,
which is the order `PreparedBatch.micro_batch` expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.trainer.backend import BatchSample
from actors.trainer.torch_backend.sight import Gallery, Sight
from actors.trainer.training.routes import Routes, Routing


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where the samples of one packed sequence lie; what attention needs to stay inside a sample."""

    cu_seqlens: Tensor
    """int32 [S + 1]: start of each sample, then T"""
    samples: int
    longest: int
    """input tokens of the longest sample"""
    slots: Tensor | None
    """int64 [T]: place of each token in a padded [S * longest] layout; None when all samples are equally long"""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """T input tokens of S samples and the R response tokens they predict."""

    input_ids: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T]"""
    layout: PackedLayout
    lengths: tuple[int, ...]
    """input tokens of each of the S samples"""
    rows: Tensor
    """int64 [R]: input position whose output predicts each response token"""
    targets: Tensor
    """int64 [R]"""
    temperature: float | Tensor
    """one value, or float32 [R] when samples differ"""
    response_slots: np.ndarray
    """int64 [R]: place of each response token among all response tokens of the batch, in sample order"""
    routing: Routing | None = None
    """experts of the T input tokens; None: the model chooses"""
    sight: Sight | None = None
    """what the samples show, of a model that reads pictures"""


class PackedBatch:
    """All tokens of a rollout batch on the host. Lengths in tokens, positions are those of `samples`. `routes`: their experts,
    where routers are told. `gallery`: their pictures, of a model that reads such."""

    def __init__(self, samples: Sequence[BatchSample], routes: Routes | None = None, gallery: Gallery | None = None) -> None:
        self.routes, self.gallery = routes, gallery
        self.prompt = np.array([len(s.prompt_tokens) for s in samples], dtype=np.int64)
        self.response = np.array([len(s.response_tokens) for s in samples], dtype=np.int64)
        self.total = self.prompt + self.response
        self.first = starts_of(self.total)
        self.first_response = starts_of(self.response)
        parts = [part for s in samples for part in (s.prompt_tokens, s.response_tokens)]
        self.tokens = np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int64)
        # 0 asks for greedy sampling; its log-probs are reported at temperature 1.
        warm = np.array([s.temperature for s in samples], dtype=np.float32)
        self.temperature = np.where(warm > 0, warm, np.float32(1))

    @property
    def response_tokens(self) -> int:
        """Response tokens of the whole batch."""
        return int(self.response.sum())

    def micro_batch(self, positions: Sequence[int], device: torch.device) -> MicroBatch:
        """The given samples, in the given order."""
        ids = np.fromiter(positions, dtype=np.int64, count=len(positions))
        inputs = np.maximum(self.total[ids] - 1, np.minimum(self.total[ids], 1))
        start = starts_of(inputs)
        of, position = spread_of(inputs)
        first = self.first[ids]
        of_response, step = spread_of(self.response[ids])
        place = self.prompt[ids][of_response] + step
        longest = int(inputs.max(initial=1))
        cu_seqlens = np.append(start, inputs.sum()).astype(np.int32)
        slots = None if (inputs == longest).all() else _to(of * longest + position, device)
        return MicroBatch(
            input_ids=_to(self.tokens[first[of] + position], device)[None],
            position_ids=_to(position, device)[None],
            layout=PackedLayout(_to(cu_seqlens, device), len(ids), longest, slots),
            lengths=tuple(inputs.tolist()),
            # A response without a prompt has no row that predicts its first token; the objective masks that token.
            rows=_to(start[of_response] + np.maximum(place - 1, 0), device),
            targets=_to(self.tokens[first[of_response] + place], device),
            temperature=self._temperature(ids, of_response, device),
            response_slots=self.first_response[ids][of_response] + step,
            routing=self.routes.micro_batch(ids, inputs) if self.routes else None,
            sight=self.gallery.micro_batch(ids, inputs, device) if self.gallery else None,
        )

    def _temperature(self, ids: np.ndarray, of_response: np.ndarray, device: torch.device) -> float | Tensor:
        values = self.temperature[ids]
        if values.size == 0 or (values == values[0]).all():
            return float(values[0]) if values.size else 1.0
        return _to(values[of_response], device)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Where each begins, laid one after the other."""
    return np.cumsum(lengths) - lengths


def spread_of(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sample of each token, its position inside the sample), both int64 [sum of lengths]."""
    of = np.repeat(np.arange(lengths.size), lengths)
    return of, np.arange(of.size) - starts_of(lengths)[of]


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
