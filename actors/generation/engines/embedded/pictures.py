"""Eyes of a model that reads pictures: transformers' vision tower, and the pictures of a request laid out among its tokens.

Always true: a placeholder that the model made itself is a token like any other; a request's own come first.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.generation.engines.embedded.config import ModelRefused
from actors.runtime.rows import BadData
from actors.runtime.run import Refused
from actors.runtime.vision import Vision, positions, read
from bus.messages.samples import Picture

KEPT = 64  # pictures as patches, for requests of one group


class View(NamedTuple):
    """What a request shows."""

    digest: bytes
    pixels: Tensor  # float32 [P, patch], of all its pictures
    grids: Tensor  # int64 [pictures, 3]
    at: Tensor  # int64 [n]: places of their tokens
    places: tuple[Picture, ...]

    merge: int

    @property
    def back(self) -> int:
        """How far rotary positions behind them lie before the tokens' indexes."""
        return sum(p.n - max(p.grid[0], *(side // self.merge for side in p.grid[1:])) for p in self.places)

    def rotary(self, n: int) -> Tensor:
        """Positions of the first n tokens, int64 [3, n]."""
        return torch.from_numpy(positions(n, self.places, self.merge))


class Eyes:
    """Tower and processor of the model in a directory. Raises ModelRefused."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        kinds: dict[str, Any] = {
            "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
            "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
        }
        try:
            config = AutoConfig.from_pretrained(model_dir)
            self.vision = Vision(str(model_dir))
            self.tower = kinds[config.model_type]._from_config(config.vision_config, attn_implementation="sdpa").eval()
        except (Refused, OSError, ValueError) as error:
            raise ModelRefused(f"{model_dir}: {' '.join(str(error).split())}") from None
        self._kept: dict[bytes, tuple[Tensor, tuple[int, int, int]]] = {}
        self._reading = threading.Lock()  # requests are read in several threads

    def _patches(self, key: bytes, data: bytes) -> tuple[Tensor, tuple[int, int, int]]:
        with self._reading:
            if key not in self._kept:
                pixels, grid = self.vision.pixels(data)
                if len(self._kept) >= KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = torch.from_numpy(pixels), grid
            return self._kept[key]

    def view(self, ids: Sequence[int], image_data: Sequence[str]) -> View:
        """A request's pictures (data URLs or base64) at its first placeholders. Raises BadData."""
        made, digest = [], hashlib.blake2b(digest_size=16)
        for source in image_data:
            data = read(source if source.startswith("data:") else f"data:,{source}")  # never a path
            key = hashlib.blake2b(data, digest_size=16).digest()
            digest.update(key)
            made.append(self._patches(key, data))
        places: list[Picture] = []
        token, at = self.vision.token, 0
        for _, grid in made:
            at = next((i for i in range(at, len(ids)) if ids[i] == token), len(ids))
            n = grid[0] * grid[1] * grid[2] // self.vision.merge**2
            if list(ids[at : at + n]) != [token] * n:
                which = f"picture {len(places) + 1} of {len(made)}"
                raise BadData(f"{which} has {n} tokens, input_ids have no {n} places in a row for it")
            places.append(Picture(at=at, n=n, grid=grid))
            at += n
        return View(
            digest.digest(),
            torch.cat([pixels for pixels, _ in made]),
            torch.tensor([grid for _, grid in made]),
            torch.cat([torch.arange(p.at, p.at + p.n) for p in places]),
            tuple(places),
            self.vision.merge,
        )

    def features(self, view: View) -> Tensor:
        """What the tokens at `view.at` are to the decoder, float32 [n, hidden]."""
        found: Tensor = self.tower(view.pixels, grid_thw=view.grids).pooler_output
        return found
