"""What the vocabulary head does to a chunk of logits on a GPU: one pass over it forward, one backward, numbers in registers.

Always true: logits are read in their own type and every sum over the vocabulary is float32; `head.py` has the same formulas in
torch, and they are the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FORWARD_BLOCK = 8192
"""Logits of a row that one step of the forward reads."""
BACKWARD_BLOCK = 4096
"""Logits of a row that one program of the backward writes."""


@triton.jit
def _read(logits, targets, temperature, lse, logp, entropy, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * VOCAB
    warm = tl.load(temperature + row)
    top = float("-inf")
    mass = tl.zeros([BLOCK], tl.float32)  # sum of exp(z - top), by lane
    moment = tl.zeros([BLOCK], tl.float32)  # sum of exp(z - top) z, by lane
    for start in range(0, VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < VOCAB
        z = tl.load(line + at, mask=inside, other=float("-inf")).to(tl.float32) / warm
        higher = tl.maximum(top, tl.max(z, 0))
        share = tl.exp(z - higher)
        shrink = tl.exp(top - higher)
        mass = mass * shrink + share
        moment = moment * shrink + tl.where(inside, share * z, 0.0)
        top = higher
    total = tl.sum(mass, 0)
    norm = top + tl.log(total)
    chosen = tl.load(line + tl.load(targets + row)).to(tl.float32) / warm
    tl.store(lse + row, norm)
    tl.store(logp + row, chosen - norm)
    tl.store(entropy + row, norm - tl.sum(moment, 0) / total)


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    logits,
    targets,
    temperature,
    lse,
    entropy,
    grad_logp,
    grad_entropy,
    VOCAB: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    here = logits + row * VOCAB + at
    warm = tl.load(temperature + row)
    g = tl.load(grad_logp + row)
    log_p = tl.load(here, mask=inside, other=float("-inf")).to(tl.float32) / warm - tl.load(lse + row)
    pull = g
    if WITH_ENTROPY:
        pull = g + tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    d = (tl.where(at == tl.load(targets + row), g, 0.0) - tl.exp(log_p) * pull) / warm
    tl.store(here, d.to(logits.dtype.element_ty), mask=inside)


def read_rows(logits: Tensor, targets: Tensor, temperature: Tensor, lse: Tensor, logp: Tensor, entropy: Tensor) -> None:
    """Fill lse, logp and entropy, float32 [R], from logits [R, V] (contiguous), targets int64 [R] and temperature float32 [R]."""
    if logits.shape[0]:
        _read[(logits.shape[0],)](
            logits, targets, temperature, lse, logp, entropy, VOCAB=logits.shape[1], BLOCK=FORWARD_BLOCK, num_warps=16
        )


def turn_into_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """The same logits, overwritten by the gradient with respect to them; what comes by row is float32 [R], contiguous."""
    rows, vocab = logits.shape
    if rows:
        _turn[(rows, triton.cdiv(vocab, BACKWARD_BLOCK))](
            logits, targets, temperature, lse, entropy, grad_logp, grad_logp if grad_entropy is None else grad_entropy, VOCAB=vocab,
            WITH_ENTROPY=grad_entropy is not None, BLOCK=BACKWARD_BLOCK, num_warps=8,
        )  # fmt: skip
    return logits
