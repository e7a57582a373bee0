"""The policy as one module: packed tokens in, log-probs of the response tokens out.

Owns nothing but the transformers model inside. These are the families with code of our own; any other class of transformers is
the `GenericPolicy` of `implementations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.trainer.torch_backend.head import token_head
from actors.trainer.torch_backend.layout import MicroBatch
from actors.trainer.torch_backend.shards import TorchShards
from actors.trainer.training.export import Named, as_files
from actors.trainer.training.files import write_tensors
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.state import MODEL

CompilesLayers = Callable[..., Any]
"""`compiled.compile_layers`."""


class Policy(nn.Module):
    """A causal language model that answers with log-probs. Parameters keep their Hugging Face names under `hf.`. What a policy with
    adapters does otherwise (trainer/lora) stands in the verbs behind `named_weights`."""

    file = MODEL
    """of a checkpoint, with `named_weights`"""

    proved_here = False
    """What it computes is held to the class itself before the first step, and so are its layers once they are compiled."""

    serves_adapters = False
    """Engines have its base, and get what is trained beside it."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, batch: MicroBatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the R response tokens, float32 [R]; entropies carry gradient only if asked to."""
        out = self._decoded(batch)
        # Only rows that predict a response token meet the vocabulary.
        hidden = out.last_hidden_state[0].index_select(0, batch.rows)
        weight = self.hf.lm_head.weight
        return token_head(hidden, weight, batch.targets, batch.temperature, entropy_gradient=entropy_gradient)

    def _decoded(self, batch: MicroBatch) -> Any:
        return self.hf.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, layout=batch.layout)

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.hf.model.layers)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """What is trained: parameters under their Hugging Face names, tied ones once."""
        return dict(self.hf.named_parameters())

    def served(self, shards: TorchShards, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | None]]:
        """The weights that engines serve, whole and where they are; None on other ranks than 0. Every rank must take all."""
        for name, p in self.named_weights().items():
            yield name, shards.whole(p, dtype, live=True)

    def base(self) -> nn.Module | None:
        """The reference that these weights themselves are, if any."""
        return None

    def beside(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Small files of a checkpoint, of those of its whole model."""
        return files

    def write_weights(self, directory: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        """The whole model of a checkpoint's `tensors`, as Hugging Face has it. Raises OSError."""
        whole = self.published((name, t.to(dtype)) for name, t in tensors.items())
        write_tensors(directory / MODEL, dict(whole), durable=True)

    def other_adapters(self, directory: Path) -> str:
        """How a checkpoint's adapters differ in what shapes do not tell; empty: they do not."""
        return ""

    def published(self, weights: Named) -> Named:
        """Weights of `named_weights`, in its order, as the checkpoint's own files have them."""
        return as_files(weights)

    def prove(self, shards: TorchShards, ranks: Ranks, device: torch.device) -> None:
        """Before the first step, where it computes: nothing, since tests hold these families to transformers' log-probs."""

    def prove_narrow(self, masters: Mapping[str, nn.Parameter]) -> None:
        """The same once parameters have a narrower type than they were proved in. `masters` get their gradients, by the names of
        `named_weights`."""

    def prove_compiled(self, compiles: CompilesLayers) -> bool:
        """The same once `compiles` has made its layers run compiled; whether they do."""
        return False


class SightedPolicy(Policy):
    """One that reads pictures: a vision tower's outputs stand in for their tokens' embeddings."""

    def _decoded(self, batch: MicroBatch) -> Any:
        inner, sight = self.hf.model, batch.sight
        assert sight is not None
        x = inner.get_input_embeddings()(batch.input_ids)
        seen = inner.visual(sight.pixels.to(x.dtype), grid_thw=sight.grids).pooler_output
        # Without a picture one of nothing is looked at and not shown: each rank's gradients have the same parts.
        x = x + 0 * seen.sum() if sight.at is None else x.index_copy(1, sight.at, seen[sight.of].to(x.dtype)[None])
        return inner.language_model(inputs_embeds=x, position_ids=sight.positions, use_cache=False, layout=batch.layout)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.hf.model.language_model.layers)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """By the names of the families' published files, which engines know."""
        ours = {"model.language_model.": "model.", "model.visual.": "visual."}
        found = {}
        for name, p in self.hf.named_parameters():
            head = next((head for head in ours if name.startswith(head)), "")
            found[ours.get(head, "") + name.removeprefix(head)] = p
        return found
