"""Pictures of a rollout batch: made into patches once each, laid out for micro-batches.

Always true: a picture that several samples of a micro-batch show is looked at once in it; the gradient of all of them goes through
that look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.runtime.vision import BadImage, Vision, positions
from actors.trainer.backend import BatchSample
from bus.messages.samples import Picture


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What a micro-batch of T input tokens shows, at m of them."""

    positions: Tensor
    """int64 [3, 1, T]: rotary positions (time, height, width)"""
    pixels: Tensor
    """float32 [P, patch], of all pictures; without any, of one that stands nowhere"""
    grids: Tensor
    """int64 [pictures, 3]"""
    at: Tensor | None
    """int64 [m]: input positions; None: no picture is shown"""
    of: Tensor
    """int64 [m]: which of the tower's outputs stands there"""


class Gallery:
    """A rollout batch's. Raises ValueError for what is no picture, or not the one that the sampler laid out."""

    def __init__(self, samples: Sequence[BatchSample], vision: Vision) -> None:
        self._vision = vision
        self._shown: list[tuple[Picture, ...]] = []
        self._patches: dict[str, np.ndarray] = {}
        for sample in samples:
            self._shown.append(tuple(picture for picture, _ in sample.pictures))
            for picture, data in sample.pictures:
                if picture.blob not in self._patches:
                    try:
                        patches, grid = vision.pixels(data)
                    except BadImage as error:
                        raise ValueError(f"{sample.train.sample_id}: {error}") from error
                    if grid != picture.grid:
                        name = sample.train.sample_id
                        raise ValueError(f"{name}: its picture is {grid} patches here, {picture.grid} to the sampler")
                    self._patches[picture.blob] = patches

    def micro_batch(self, ids: np.ndarray, lengths: np.ndarray, device: torch.device) -> Sight:
        """Of these samples, one after the other, each with `lengths` input tokens."""
        merge, first = self._vision.merge, 0
        turns, at, of = [], [], []
        seen: dict[str, tuple[int, Picture]] = {}  # where its outputs begin
        outputs = 0
        for sample, length in zip(ids, lengths, strict=True):
            pictures = self._shown[sample]
            turns.append(positions(int(length), pictures, merge))
            for picture in pictures:
                if picture.blob not in seen:
                    seen[picture.blob] = outputs, picture
                    outputs += picture.n
                at.append(first + picture.at + np.arange(picture.n))
                of.append(seen[picture.blob][0] + np.arange(picture.n))
            first += int(length)
        blank = np.zeros((merge * merge, self._vision.patch), np.float32)
        grids = [picture.grid for _, picture in seen.values()] or [(1, merge, merge)]
        pixels = np.concatenate([self._patches[blob] for blob in seen] or [blank])

        def there(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return Sight(
            positions=there(np.concatenate(turns, 1) if turns else np.zeros((3, 0), np.int64))[:, None],
            pixels=there(pixels),
            grids=there(np.array(grids, np.int64)),
            at=there(np.concatenate(at)) if at else None,
            of=there(np.concatenate(of) if of else np.zeros(0, np.int64)),
        )
