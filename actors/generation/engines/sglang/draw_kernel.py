"""The draw of draw_torch.py as two Triton kernels: one reads the logits once, in parts of a row, the other joins the parts.

Numbers are those of draw_torch.draw: the same Philox words for each token, the same formulas; logarithms and sums may differ in
their last bits, so that two tokens whose noisy logits are equal to 1e-5 may change places.
"""

# Triton reads the annotations of its kernels by its own rules.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from actors.generation.engines.sglang.draw_torch import LANES

PARTS = 64  # of a row, at most
_PROGRAMS = 4096  # about as many as keep an H200 busy, several on each of its 132 multiprocessors
_LOWEST = tl.constexpr(-3.0e38)  # instead of minus infinity, whose differences are NaN


@triton.jit
def _scaled(begin, at, vocabulary, temperature):
    return tl.load(begin + at, mask=at < vocabulary, other=float("-inf")) / temperature


@triton.jit
def _race(scaled, word, at, top, total, best, token):
    """A further logit per lane. The lowest of exponential variables with rates exp(scaled) wins, here as the largest inverse: the
    same as scaled plus Gumbel noise, and one logarithm less."""
    weight = tl.exp(scaled - top)
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = v * (1.0 + v * (0.5 + v * 0.3333333333333333))
    inverse = weight / tl.where(v < 0.01, small, -tl.log(1.0 - v))
    return total + weight, tl.maximum(best, inverse), tl.where(inverse > best, at, token)


@triton.jit(do_not_specialize=["temperatures", "parts"])  # one compilation for all batches
def _read(
    logits, temperatures, state, tops, sums, bests, tokens, row_stride, vocabulary, blocks, parts,
    LANES: tl.constexpr,
):  # fmt: skip
    """One part of one row: the largest scaled logit, and beside it the sum of weights, the winner and how far it won."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    seed, number = tl.load(state), tl.load(state + 1)
    lane = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.uint32)
    top = tl.full([LANES], _LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.float32)
    token = tl.zeros([LANES], tl.int32)
    begin = logits + row.to(tl.int64) * row_stride
    c1, c2, c3 = row.to(tl.uint32), (number & 0xFFFFFFFF).to(tl.uint32), (number >> 32).to(tl.uint32)
    for block in range(part * blocks // parts, (part + 1) * blocks // parts):
        at = block * (4 * LANES) + lane
        first = _scaled(begin, at, vocabulary, temperature)
        second = _scaled(begin, at + LANES, vocabulary, temperature)
        third = _scaled(begin, at + 2 * LANES, vocabulary, temperature)
        fourth = _scaled(begin, at + 3 * LANES, vocabulary, temperature)
        counter = (block * LANES + lane).to(tl.uint32)
        word0, word1, word2, word3 = tl.philox(seed, counter, zero + c1, zero + c2, zero + c3)
        larger = tl.maximum(top, tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth)))
        shrink = tl.exp(top - larger)
        top, total, best = larger, total * shrink, best * shrink
        total, best, token = _race(first, word0, at, top, total, best, token)
        total, best, token = _race(second, word1, at + LANES, top, total, best, token)
        total, best, token = _race(third, word2, at + 2 * LANES, top, total, best, token)
        total, best, token = _race(fourth, word3, at + 3 * LANES, top, total, best, token)
    largest = tl.max(top, axis=0)
    shrink = tl.exp(top - largest)
    best = best * shrink
    highest = tl.max(best, axis=0)
    out = row * parts + part
    tl.store(tops + out, largest)
    tl.store(sums + out, tl.sum(total * shrink, axis=0))
    tl.store(bests + out, highest)
    tl.store(tokens + out, tl.min(tl.where(best == highest, token, vocabulary - 1), axis=0))


@triton.jit(do_not_specialize=["temperatures", "parts"])
def _join(
    logits, temperatures, state, tops, sums, bests, tokens, drawn, logprobs, row_stride, vocabulary, parts,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One row: the winner among its parts, and its log-prob. The first row counts the draw."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < parts
    top = tl.load(tops + row * parts + part, mask=inside, other=_LOWEST)
    total = tl.load(sums + row * parts + part, mask=inside, other=0.0)
    best = tl.load(bests + row * parts + part, mask=inside, other=-1.0)
    token = tl.load(tokens + row * parts + part, mask=inside, other=0)
    largest = tl.max(top, axis=0)
    shrink = tl.exp(top - largest)
    best = best * shrink
    chosen = tl.min(tl.where(best == tl.max(best, axis=0), token, vocabulary - 1), axis=0)
    scaled = tl.load(logits + row.to(tl.int64) * row_stride + chosen) / tl.load(temperatures + row)
    logprob = scaled - largest - tl.log(tl.sum(total * shrink, axis=0))
    tl.store(drawn + row, chosen)
    tl.store(logprobs + row, tl.where(logprob == float("-inf"), -3.4028234663852886e38, logprob))
    if row == 0:
        tl.store(state + 1, tl.load(state + 1) + 1)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See draw_torch.Draw. Two kernels, no wait for the GPU."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, 4 * LANES)
    parts = min(PARTS, blocks, max(1, _PROGRAMS // rows))
    tops, sums, bests = (torch.empty(rows * parts, dtype=torch.float32, device=logits.device) for _ in range(3))
    tokens = torch.empty(rows * parts, dtype=torch.int32, device=logits.device)
    drawn = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    stride = logits.stride(0)
    _read[rows, parts](
        logits, temperatures, state, tops, sums, bests, tokens, stride, vocabulary, blocks, parts, LANES=LANES, num_warps=4
    )  # fmt: skip
    _join[(rows,)](
        logits, temperatures, state, tops, sums, bests, tokens, drawn, logprobs, stride, vocabulary, parts, PARTS=PARTS, num_warps=2
    )  # fmt: skip
    return drawn, logprobs
