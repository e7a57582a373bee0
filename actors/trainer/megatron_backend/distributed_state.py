"""The distributed optimizer's state in a checkpoint: each data-parallel rank writes and reads its part, and nothing is gathered.

megatron-core's `fully_reshardable` brings masters and moments of a whole model-parallel rank together on every data-parallel rank,
12 bytes a parameter each, to write and to read them. Here a rank's range of each flattened parameter is cut into boxes, for a
torch_dist checkpoint holds boxes of any size: names, shapes and numbers are those of `fully_reshardable`, which reads them too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.torch_dist import OPTIMIZER

KEYS = ("param", "exp_avg", "exp_avg_sq")
PREFIX = f"{OPTIMIZER}state."
Shape = tuple[int, ...]


def cut(optimizer: Any) -> bool:
    """Have these optimizers written and read by parts; False where none is distributed. What is written of them are copies in host
    memory already."""
    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part.sharded_param_state_fully_reshardable = partial(_parts, part)
        part.load_parameter_state_from_fully_reshardable = partial(_take, part)
    return bool(parts)


def ready_to_load(optimizer: Any) -> None:
    """torch's Adam, which stands in for Transformer Engine's on a CPU, has no state before its first step, and megatron-core asks
    for it."""
    for part in optimizer.chained_optimizers:
        if not isinstance(part, DistributedOptimizer) or not _is_torchs(part.optimizer) or part.optimizer.state:
            continue
        for weight in (p for group in part.optimizer.param_groups for p in group["params"]):
            moments = {name: torch.zeros_like(weight) for name in KEYS[1:]}
            part.optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}


def check_places(optimizer: Any, model: dict[str, Any]) -> None:
    """Refused, before a step is made, where a part could not be written. `model`: sharded state of the chunks."""
    places = _places(model)
    for part in optimizer.chained_optimizers:
        for weight, start, stop in _own(part) if isinstance(part, DistributedOptimizer) else ():
            for _ in _pieces(places[weight], start, stop):
                pass


def _is_torchs(adam: Any) -> bool:
    return isinstance(adam, torch.optim.Adam | torch.optim.AdamW)


def _own(part: DistributedOptimizer) -> Iterator[tuple[Tensor, int, int]]:
    """(parameter, first and last + 1 of the flattened elements of it that this rank holds)"""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for weight, ranges in bucket["param_map"].items():
                    yield weight, ranges["param"].start, ranges["param"].end


def _parts(part: DistributedOptimizer, model: dict[str, Any], is_loading: bool = False, metadata: Any = None) -> dict[int, Any]:
    """By number of the parameter and name of the state: its boxes in order. Loading fills tensors of their own."""
    places, made = _places(model), {}
    for number, (weight, start, stop) in enumerate(_own(part)):
        pieces = list(_pieces(places[weight], start, stop))
        flat = {name: torch.zeros(stop - start) for name in KEYS} if is_loading else _copied(part, weight, start, stop)
        made[number] = {name: [_box(name, flat[name], *piece) for piece in pieces] for name in KEYS}
    return made


def _places(model: dict[str, Any]) -> dict[Tensor, Any]:
    """By parameter, where it is in a checkpoint."""
    sharded, _ = extract_sharded_tensors_and_factories(model)
    return {base.data: base for base in nested_values(sharded)}


def _copied(part: DistributedOptimizer, weight: Tensor, start: int, stop: int) -> dict[str, Tensor]:
    """Masters and moments of the range, float32 [stop - start] in host memory; before the first step moments are 0."""
    held = part._get_main_param_and_optimizer_states(weight) if part.optimizer.state else {}
    master = held.get("param", weight.detach().reshape(-1)[start:stop])
    state = {"param": master, **{name: held.get(name, torch.zeros(stop - start)) for name in KEYS[1:]}}
    return {name: t.detach().reshape(-1).to("cpu", torch.float32, copy=True) for name, t in state.items()}


@torch.no_grad()
def _take(part: DistributedOptimizer, state: dict[int, Any]) -> None:
    """The inverse of `_parts`: what was read becomes this rank's masters and moments."""
    for held in part.optimizer.state.values() if _is_torchs(part.optimizer) else ():
        held["step"] = held["step"].clone()  # megatron-core gave all the same one, and each parameter's update adds 1
    for number, (weight, _, _) in enumerate(_own(part)):
        read = {name: torch.cat([t.reshape(-1) for t in state[number][name]]) for name in KEYS}
        if _is_torchs(part.optimizer):
            read["step"] = part._get_main_param_and_optimizer_states(weight)["step"]
        part._set_main_param_and_optimizer_states(weight, read)
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer._sync_hdo_state_to_sub_optimizers()


def _pieces(base: ShardedTensor | ShardedTensorFactory, start: int, stop: int) -> Iterator[tuple[ShardedTensor, int, Shape, Shape]]:
    """The range [start, stop) of a flattened parameter as boxes: (the checkpoint's tensor it is in, where the box begins in the
    range, its offsets in that tensor's local part, its sizes). A factory makes several tensors of one parameter, each of a run of
    its elements; which run, its views of a tensor without data tell."""
    if isinstance(base, ShardedTensorFactory):
        made = list(nested_values(replace(base, data=torch.empty(base.data.shape, device="meta")).build()))
        runs = [(one, one.data.storage_offset()) for one in made]
    else:
        runs = [(base, 0)]
    for one, first in runs:
        if not one.data.is_contiguous():
            raise Refused(
                f"{one.key} is made of elements that do not lie together in its parameter, and no checkpoint of the distributed "
                "optimizer can hold it: add --no-save-optim, or set megatron.use_distributed_optimizer false"
            )
        low, high = max(start, first), min(stop, first + one.data.numel())
        at = low
        for offsets, sizes in boxes(tuple(one.data.shape), low - first, high - first) if low < high else ():
            yield one, at - start, offsets, sizes
            at += math.prod(sizes)


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of the boxes that hold elements [start, stop) of a tensor of this shape, row by row, in order."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if start % row:
        k, end = start // row, min(stop, first * row)
        yield from (((k, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start - k * row, end - k * row))
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if stop % row and last >= first:
        yield from (((last, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], 0, stop - last * row))


def _box(name: str, flat: Tensor, one: ShardedTensor, at: int, offsets: Shape, sizes: Shape) -> ShardedTensor:
    own = one.prepend_axis_num
    whole = (1,) * own + sizes
    begin = (*one.global_offset[:own], *(a + b for a, b in zip(one.global_offset[own:], offsets, strict=True)))
    return ShardedTensor(
        key=f"{PREFIX}{name}.{one.key}",
        data=flat[at : at + math.prod(sizes)].view(whole),
        dtype=flat.dtype,
        local_shape=whole,
        global_shape=tuple(one.global_shape),
        global_offset=begin,
        axis_fragmentations=None,  # boxes of all sizes
        replica_id=(*one.replica_id[:2], 0),  # each data-parallel rank, the third number, has boxes of its own
        allow_shape_mismatch=one.allow_shape_mismatch,
    )
