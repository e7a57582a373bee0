"""Keys and values of the running rows.

One float32 tensor [layers, 2, rows, kv_heads, length, head_dim]; running requests occupy rows 0..n-1 without a gap, so
that a decode step reads a plain prefix of it. Always true: every element is finite (zero or once written), because
masked positions still enter a product with weight 0.
"""

from copy import copy

import torch
from torch import Tensor

from actors.generation.engines.embedded.config import ModelConfig


class KvCache:
    """Grows on demand up to `max_total_tokens` (rows x length); `fits` answers before `reserve` acts."""

    def __init__(self, config: ModelConfig, max_rows: int, max_total_tokens: int) -> None:
        self._config = config
        self._max_rows = max_rows
        self._max_total_tokens = max_total_tokens
        self.shrink()

    def fits(self, rows: int, length: int) -> bool:
        return rows * length <= self._max_total_tokens

    def reserve(self, rows: int, length: int, live: int) -> None:
        """Make room for `rows` x `length`, keeping the first `live` rows. The caller has asked `fits`."""
        if rows <= self.rows and length <= self.length:
            return
        old = self.data
        new_rows = max(rows, min(_power_of_two(rows), self._max_rows))
        new_length = max(self.length, _power_of_two(length))
        if new_rows * new_length > self._max_total_tokens:
            new_rows, new_length = rows, min(new_length, self._max_total_tokens // rows)
        kept = min(self.length, new_length)
        self._allocate(new_rows, new_length)
        self.data[:, :, :live, :, :kept].copy_(old[:, :, :live, :, :kept])

    def move(self, src: int, dst: int, length: int) -> None:
        """Row `src` takes the place of row `dst`."""
        self.data[:, :, dst, :, :length].copy_(self.data[:, :, src, :, :length])

    def permute(self, order: Tensor, length: int) -> None:
        """Row i becomes what row order[i] was (int64 [n])."""
        n = order.numel()
        self.data[:, :, :n, :, :length] = self.data[:, :, :n, :, :length].index_select(2, order)

    def clear(self) -> None:
        """Forget everything, so that values made by other weights can never be read."""
        self.data.zero_()

    def shrink(self) -> None:
        """Back to the smallest size, everything forgotten."""
        self._allocate(1, min(16, self._max_total_tokens))

    def _allocate(self, rows: int, length: int) -> None:
        c = self._config
        self._hold(torch.zeros(c.layers, 2, rows, c.kv_heads, length, c.head_dim))

    def row(self, i: int) -> "KvCache":
        """Row i alone, in the same memory."""
        one = copy(self)
        one._hold(self.data[:, :, i : i + 1])
        return one

    def _hold(self, data: Tensor) -> None:
        c, rows, length = self._config, data.shape[2], data.shape[4]
        self.data, self.rows, self.length = data, rows, length
        flat = self.data.view(c.layers, 2, rows * c.kv_heads, length, c.head_dim)
        self.keys = list(flat[:, 0])
        """Per layer [rows * kv_heads, length, head_dim]."""
        self.values = list(flat[:, 1])
        self.key_lines = [k.view(-1, c.head_dim) for k in self.keys]
        """Per layer [rows * kv_heads * length, head_dim]: one line per token and head."""
        self.value_lines = [v.view(-1, c.head_dim) for v in self.values]


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
