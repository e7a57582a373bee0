"""Weights between Hugging Face directories and model chunks, tensor by tensor.

Loading: each rank reads its own slices out of the files, nothing is sent. Export: tensors are gathered over tensor and expert
ranks one after the other; nowhere stands a whole model. What a parameter holds says its rule, where it is cut says the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.directory import index
from actors.trainer.megatron_backend.mapping import Rule, canonical

Weight = tuple[Rule, int, int, Tensor]
"""(rule, layer, expert, parameter or buffer)"""


def weights(chunks: Sequence[Any], arch: Architecture) -> Iterator[Weight]:
    """Every weight of this rank's chunks. Raises Refused for one that no rule names."""
    rules = {rule.megatron: rule for rule in arch.rules}
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first = arch.experts // ranks * parallel_state.get_expert_model_parallel_rank()
    for chunk in chunks:
        offset = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
        for name, tensor in _state(chunk):
            plain, layer, expert = canonical(name)
            if plain not in rules:
                raise Refused(f"{arch.family}: parameter {name} has no Hugging Face name; the layer spec isn't the family's")
            yield rules[plain], layer + offset, expert + first, tensor


def _state(chunk: Any) -> Iterator[tuple[str, Tensor]]:
    state = chunk.state_dict(keep_vars=True)
    yield from ((name, t) for name, t in state.items() if isinstance(t, Tensor) and not name.endswith("_extra_state"))


class WeightCut:
    """How one weight lies on its tensor-parallel ranks."""

    def __init__(self, rule: Rule, weight: Any) -> None:
        if ".mlp.experts." in rule.megatron:  # Transformer Engine's grouped experts don't say where they are cut
            self.group = parallel_state.get_expert_tensor_parallel_group()
            self.dim: int | None = 0 if "linear_fc1" in rule.megatron else 1
        else:
            self.group = parallel_state.get_tensor_model_parallel_group()
            cut = getattr(weight, "tensor_model_parallel", False) and weight.shape[0] != rule.rows
            self.dim = weight.partition_dim if cut else None
        self.n = dist.get_world_size(self.group) if self.dim is not None else 1
        self.rank = dist.get_rank(self.group) if self.n > 1 else 0


def head_rows(arch: Architecture) -> tuple[int, int]:
    """(rows of queries in a key-value group, rows of its keys)"""
    t = arch.transformer
    return t["num_attention_heads"] // t["num_query_groups"] * t["kv_channels"], t["kv_channels"]


@torch.no_grad()
def load_hf(chunks: Sequence[Any], arch: Architecture, directory: str | Path) -> None:
    """Fill the chunks from a Hugging Face directory of safetensors; types are converted. Raises Refused, before a tensor is read,
    where the directory holds other tensors than the architecture has."""
    files = index(directory, arch)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def part(name: str) -> Any:
            path = files[name]
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(str(path), framework="pt"))
            return opened[path].get_slice(name)

        for rule, layer, expert, weight in weights(chunks, arch):
            cut = WeightCut(rule, weight)
            tensors = [part(name) for name in rule.names(layer, expert)]
            piece = _piece(rule, cut, tensors, arch, weight)
            if piece.shape != weight.shape:
                raise Refused(f"{directory}: {', '.join(rule.names(layer, expert))} make a part of shape {list(piece.shape)}, the "
                              f"architecture in config.json has {list(weight.shape)}")  # fmt: skip
            weight.copy_(piece)


def _rows(source: Any, rank: int, n: int) -> Tensor:
    size = source.get_shape()[0] // n
    return source[rank * size : (rank + 1) * size]


def _piece(rule: Rule, cut: WeightCut, sources: list[Any], arch: Architecture, weight: Tensor) -> Tensor:
    """This rank's part of a parameter, out of slices of Hugging Face tensors."""
    if rule.kind == "vocabulary":
        size = weight.shape[0]
        real = sources[0][cut.rank * size : min((cut.rank + 1) * size, arch.vocab)]
        return torch.cat([real, real.new_zeros(size - len(real), real.shape[1])])
    if rule.kind == "qkv":
        parts = [_rows(source, cut.rank, cut.n) for source in sources]
        sizes = (head_rows(arch)[0], head_rows(arch)[1], head_rows(arch)[1])
        grouped = [p.reshape(-1, size, *p.shape[1:]) for p, size in zip(parts, sizes, strict=True)]
        return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])
    if rule.kind == "halves":
        return torch.cat([_rows(source, cut.rank, cut.n) for source in sources])
    if rule.kind == "fused_halves":
        half = sources[0].get_shape()[0] // 2
        size = half // cut.n
        return torch.cat([sources[0][start + cut.rank * size : start + (cut.rank + 1) * size] for start in (0, half)])
    [source] = sources
    if cut.dim == 1:
        size = source.get_shape()[1] // cut.n
        return source[:, cut.rank * size : (cut.rank + 1) * size]
    return _rows(source, cut.rank, cut.n) if cut.dim == 0 else source[:]


@torch.no_grad()
def export_hf(chunks: Sequence[Any], arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of each weight of this pipeline stage, in its own type, on its device.

    Collective over the ranks of the stage that share a copy of the model (tensor and expert parallel): all of them go through it to
    the end, and get the same. A tensor is the caller's: the next step of the iterator doesn't touch it."""
    for rule, layer, expert, weight in weights(chunks, arch):
        if rule.megatron == "output_layer.weight" and arch.tied:
            continue  # a copy of the first stage's embedding
        cut = WeightCut(rule, weight)
        local = weight.detach()
        if ".mlp.experts." not in rule.megatron:
            yield from zip(rule.names(layer, expert), _whole(rule, cut, _gather(local, cut.group, cut.n), arch), strict=True)
            continue
        experts = parallel_state.get_expert_model_parallel_group()
        n = dist.get_world_size(experts)
        step, place = arch.experts // n, expert % (arch.experts // n)
        for k, parts in enumerate(_gather(_gather(local, cut.group, cut.n), experts, n)):
            yield from zip(rule.names(layer, k * step + place), _whole(rule, cut, parts, arch), strict=True)


def _gather(local: Tensor, group: Any, n: int) -> Tensor:
    """[n, ...]: all ranks' parts in one piece of memory, which is the caller's."""
    parts = local.new_empty(n, *local.shape)
    if n == 1:
        parts[0] = local
    else:
        dist.all_gather(list(parts.unbind()), local.contiguous(), group=group)
    return parts


def _whole(rule: Rule, cut: WeightCut, parts: Tensor, arch: Architecture) -> list[Tensor]:
    """Hugging Face tensors out of all ranks' parts, [n, ...]; without a copy where they lie as they are wanted."""
    rows = parts.flatten(0, 1) if parts.ndim > 1 else parts
    if rule.kind == "vocabulary":
        return [rows[: arch.vocab]]
    if rule.kind == "qkv":
        q, kv = head_rows(arch)
        rest = rows.shape[1:]
        split = rows.reshape(-1, q + 2 * kv, *rest).split((q, kv, kv), dim=1)
        return [x.reshape(-1, *rest).contiguous() for x in split]
    if rule.kind in ("halves", "fused_halves"):
        halves = [side.reshape(-1, *side.shape[2:]) for side in parts.chunk(2, dim=1)]
        return halves if rule.kind == "halves" else [torch.cat(halves)]
    return [torch.cat(parts.unbind(), dim=cut.dim) if cut.dim and len(parts) > 1 else rows]
