"""The policy computed as SGLang computes it in deterministic mode, operation by operation, so that the log-probs of trainer
and engine are the same numbers: Qwen3 in bfloat16, one GPU a engine, --enable-deterministic-inference --attention-backend fa3.

Always true: every value is made by SGLang's own kernel, in the order and the type in which the engine makes it (products by
its batch-invariant matrix product, which replaces torch's in this process); the gradient is that of the same formula in
torch. Without SGLang's kernels (a CPU) the formulas stand for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from actors.runtime.run import Refused
from actors.trainer.torch_backend.attention import attend, padded_attention
from actors.trainer.torch_backend.head import CHUNK_ELEMENTS, token_head
from actors.trainer.torch_backend.implementations.own import RECOMPUTED
from actors.trainer.torch_backend.layout import MicroBatch, PackedLayout
from actors.trainer.torch_backend.policy import Policy

FAMILY = "qwen3"


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the last axis, in float32 until the end."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def swish(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> silu(first half) * second half."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """[T, H, D] with its two halves rotated by position; cos_sin float32 [positions, D]."""
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    one, two = x.float().chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)


@dataclass(frozen=True)
class Kernels:
    """What stands for the formulas above, and attention over a packed sequence."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    swish: Callable[[Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, PackedLayout, float], Tensor]


FORMULAS = Kernels(norm, swish, rotate, padded_attention)


def _rope() -> Callable[..., None]:
    """Where SGLang has it: one place up to 0.5.16, another from 0.5.17 on. Raises ImportError."""
    try:
        from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace as rotate
    except ImportError:
        from sglang.jit_kernel.rope import apply_rope_with_cos_sin_cache_inplace as rotate
    made: Callable[..., None] = rotate
    return made


def sglang_kernels() -> Kernels:
    """SGLang's; from now on every matrix product of this process is batch-invariant too. Refused without SGLang."""
    try:
        from sgl_kernel import silu_and_mul
        from sgl_kernel.flash_attn import flash_attn_varlen_func
        from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode
        from sglang.srt.batch_invariant_ops.batch_invariant_ops import rms_norm_batch_invariant

        apply_rope_with_cos_sin_cache_inplace = _rope()
    except ImportError as error:
        raise Refused(
            f"log-probs equal to the engine's need SGLang's kernels here: {error}. Install SGLang beside the trainer."
        ) from error
    enable_batch_invariant_mode(enable_bmm=False)

    def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        spare = out[:, :1].clone()  # the kernel rotates queries and keys
        apply_rope_with_cos_sin_cache_inplace(out, spare, cos_sin, positions, is_neox=True)
        return out

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float) -> Tensor:
        at, n = layout.cu_seqlens, layout.longest
        out: Tensor = flash_attn_varlen_func(q, k, v, at, at, n, n, softmax_scale=scale, causal=True, num_splits=1)
        return out

    return Kernels(rms_norm_batch_invariant, silu_and_mul, rotated, attend)


