"""Megatron's process groups, and small sums over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from actors.trainer.megatron_backend.layout import RankLayout
from actors.trainer.training.ranks import FILES_DEADLINE, STEP_DEADLINE


class Groups:
    """This process's place in a layout; one at a time in a process, and the ranks must be connected."""

    def __init__(self, layout: RankLayout) -> None:
        self._alone = not dist.is_initialized()
        if self._alone:  # megatron-core asks its groups even where there is nobody else
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            distributed_timeout_minutes=int(STEP_DEADLINE.total_seconds() // 60),
            create_gloo_process_groups=True,
        )
        self.tp: dist.ProcessGroup = mpu.get_tensor_model_parallel_group()
        self.cp: dist.ProcessGroup = mpu.get_context_parallel_group()
        self.pp: dist.ProcessGroup = mpu.get_pipeline_model_parallel_group()
        self.dp: dist.ProcessGroup = mpu.get_data_parallel_group()
        self.stages = layout.pp
        self.files = dist.new_group(backend="gloo", timeout=FILES_DEADLINE)
        """all ranks, for the threads that write beside the training"""
        self.last_stage = mpu.get_pipeline_model_parallel_last_rank()
        """rank of the whole world that holds the last stage of this pipeline"""

    def over_data(self, x: Tensor, op: Any) -> Tensor:
        """A CPU tensor reduced over the data-parallel ranks, in place; all other ranks hold the same."""
        if self.dp.size() > 1 and x.numel():
            dist.all_reduce(x, op, group=mpu.get_data_parallel_group_gloo())
        return x

    def from_last_stage(self, x: Tensor) -> Tensor:
        """The last stage's tensor on all stages of the pipeline, in place."""
        if self.stages > 1 and x.numel():
            dist.broadcast(x, self.last_stage, group=self.pp)
        return x

    def close(self) -> None:
        """Forget the groups; the ranks stay connected."""
        mpu.destroy_model_parallel()
        if self._alone and dist.is_initialized():
            dist.destroy_process_group()
