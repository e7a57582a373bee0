"""megatron-core where there is no CUDA: the same code path on the CPU under gloo, for small models, conversion and tests.

Megatron asks CUDA for the current device and for random states of its own. Without a GPU the answers are the CPU and nothing:
dropout is off in what is trained here, so no random state is drawn on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _NoRandomStates:
    """In place of Megatron's tracker of CUDA random states."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        if states:
            raise ValueError(f"random states of {sorted(states)} were saved on a GPU and can't be restored on a host without one")


def prepare() -> torch.device:
    """Make megatron-core usable in this process; returns the device that models are built on. Once per process, before a model is
    built; without effect where CUDA is there."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    from megatron.core.tensor_parallel import random as states

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    states._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    states._set_cuda_rng_state = lambda *_, **__: None
    states.initialize_rng_tracker()
    states._CUDA_RNG_STATE_TRACKER = _NoRandomStates()
    states._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    _without_streams()
    return cpu


def _without_streams() -> None:
    """Experts and latent attention without what they want from CUDA and Transformer Engine."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    multi_latent_attention.HAVE_TE = False  # true without Transformer Engine as well, and then asks for its classes
    moe_utils.te_general_gemm = None  # a name that is not bound without it

    def counts_on_the_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        # On a GPU this copies the counts of tokens on a stream of its own. Here they lie on the host already, as tensors.
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(splits := getattr(self, name, None), torch.Tensor):
                setattr(self, name, splits.numpy())
        return tokens_per_expert

    Dispatcher.cuda_dtoh_stream = Dispatcher  # anything: a stream would be made where there is none
    Dispatcher._maybe_dtoh_and_synchronize = counts_on_the_host


class _OnHost(TorchFunctionMode):
    """megatron-core names the device "cuda" in a few places of its schedules and optimizers, and compares types by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        made = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return made.replace("torch.", "torch.cuda.", 1)
        return made


def on_device() -> AbstractContextManager[Any]:
    """Everything of megatron-core's training runs inside: a tensor that it asks of "cuda" lies on this process's device."""
    return nullcontext() if torch.cuda.is_available() else _OnHost()