class _Exact(torch.autograd.Function):
    """The value of `kernel`, the gradient of `formula`, which is the same function up to rounding."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], formula: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.formula = formula
        ctx.save_for_backward(*tensors)
        return kernel(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        held = [t.detach().requires_grad_(needs) for t, needs in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)]
        with torch.enable_grad():
            out = ctx.formula(*held)
        asked = [t for t in held if t.requires_grad]
        found = iter(torch.autograd.grad(out, asked, grad))
        return None, None, *(next(found) if t.requires_grad else None for t in held)


class MatchedPolicy(Policy):
    """A policy whose log-probs are those of SGLang's deterministic mode. `kernels`: None = SGLang's."""

    def __init__(self, hf: Any, kernels: Kernels | None = None) -> None:
        super().__init__(hf)
        config = hf.config
        if config.model_type != FAMILY:
            raise Refused(
                f"log-probs equal to the engine's are implemented for {FAMILY}, not for {config.model_type!r}. Leave that mode out."
            )
        _check_rope(config)
        self._table = torch.empty(0)  # cosines and sines, made where the first batch is
        self._kernels = kernels or sglang_kernels()
        self._formula_attend = attend if kernels is None else padded_attention

    def forward(self, batch: MicroBatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        hidden = self._hidden(batch).index_select(0, batch.rows)
        weight, targets, warm = self.hf.lm_head.weight, batch.targets, batch.temperature
        formula, entropy = token_head(hidden, weight, targets, warm, entropy_gradient=entropy_gradient, fused=False)
        exact = token_logprobs(hidden.detach(), weight.detach(), targets, warm)
        # The gradient is the formula's, the value to the last bit the engine's.
        return _Value.apply(formula, exact), entropy

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """[T, hidden size] after the last norm. The sum of the residual is normed before it is rounded."""
        model = self.hf.model
        residual = model.embed_tokens(batch.input_ids[0])
        if self._table.device != residual.device or not self._table.numel():
            self._table = _cos_sin(self.hf.config, residual.device)
        x = self._norm(residual, model.layers[0].input_layernorm)
        again = self.hf.is_gradient_checkpointing and torch.is_grad_enabled()
        for i in range(len(model.layers)):
            given = (i, x, residual, batch)
            x, residual = checkpoint(self._layer, *given, **RECOMPUTED) if again else self._layer(*given)
        return _add_norm(x, residual, model.norm)[0]

    def _layer(self, i: int, x: Tensor, residual: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Layer `i`; the first one's input is normed already."""
        layer = self.hf.model.layers[i]
        if i:
            x, residual = _add_norm(x, residual, layer.input_layernorm)
        x = self._attention(x, layer.self_attn, batch)
        x, residual = _add_norm(x, residual, layer.post_attention_layernorm)
        mlp = layer.mlp
        gate_up = F.linear(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        return F.linear(_Exact.apply(self._kernels.swish, swish, gate_up), mlp.down_proj.weight), residual

    def _norm(self, x: Tensor, module: Any) -> Tensor:
        eps = module.variance_epsilon
        out: Tensor = _Exact.apply(lambda x, w: self._kernels.norm(x, w, eps), lambda x, w: norm(x, w, eps), x, module.weight)
        return out

    def _attention(self, x: Tensor, module: Any, batch: MicroBatch) -> Tensor:
        n, size = x.shape[0], module.head_dim
        projections = module.q_proj, module.k_proj, module.v_proj
        qkv = F.linear(x, torch.cat([p.weight for p in projections]))
        q, k, v = qkv.split([p.weight.shape[0] for p in projections], -1)
        positions, at, scale = batch.position_ids[0], batch.layout, float(size**-0.5)

        def turn(y: Tensor, norm_module: Any) -> Tensor:
            y = self._norm(y.reshape(-1, size), norm_module).view(n, -1, size)
            out: Tensor = _Exact.apply(
                lambda t: self._kernels.rotate(t, positions, self._table),
                lambda t: rotate(t, positions, self._table),
                y,
            )
            return out

        out: Tensor = _Exact.apply(
            lambda q, k, v: self._kernels.attend(q, k, v, at, scale),
            lambda q, k, v: self._formula_attend(q, k, v, at, scale),
            turn(q, module.q_norm),
            turn(k, module.k_norm),
            v.reshape(n, -1, size),
        )
        return F.linear(out.reshape(n, -1), module.o_proj.weight)


class _Value(torch.autograd.Function):
    """The second argument, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, formula: Tensor, exact: Tensor) -> Tensor:
        return exact

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _add_norm(x: Tensor, residual: Tensor, module: Any) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum in the type of x)."""
    total = x.float() + residual.float()
    wide = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    return (wide * module.weight).to(x.dtype), total.to(x.dtype)


@torch.no_grad()
def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor) -> Tensor:
    """log(softmax(logits / temperature)) of the targets, float32 [R], in the steps of SGLang's sampler."""
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
    found = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        warm = temperature[part, None] if isinstance(temperature, Tensor) else temperature
        share = torch.softmax((hidden[part] @ weight.T).float() / warm, -1)
        found[part] = torch.log(share.gather(1, targets[part, None])).squeeze(1)
    return found


def _check_rope(config: Any) -> None:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind != "default":
        raise Refused(f"log-probs equal to the engine's are not implemented for rope_type={kind!r}. Leave that mode out.")


def _cos_sin(config: Any, device: torch.device) -> Tensor:
    """float32 [positions, head size]: cosines, then sines, as the engine makes them on its device."""
    parameters = getattr(config, "rope_parameters", None) or {}
    base = parameters.get("rope_theta") or config.rope_theta
    size = config.head_dim
    inverse = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float, device=device) / size))
    at = torch.arange(config.max_position_embeddings, dtype=torch.float, device=device)
    angles = torch.einsum("i,j -> ij", at, inverse)
    return torch.cat((angles.cos(), angles.sin()), -1)
