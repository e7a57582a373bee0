"""megatron-core's optimizer that keeps its state on the host, without a GPU: the real one, told that weights lie on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer, optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.overrides import TorchFunctionMode

from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.megatron_backend.host import on_device
from actors.trainer.megatron_backend.optimizer import Update
from actors.trainer.megatron_backend.weights import export_hf
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.step import train_batch
from tests.megatron.tiny import batch_of, config_of

FIELDS: dict[str, Any] = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "optimizer_offload_fraction": 1.0,
                          "overlap_cpu_optimizer_d2h_h2d": True, "pin_cpu_grads": False}  # fmt: skip


class _Stream:
    """Everything is done when it is asked for."""

    def wait_stream(self, other: Any) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


class _OnGpu(TorchFunctionMode):
    """A tensor is on the GPU until it is copied to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not getattr(args[0], "on_host", False)
        made = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        hosted = func in (torch.Tensor.cpu, torch.Tensor.pin_memory) or getattr(args[0] if args else None, "on_host", False)
        if hosted and isinstance(made, torch.Tensor):
            vars(made)["on_host"] = True
        return made


def _pretend() -> None:
    """For the rest of this process."""
    apart = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def on_gpu(self: Any, fraction: float) -> Any:
        with _OnGpu():
            return apart(self, fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = on_gpu
    optimizer_config.is_te_min_version = lambda *_, **__: True
    distrib_optimizer.HAVE_APEX_OR_TE = True  # as it is where there is a GPU
    torch.cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value]
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment,return-value]


def core_of(path: str, **settings: Any) -> MegatronCore:
    """With the optimizer's state on the host; in a process of its own."""
    _pretend()
    core = MegatronCore(config_of(path, model_dtype="bfloat16", **settings), Ranks(dist.get_rank(), dist.get_world_size()))
    with on_device():
        core.update = Update(replace(core.model.optimizer_config, **FIELDS), core.model.chunks)
    inner = core.update.optimizer.chained_optimizers[0].optimizer
    assert isinstance(inner, HybridDeviceOptimizer) and inner.cpu_optimizers and not inner.gpu_optimizer
    return core


def trained(
    path: str,
    steps: int,
    *,
    begin: str = "",
    first: int = 0,
    end: str = "",
    drops: tuple[str, ...] = (),
    before: int = 0,
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """(losses, weights afterwards, what the optimizer's first group says). `before`: steps before `begin` is loaded."""
    core = core_of(path, lr=1e-3, adam_eps=1e-8)
    try:
        for step in range(40, 40 + before):
            train_batch(core, batch_of(step))
        if begin:
            core.load(Path(begin), None, drops)
        losses = [train_batch(core, batch_of(step)).metrics["train/loss"] for step in range(first, first + steps)]
        weights = {name: t.clone() for name, t in export_hf(core.model.bare, core.model.architecture)}
        group = {k: str(v) for k, v in core.update.optimizer.param_groups[0].items() if k != "params"}
        if end:
            core.save(Path(end)).write()
        return losses, weights, group
    finally:
        core.close()
