"""Any causal model of the installed transformers, by its own class and its own attention.

Always true: the class computes as it is written; only how samples reach it (`SampleFeed`) and which rows of its head are made
differ, and `proof` has compared what is used with the class computing one sample at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from actors.runtime.checkpoint_names import CheckpointNames
from actors.runtime.run import Refused
from actors.trainer.torch_backend.attention import PACKED
from actors.trainer.torch_backend.head import token_head
from actors.trainer.torch_backend.implementations.kind import HeadRows, Implementation, SampleFeed
from actors.trainer.torch_backend.implementations.own import RECOMPUTED
from actors.trainer.torch_backend.implementations.proof import Proof
from actors.trainer.torch_backend.layout import MicroBatch
from actors.trainer.torch_backend.policy import CompilesLayers, Policy
from actors.trainer.torch_backend.shards import TorchShards
from actors.trainer.training.export import Named
from actors.trainer.training.ranks import Ranks

WASTE = 2
"""Samples of which the longest has more than so many times the tokens of the shortest are computed apart, where one process
computes alone: several must call their layers equally often."""


FAR = ("attention_chunk_size", "index_topk")
"""Settings of attention that begins to differ beyond so many tokens of a row, which a proof on short samples does not reach."""
BY_LONGEST = ("longrope", "dynamic")
"""Kinds of rotary positions that follow from the longest sample of a call: each sample must have its own."""


class GenericPolicy(Policy):
    """A class of transformers; `prove` settles `feed` and `head`."""

    proved_here = True

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        self._attention = str(hf.config._attn_implementation)
        self.feed, self.head = SampleFeed.SINGLE, HeadRows.ALL
        self.apart = True  # rows of unlike lengths
        self.autocast: torch.dtype | None = None
        self._proof: Proof | None = None
        config = hf.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        self.each = str(rope.get("rope_type", "")) if rope.get("rope_type") in BY_LONGEST else ""  # one call a sample
        self.unpackable = next((f"{name}={n}" for name in FAR if (n := getattr(config, name, None))), "") or self.each
        self.names = CheckpointNames(hf, Path(hf.config.name_or_path))
        self._takes = inspect.signature(hf.forward).parameters
        self._rows: Tensor | None = None
        output = hf.get_output_embeddings()
        self._output = [output] if isinstance(output, nn.Module) else []  # in a list: no second name for its parameters
        for module in self._output:
            module.register_forward_pre_hook(self._select)

    @property
    def output(self) -> nn.Module | None:
        """The head over the vocabulary, where it is a module."""
        return self._output[0] if self._output else None

    def prove(self, shards: TorchShards, ranks: Ranks, device: torch.device) -> None:
        if self.each and not ranks.alone:
            raise Refused(f"positions of rope_type {self.each} follow from the longest sample of a call: train it on one rank.")
        self.apart = ranks.alone
        self._proof = Proof(self, shards, ranks, device)
        self._proof.settle()

    def prove_narrow(self, masters: Mapping[str, nn.Parameter]) -> None:
        assert self._proof is not None
        self._proof.settle_narrow(masters)

    def prove_compiled(self, compiles: CompilesLayers) -> bool:
        assert self._proof is not None
        return self._proof.settle_compiled(compiles)

    @property
    def feed(self) -> SampleFeed:
        return self._feed

    @feed.setter
    def feed(self, feed: SampleFeed) -> None:
        self._feed = feed
        wanted = PACKED if feed is SampleFeed.PACKED else self._attention
        if self.hf.config._attn_implementation != wanted:
            self.hf.set_attn_implementation(wanted)

    def forward(self, batch: MicroBatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        made, order = [], []
        for inputs, rows, at in self._fed(batch):
            made.append(self._computed(inputs, rows))
            order.append(at)
        out = made[0] if len(made) == 1 else torch.cat(made).index_select(0, torch.cat(order).argsort())
        if self.head is HeadRows.LINEAR:
            weight: Any = self._output[0].weight
            return token_head(out.to(weight.dtype), weight, batch.targets, batch.temperature, entropy_gradient=entropy_gradient)
        warm = batch.temperature[:, None] if isinstance(batch.temperature, Tensor) else batch.temperature
        log_p = torch.log_softmax(out.float() / warm, -1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(log_p.exp() * log_p).sum(-1)
        # A sum, not a view: FSDP hooks what a module returns.
        return log_p.gather(1, batch.targets[:, None]).sum(1), entropy

    def _fed(self, batch: MicroBatch) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        """(what the class gets, flat places of predicting rows in it [r], their places among the batch's [r]), for each call."""
        every = torch.arange(batch.rows.numel(), device=batch.rows.device)
        if self.feed in (SampleFeed.PACKED, SampleFeed.MASKED):
            inputs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
            if self.feed is SampleFeed.PACKED:
                inputs["layout"] = batch.layout
            yield inputs, batch.rows, every
            return
        starts = batch.layout.cu_seqlens.long()
        of = torch.bucketize(batch.rows, starts[1:-1], right=True)  # sample of each predicting row
        for samples in self._groups(batch.lengths):
            longest = max(batch.lengths[s] for s in samples)
            ids = torch.tensor(samples, device=starts.device)
            lengths = (starts[1:] - starts[:-1])[ids]
            columns = torch.arange(longest, device=starts.device)
            real = columns < lengths[:, None]
            tokens = batch.input_ids[0][(starts[ids][:, None] + columns).clamp(max=batch.input_ids.shape[1] - 1)]
            row_of = torch.full((len(batch.lengths),), -1, device=starts.device).index_put_(
                (ids,), torch.arange(len(samples), device=starts.device)
            )
            at = every[row_of[of] >= 0]
            rows = row_of[of[at]] * longest + batch.rows[at] - starts[of[at]]
            inputs = {"input_ids": torch.where(real, tokens, 0)}
            if self.feed is SampleFeed.ROWS:
                inputs |= {"attention_mask": real.long(), "position_ids": columns.expand(len(samples), -1)}
            yield inputs, rows, at

    def _groups(self, lengths: tuple[int, ...]) -> Iterator[list[int]]:
        """Samples of each call."""
        left = sorted(range(len(lengths)), key=lambda s: -lengths[s])
        while left:
            longest = lengths[left[0]]
            n = sum(WASTE * lengths[s] >= longest for s in left) if self.apart else len(left)
            n = 1 if self.feed is SampleFeed.SINGLE or self.each else n
            yield left[:n]
            left = left[n:]

    def _computed(self, inputs: dict[str, Any], rows: Tensor) -> Tensor:
        """Logits [r, V] of these rows, or what the linear head makes them from [r, D]."""
        taken = {name: value for name, value in inputs.items() if name in self._takes or name == "layout"}
        if "use_cache" in self._takes:
            taken["use_cache"] = False
        if self.head is HeadRows.ALL:
            return self.logits(taken).flatten(0, -2).index_select(0, rows)
        self._rows = rows
        if self.head is HeadRows.LINEAR:
            self._output[0].forward = _unchanged
        try:
            return self.logits(taken).flatten(0, -2)
        finally:
            self._rows = None
            self._output[0].__dict__.pop("forward", None)

    def logits(self, taken: dict[str, Any]) -> Tensor:
        """What the class makes of these arguments, [rows, tokens, V]."""
        with torch.autocast(taken["input_ids"].device.type, self.autocast) if self.autocast else nullcontext():
            out: Tensor = self.hf(**taken).logits
        return out

    def _select(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._rows is None:
            return args
        return args[0].flatten(0, -2).index_select(0, self._rows)[None], *args[1:]

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers: the list of modules that holds most parameters."""
        lists: list[Any] = [m for m in self.hf.modules() if isinstance(m, nn.ModuleList)]
        return list(max(lists, key=_size, default=()))

    def published(self, weights: Named) -> Named:
        return self.names.published(weights)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _unchanged(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _configured(config: Any) -> None:
    """No chance in any layer, and no loss of the class's own: the policy trained is the one that sampled."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _configured(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False


def _recomputes(hf: Any) -> None:
    """Layers alone are told that they train, which is what makes them compute again; what is inside them is not."""
    hf.gradient_checkpointing_enable(RECOMPUTED)
    hf.eval()
    for module in hf.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _lacks(config: Any) -> str:
    if config.model_type in CAUSAL or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return ""
    return f"transformers has no causal language model for model_type {config.model_type!r} (an encoder, classifier or the like)"


TRANSFORMERS = Implementation(
    name="transformers",
    lacks=_lacks,
    loads=AutoModelForCausalLM,
    attention={},  # sdpa where the class has it, else eager
    configured=_configured,
    prepared=lambda hf: None,
    recomputes=_recomputes,
    policy=GenericPolicy,
    critic=False,
)
