"""The draw of next tokens in plain torch (pure): what the kernels of draw_kernel.py do, number by number, and slowly.

Noise depends on the seed, the number of the draw, the row and the token alone. NaN among a row's logits makes its log-prob NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

LANES = 512
"""Token t takes word t // LANES % 4 of counter t // (4 * LANES) * LANES + t % LANES."""
_ROUNDS = 10  # of Philox, as in torch
_A, _B, _KEY_A, _KEY_B = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(logits [B, V] float32, temperatures [B, 1] float32, state [2] int64: seed and number of the draw) -> tokens [B] int32 and
their log-probs [B] float32. Counts the number of the draw up; leaves the logits as they are."""


def _philox(counters: Sequence[torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
    """Philox4x32 of four counter words in int64 (Salmon et al. 2011), each result below 2**32."""
    c0, c1, c2, c3 = counters
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        (high_a, low_a), (high_b, low_b) = _product(_A, c0), _product(_B, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _WORD, (k1 + _KEY_B) & _WORD
    return [c0, c1, c2, c3]


def _product(constant: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a product of 32-bit words, by halves: int64 does not hold it."""
    low, high = constant * (word & 0xFFFF), constant * (word >> 16)
    sum_of_low = (low & _WORD) + ((high & 0xFFFF) << 16)
    return (high >> 16) + (low >> 32) + (sum_of_low >> 32), sum_of_low & _WORD


def gumbel(rows: int, vocabulary: int, state: torch.Tensor) -> torch.Tensor:
    """Noise [rows, vocabulary], float32, of the draw that the state [2] is at, on its device."""
    device = state.device
    token = torch.arange(vocabulary, device=device)
    counter = token // (4 * LANES) * LANES + token % LANES
    row = torch.arange(rows, device=device)[:, None]
    number = state[1].expand(rows, 1)
    c0, c1, c2, c3 = torch.broadcast_tensors(counter, row, number & _WORD, (number >> 32) & _WORD)
    words = torch.stack(_philox((c0, c1, c2, c3), state[0]))
    return noise(words.gather(0, (token // LANES % 4).expand(1, rows, vocabulary))[0])


def noise(word: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of random words below 2**32: -log(-log(1 - v)) of v = (word + 0.5) / 2**32. Small v, which decide whether rare
    tokens are drawn, keep all their bits: 1 - v alone would make one number in 2**24 infinite."""
    v = ((word.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    small = v * (1 + v * (0.5 + v * (1 / 3)))
    return -torch.log(torch.where(v < 0.01, small, -torch.log(1 - v)))


def draw(logits: torch.Tensor, temperatures: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See Draw."""
    scaled = logits / temperatures
    tokens = (scaled + gumbel(logits.shape[0], logits.shape[1], state)).argmax(dim=-1, keepdim=True)
    logprobs = scaled.gather(1, tokens) - torch.logsumexp(scaled, dim=-1, keepdim=True)
    state[1] += 1
    return tokens.view(-1).to(torch.int32), logprobs.view(-1).clamp(min=torch.finfo(torch.float32).min)
