"""Checkpoints in Megatron's torch_dist format: each rank writes its shards, any layout reads them again.

A save has two parts. `save_sharded` copies what this rank writes to the host, and weights may change again as soon as it returns;
the function that it returns writes, now or in a thread. Both are collective. Nothing is unpickled but plain values and tensors.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.safe_globals import SAFE_GLOBALS
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.architecture import Architecture
from actors.trainer.megatron_backend.distributed_state import PREFIX, check_places, cut, ready_to_load
from actors.trainer.megatron_backend.torch_dist import REFERENCE, NotPlain, check

SHARDING = "fully_reshardable"
"""How a distributed optimizer is cut in a checkpoint: by parameter, so that any layout reads it again."""
EXTRA = "_extra_state"


def save_sharded(
    chunks: Sequence[Any],
    directory: Path,
    *,
    optimizer: Any = None,
    reference: Mapping[str, Tensor] | None = None,
    extra: dict[str, Any] | None = None,
    group: Any = None,
    copied: bool = True,
) -> Callable[[], None]:
    """Copy this rank's shards to the host; returns what writes them into `directory`, which must exist.

    `reference`: other weights of the same model, by chunk and name ("0.decoder.final_layernorm.weight").
    `extra`: plain values and tensors, equal on every rank. `group`: a gloo group of all ranks for the writing, one of its own where
    it runs beside training. Without `copied` the weights themselves are written: they must not change before. Raises OSError from
    the function where the disk refuses.
    """
    is_copy = optimizer is not None and cut(optimizer)
    state = _state(chunks, optimizer, loading=False)
    if reference is not None:
        state["reference"] = _others(state, chunks, reference)
    sharded, common = save_preprocess({**state, "extra": extra or {}})
    for part in nested_values(sharded):
        if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id):
            part.data = part.data.detach().to("cpu", copy=copied and not (is_copy and part.key.startswith(PREFIX)))
    flat, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    shards = torch_strategy.mcore_to_pyt_state_dict(flat, False)
    small = io.BytesIO()
    torch.save(_without_classes(common), small)

    def write() -> None:
        if first := dist.get_rank() == 0:
            (directory / "common.pt").write_bytes(small.getvalue())
        dcp.save(
            shards,
            storage_writer=dcp.FileSystemWriter(directory, sync_files=True),
            planner=torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
        if first:  # last: without it the folder is no checkpoint
            save_config(CheckpointingConfig("torch_dist", 1), str(directory))
        dist.barrier(group=group)

    return write


def check_can_save(chunks: Sequence[Any], *, optimizer: Any = None, reference: Mapping[str, Tensor] | None = None) -> None:
    """Refused where `save_sharded` of the same could not write something. Before the first step: a run would lose its work."""
    state = _state(chunks, None, loading=False)
    if optimizer is not None:
        check_places(optimizer, state)
    if reference is not None:
        _others(state, chunks, reference)


def load_sharded(
    chunks: Sequence[Any],
    arch: Architecture,
    directory: Path,
    *,
    optimizer: Any = None,
    reference: Mapping[str, Tensor] | None = None,
    with_extra: bool = False,
) -> dict[str, Any]:
    """Fill chunks, and optimizer and reference if given, from a checkpoint of any layout; returns its `extra` if asked to.
    Collective. Raises Refused, before a tensor is read, where the checkpoint is of another model, not whole, or carries code."""
    table = check(directory, arch)
    numbered = any(re.match(r"decoder\.layers\.\d", key) for key in table)
    if optimizer is not None:
        _check_kind(table, directory, distributed=cut(optimizer))
        ready_to_load(optimizer)
    state = _state(chunks, optimizer, loading=True, numbered=numbered)
    if reference is not None:
        state["reference"] = _others(state, chunks, {name: torch.empty_like(t) for name, t in reference.items()})
    small = TorchCommonLoadStrategy() if optimizer is not None or with_extra else _Unopened()
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            loaded = dist_checkpointing.load(state, str(directory), common_strategy=small, validate_access_integrity=False)
    except (CheckpointingException, CheckpointException, NotPlain, KeyError, RuntimeError) as err:
        raise Refused(f"{directory} can't be loaded: {str(err).splitlines()[-1]}") from err
    for key, chunk in _named(chunks):
        lacks = [k for k in chunk.load_state_dict(loaded[key], strict=False).missing_keys if not k.endswith(EXTRA)]
        if lacks:
            raise Refused(f"{directory} lacks {', '.join(lacks[:3])}")
    for name, weight in (reference or {}).items():
        weight.copy_(loaded["reference"][name])
    if optimizer is not None:
        own = [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(loaded["optimizer"])
        for group, had in zip(optimizer.param_groups, own, strict=True):
            for name in had.keys() - group.keys():  # what a checkpoint doesn't say: this process's own
                group[name] = had[name]
    return dict(loaded.get("extra") or {})


def _check_kind(table: Collection[str], directory: Path, *, distributed: bool) -> None:
    held = any(key.startswith(f"{PREFIX}param.") for key in table)
    if held != distributed:
        was, way = ("", "set") if held else ("not ", "leave out")
        raise Refused(
            f"{directory} holds the state of an optimizer that was {was}distributed; {way} --use-distributed-optimizer, or begin "
            "the optimizer anew with --no-load-optim"
        )


def _without_classes(state: Any) -> Any:
    """The same without entries whose value is a class. An optimizer on the host lists in its groups which optimizers it is made of;
    a class in a pickle is code to run, so no reader would take it, and each process has its own."""
    if isinstance(state, dict):
        return {name: _without_classes(value) for name, value in state.items() if not isinstance(value, type)}
    return [_without_classes(value) for value in state] if isinstance(state, list) else state


def _named(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    return [("model" if len(chunks) == 1 else f"model{k}", chunk) for k, chunk in enumerate(chunks)]


def _state(chunks: Sequence[Any], optimizer: Any, *, loading: bool, numbered: bool = False) -> dict[str, Any]:
    """Sharded tensors of model and optimizer, under the names that Megatron-LM gives them. `numbered`: each layer under its own
    name, instead of all layers as one tensor."""
    how = {"distrib_optim_sharding_type": SHARDING, "chained_optim_avoid_prefix": True}
    state: dict[str, Any] = {}
    for key, chunk in _named(chunks):
        parts = chunk.sharded_state_dict(metadata={**how, **({"non_homogeneous_layers": True} if numbered else {})})
        # What Transformer Engine keeps for FP8 is an object of its own; without it, it begins anew. Of grouped experts the first's
        # bears the plain name, the others' end in their number: all of them go, for a part of them makes no checkpoint.
        state[key] = {name: part for name, part in parts.items() if not name.rpartition(".")[2].startswith(EXTRA)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=how)
    return state


def _others(state: dict[str, Any], chunks: Sequence[Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """`weights` in the places of the chunks' own, under keys of their own."""
    names = {t: f"{k}.{name}" for k, chunk in enumerate(chunks) for name, t in (*chunk.named_parameters(), *chunk.named_buffers())}
    parts = [part for key, _ in _named(chunks) for part in state[key].values()]
    found = {
        names[part.data]: replace(part, key=f"{REFERENCE}{part.key}", data=weights[names[part.data]])
        for part in parts
        if isinstance(part, ShardedTensor | ShardedTensorFactory) and part.data in names
    }
    if lacks := weights.keys() - found.keys():
        what = ", ".join(sorted(lacks)[:3])
        raise Refused(f"ref_update_interval: a checkpoint of the reference has no place for {what}; leave it out")
    return found


class _Unopened(TorchCommonLoadStrategy):
    """Of a checkpoint whose weights alone are wanted, common.pt is not read: Megatron-LM keeps arguments of all kinds there."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return {}


def _plain_values(self: Any, read_item: Any, value: io.BytesIO) -> None:
    self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


torch_strategy.MCoreLoadPlanner.load_bytes = _plain_values  # as it comes it would run what a pickle says
