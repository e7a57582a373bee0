"""Any causal class of transformers as a decoder of the embedded engine, where the engine has no code of its own.

No keys and values are kept: the cache holds tokens, and each step computes its rows from their first token on. That is slow, right
for every class, recurrent ones too, and meant for small models on a CPU. Always true: a padded row's logits were found equal to the
row's alone when the engine started, or each row is computed alone.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.generation.engines.embedded.adapters import Adapters
from actors.generation.engines.embedded.cache import KvCache
from actors.generation.engines.embedded.config import ModelConfig, ModelRefused, eos_ids, read_json
from actors.generation.engines.embedded.model import SCORE_ROWS, Slot
from actors.generation.engines.embedded.pictures import Eyes, View
from actors.runtime.checkpoint_names import UNCONVERTED, CheckpointNames, tensor_names

CONTEXT = 4096
"""Of a class without positions, which has no limit of its own."""
LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
EQUAL = 1e-4
"""Largest difference of a logit between a padded row and the row alone, relative to the largest logit."""


class TokenCache(KvCache):
    """Tokens of the running rows in place of keys and values: int64 [1, 1, rows, 1, length, 1]."""

    def _allocate(self, rows: int, length: int) -> None:
        self._hold(torch.zeros(1, 1, rows, 1, length, 1, dtype=torch.int64))

    def _hold(self, data: Tensor) -> None:
        self.data, self.rows, self.length = data, data.shape[2], data.shape[4]
        self.tokens = data[0, 0, :, 0, :, 0]
        """[rows, length]"""


class ClassDecoder:
    """What `Decoder` is to the scheduler, by a class of transformers. Raises ModelRefused."""

    adapters: Adapters | None = None
    eyes: Eyes | None = None
    chosen: Tensor | None = None

    def __init__(self, directory: Path, context: int | None, *, repeatable: bool = False) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        raw = read_json(directory / "config.json")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
                if getattr(config, "quantization_config", None) is not None:
                    raise ValueError("its weights are quantised")
                self._hf: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
            why = " ".join(str(error).split())[:300]
            raise ModelRefused(
                f"{directory}: model_type {raw.get('model_type')!r} is not served here: {why}; use --engine sglang."
            ) from None
        self.repeatable = repeatable
        self.fp8_parts: dict[str, dict[str, Tensor]] = {}
        self._takes = inspect.signature(self._hf.forward).parameters
        self.slots = self._slots(directory)
        self.ignored = frozenset(tensor_names(directory) - self.slots.keys())
        if self.ignored:
            first = min(self.ignored)
            print(
                f"embedded engine: {len(self.ignored)} tensors are not of {type(self._hf).__name__}, first {first}", file=sys.stderr
            )
        self.config = _shape_of(config, raw, directory, self._hf, context)

    def _slots(self, directory: Path) -> dict[str, Slot]:
        """Where each tensor of a file lies in the model's parameters and buffers: conversions are done on numbers of places."""
        names = CheckpointNames(self._hf, directory)
        held = {name: p.data for name, p in self._hf.named_parameters()} | names.buffers()
        held = {name: t for name, t in held.items() if t.is_floating_point()}
        places, flats, first = {}, [], 0
        for name, t in held.items():
            places[name] = torch.arange(first, first + t.numel()).view(t.shape)
            flats.append((first, t))
            first += t.numel()
        slots = {}
        try:
            for name, place in names.reverted(places.items()):
                slots[name] = Slot(tuple(place.shape), _view(place, flats))
        except UNCONVERTED as error:
            why = f"transformers keeps its weights in a layout that files do not have ({error})"
            raise ModelRefused(f"{directory}: {why}; use --engine sglang.") from None
        return slots

    def cache(self, max_rows: int, max_total_tokens: int) -> KvCache:
        """Room for running rows."""
        return TokenCache(self.config, max_rows, max_total_tokens)

    def settled(self) -> None:
        """Called once the first weights are there: whether rows may share a forward."""
        if self.repeatable:
            return
        some = torch.arange(3, 3 + 24).remainder(self.config.vocab).view(2, 12)
        lengths = torch.tensor([5, 12])
        padded = self._after(some, lengths)
        alone = torch.cat([self._after(some[i : i + 1, :n], lengths[i : i + 1]) for i, n in enumerate(lengths.tolist())])
        self.repeatable = bool(((padded - alone).abs().max() > EQUAL * alone.abs().max().clamp(min=1)).item())

    def prefill(
        self, prompts: Tensor, lengths: Tensor, source: Tensor, cache: KvCache, first_row: int, views: Sequence[View | None] = ()
    ) -> Tensor:
        """As `Decoder.prefill`."""
        assert isinstance(cache, TokenCache)
        cache.tokens[first_row : first_row + source.numel(), : prompts.shape[1]] = prompts[source]
        return self._after(prompts, lengths)[source]

    def decode(self, tokens: Tensor, positions: Tensor, windows: list[int], cache: KvCache, back: Tensor | None = None) -> Tensor:
        """As `Decoder.decode`."""
        assert isinstance(cache, TokenCache)
        rows = torch.arange(tokens.numel())
        cache.tokens[rows, positions] = tokens
        return self._after(cache.tokens[: tokens.numel(), : max(windows)], positions + 1)

    def score(self, tokens: Tensor) -> Tensor:
        """As `Decoder.score`."""
        logits, found = self._logits(tokens[None], None)[0, :-1], []
        for rows, wanted in zip(logits.split(SCORE_ROWS), tokens[1:].split(SCORE_ROWS), strict=True):
            found.append(torch.log_softmax(rows, -1).gather(1, wanted[:, None]).squeeze(1))
        return torch.cat(found) if found else logits.new_zeros(0)

    def _after(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Logits float32 [n, vocab] after the last token of each row; rows int64 [n, P], padded on the right."""
        if self.repeatable and len(rows) > 1:
            each = zip(rows.split(1), lengths.split(1), strict=True)
            return torch.cat([self._after(row[:, : int(n)], n) for row, n in each])
        real = torch.arange(rows.shape[1]) < lengths[:, None]
        logits = self._logits(torch.where(real, rows, 0), None if bool(real.all()) else real)
        return logits[torch.arange(len(rows)), lengths - 1]

    def _logits(self, ids: Tensor, real: Tensor | None) -> Tensor:
        """float32 [n, P, vocab]; `real`: which are tokens, where some are padding."""
        inputs: dict[str, Any] = {"use_cache": False}
        if real is not None:
            inputs |= {"attention_mask": real.long(), "position_ids": torch.arange(ids.shape[1]).expand(len(ids), -1)}
        logits: Tensor = self._hf(input_ids=ids, **{k: v for k, v in inputs.items() if k in self._takes}).logits
        return logits.float()


def _view(place: Tensor, flats: list[tuple[int, Tensor]]) -> Tensor:
    """The part of one tensor whose elements are numbered so. flats: (number of its first element, tensor), ascending. Raises
    ValueError where no view of one tensor is that part."""
    low = int(place.min())
    first, whole = flats[bisect_right(flats, low, key=lambda flat: flat[0]) - 1]
    origin = place[(0,) * place.ndim]
    steps = [int(place.select(d, 1)[(0,) * (place.ndim - 1)] - origin) if n > 1 else 1 for d, n in enumerate(place.shape)]
    numbers = origin
    for d, (step, n) in enumerate(zip(steps, place.shape, strict=True)):
        numbers = numbers + step * torch.arange(n).view(-1, *(1,) * (place.ndim - 1 - d))
    if (
        min(steps, default=1) < 0
        or not torch.equal(numbers.expand(place.shape), place)
        or int(place.max()) >= first + whole.numel()
    ):
        raise ValueError("no view of one of its tensors")
    return whole.as_strided(place.shape, steps, int(origin) - first)


def _shape_of(config: Any, raw: dict[str, Any], directory: Path, hf: Any, context: int | None) -> ModelConfig:
    text = config.get_text_config()
    limits = (getattr(text, name, None) for name in LIMITS)
    own = next((n for n in limits if isinstance(n, int) and n > 0), CONTEXT)
    head = hf.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is hf.get_input_embeddings().weight
    return ModelConfig(
        family=str(raw["model_type"]),
        architectures=tuple(raw.get("architectures") or (type(hf).__name__,)),
        vocab=int(text.vocab_size),
        hidden=1,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=1,
        inner=1,
        norm_eps=0.0,
        context=own if context is None else min(own, context),
        tied=tied,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        eos=eos_ids(raw, directory),
        inv_freq=(),
    )
