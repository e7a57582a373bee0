"""Layers with Megatron's grouped experts on a host without Transformer Engine: a stand-in for its grouped linear, which keeps
weights, and what it calls extra state, as that does. For `--spec`: `SPEC`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from actors.trainer.megatron_backend.grouped import GroupedExperts
from actors.trainer.megatron_backend.layers import layer_specs

SPEC = ("tests.megatron.grouped_layers", "layers")


class GroupedLinear(nn.Module):
    """`n` experts. Its extra state is empty where there is no FP8, and is there all the same."""

    axis: int  # along which tensor-parallel ranks cut a weight [out, in]

    def __init__(self, n: int, width: int, out: int, *, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.n, self.groups = n, pg_collection
        shape = [out, width]
        shape[self.axis] //= pg_collection.expt_tp.size()
        for e in range(n):
            self.register_parameter(f"weight{e}", nn.Parameter(torch.empty(shape, dtype=config.params_dtype)))
            vars(getattr(self, f"weight{e}"))["allreduce"] = config.expert_model_parallel_size == 1

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert state.numel() == 0

    def forward(self, x: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        parts = [rows @ getattr(self, f"weight{e}").T for e, rows in enumerate(x.split(counts))]
        return torch.cat(parts), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> dict[str, Any]:
        """The first expert's extra state bears the plain name, the others' a number behind it, as weights do."""
        first, total = self.groups.ep.rank() * self.n, self.groups.ep.size() * self.n
        found: dict[str, Any] = {}
        for e in range(self.n):
            held = {f"{e}.weight": getattr(self, f"weight{e}"), f"{e}._extra_state": self.get_extra_state()}
            place = (*sharded_offsets, (len(sharded_offsets), first + e, total))
            made = make_sharded_tensors_for_checkpoint(
                held,
                "",
                {f"{e}.weight": self.axis},
                place,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(made, f"{e}.", prefix)
            for part in made.values():
                part.replica_id = (*part.replica_id[:2], self.groups.expt_dp.rank())
            found[f"{prefix}weight{e}"] = made[f"{e}.weight"]
            found[f"{prefix}_extra_state{e or ''}"] = made[f"{e}._extra_state"]
        return found


class Rows(GroupedLinear):
    axis = 0


class Columns(GroupedLinear):
    axis = 1


def layers(args: Any, config: Any, stage: int | None) -> Any:
    """The family's own layers, with all experts of a layer in one module."""
    block = layer_specs(config, stage)
    for layer in block.layer_specs:
        parts = layer.submodules.mlp.submodules
        if hasattr(parts, "experts"):
            linears = type(parts.experts.submodules)(linear_fc1=Rows, linear_fc2=Columns)
            parts.experts = ModuleSpec(GroupedExperts, submodules=linears)
    return block
