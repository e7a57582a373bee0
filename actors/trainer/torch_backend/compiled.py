"""Decoder layers compiled by torch: one graph for all layers of a model and for all lengths.

Always true: parameters keep their names and hooks stay outside of what is compiled, so sharding, masters and export see the model
they know; a layer that cannot be compiled computes as it was written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch._inductor.config
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

from actors.trainer.torch_backend.implementations.own import RECOMPUTED
from actors.trainer.training.clockwork import compilation

log = logging.getLogger(__name__)

UNGUARDED = "mix_order_reduction_non_strict_mode"
"""Inductor's switch by which a norm's gradient is reduced along tokens and along features in one kernel, whatever their numbers. By
itself it chooses by the number of tokens and guards on the choice: at 1,024 features one graph for micro-batches below 2,560
tokens, one below 5,120, one above, each compiled when the first of them comes, seconds in the middle of a run."""


def compile_layers(layers: Sequence[Any], backend: str = "inductor", whole: bool = False) -> Compiled:
    """Make decoder layers, all of one class, run compiled, with the sizes of sequences left open. Layers that compute again in the
    backward (gradient checkpointing) still do, around what is compiled. `whole`: as one graph or not at all."""
    # Where torch knows the switch, failures of the backward's compilation too are met in the forward, where the plain layer can
    # still take over.
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        torch._functorch.config.force_non_lazy_backward_lowering = True  # type: ignore[attr-defined, unused-ignore]
    compilation.count()
    if "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(recompiles=True)  # a step may take seconds longer for it: the log says why
    run = Compiled(type(layers[0]).forward, backend, whole)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(run, *args, **kwargs, **RECOMPUTED) if torch.is_grad_enabled() else run(*args, **kwargs)

    for layer in layers:
        layer.forward = MethodType(recomputed if getattr(layer, "gradient_checkpointing", False) else run, layer)
        layer.gradient_checkpointing = False
    return run


class Compiled:
    """A function, compiled; the function itself once compilation has failed (`failed`: why)."""

    def __init__(self, plain: Callable[..., Any], backend: str, whole: bool) -> None:
        self.failed = ""
        self._plain = plain
        known = backend == "inductor" and hasattr(torch._inductor.config.triton, UNGUARDED)
        options: dict[str, Any] | None = {f"triton.{UNGUARDED}": True} if known else None
        self._compiled: Callable[..., Any] | None = torch.compile(
            plain, dynamic=True, fullgraph=whole, backend=backend, options=options
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is not None:
            try:
                return self._compiled(*args, **kwargs)
            except TorchDynamoException as error:
                cause = str(getattr(error, "inner_exception", error)).strip().split("\n")[0]
                self.give_up(f"{type(error).__name__}: {cause}")
        return self._plain(*args, **kwargs)

    def give_up(self, why: str) -> None:
        """Run as written from now on."""
        if self.failed:
            return
        self.failed, self._compiled = why, None
        log.warning("layers run uncompiled, which is slower: %s (--compile off: no try)", why)
