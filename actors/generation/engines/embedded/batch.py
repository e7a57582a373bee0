"""The running batch: which request sits in which row, and one model step over all rows.

Rows 0..n-1 are taken without a gap. Row state lives in numpy arrays that torch reads in place. The cache always holds
keys and values of every token of a row but its last one, which the next decode step feeds in.
"""

import numpy as np
import torch

from actors.generation.engines.embedded.decoders import Decodes
from actors.generation.engines.embedded.model import BLOCK_ROWS
from actors.generation.engines.embedded.pictures import View
from actors.generation.engines.embedded.request import Request
from actors.generation.engines.embedded.sampling import sample, uniforms

SORT_EVERY_STEPS = 32
SORT_GAIN = 1.5
"""Rows are sorted by length when that shrinks the attended keys by this factor; it costs one copy of the cache."""

PREFILL_TOKENS = 8192
"""Padded prompt tokens of one forward pass, unless a single prompt is longer."""


class Batch:
    def __init__(self, decoder: Decodes, max_rows: int, max_total_tokens: int) -> None:
        self.decoder = decoder
        self.cache = decoder.cache(max_rows, max_total_tokens)
        self.max_rows = max_rows
        self._prefill_tokens = 0 if decoder.repeatable else PREFILL_TOKENS
        self.requests: list[Request] = []
        self._lengths = np.zeros(max_rows, np.int64)
        """Index of each row's last token in its sequence: what the cache holds, and where the next key goes."""
        self._last = np.zeros(max_rows, np.int64)
        self._seeds = np.zeros(max_rows, np.uint64)
        self._temperatures = np.ones(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float32)
        self._back = np.zeros(max_rows, np.int64)
        """How far each row's rotary positions lie before its tokens' indexes: pictures have fewer of them than tokens."""
        self._steps = 0

    def longest(self) -> int:
        """Tokens of the longest row, 0 when empty."""
        n = len(self.requests)
        return int(self._lengths[:n].max()) + 1 if n else 0

    def prefill(self, joining: list[Request]) -> list[Request]:
        """Compute each request's prompt and what it has made so far, sample its next token, give it a row.

        Returns those that ended with this token; they take no row. Equal prompts (siblings of one group) are computed
        once.
        """
        ended = []
        order = sorted(joining, key=lambda r: r.length)
        while order:
            width = order[-1].length
            part: list[tuple[Request, int]] = []
            distinct: dict[tuple[bytes, tuple[int, ...]], int] = {}
            views: list[View | None] = []
            # From the longest down: padded to its length, at most doubling the work, within the token budget.
            while order and (not part or 2 * order[-1].length > width):
                view = order[-1].view
                key = view.digest if view else b"", tuple(order[-1].prompt + order[-1].tokens)
                if key not in distinct and (len(distinct) + 1) * width > self._prefill_tokens and part:
                    break
                if key not in distinct:
                    views.append(view)
                part.append((order.pop(), distinct.setdefault(key, len(distinct))))
            prompts = [tokens for _, tokens in distinct]
            ended += self._prefill_part([r for r, _ in part], prompts, torch.tensor([s for _, s in part]), views)
        return ended

    def _prefill_part(
        self, joining: list[Request], distinct: list[tuple[int, ...]], source: torch.Tensor, views: list[View | None]
    ) -> list[Request]:
        first = len(self.requests)
        width = max(map(len, distinct))
        prompts = torch.tensor([seq + (0,) * (width - len(seq)) for seq in distinct])
        self.cache.reserve(first + len(joining), max(width + 1, self.longest()), first)
        lengths = torch.tensor([len(seq) for seq in distinct])
        logits = self.decoder.prefill(prompts, lengths, source, self.cache, first, views if any(views) else ())
        if self.decoder.chosen is not None:
            chosen = self.decoder.chosen.view(len(distinct), width, -1)
            for request, which in zip(joining, source.tolist(), strict=True):
                request.routed(chosen[which, : request.length])
        for row, request in enumerate(joining, first):
            self._lengths[row] = request.length
            self._seeds[row] = request.draws_from
            self._temperatures[row] = request.temperature
            self._top_k[row] = request.top_k
            self._top_p[row] = request.top_p
            self._back[row] = request.view.back if request.view else 0
        self.requests += joining
        return self._finish_step(logits, first)

    def decode(self) -> list[Request]:
        """One token for every row; returns the requests that ended with it, already without a row."""
        n = len(self.requests)
        self._steps += 1
        if self._steps % SORT_EVERY_STEPS == 0 and n > BLOCK_ROWS:
            self._sort()
        lengths = self._lengths[:n]
        windows = [int(lengths[a : a + BLOCK_ROWS].max()) + 1 for a in range(0, n, BLOCK_ROWS)]
        self.cache.reserve(n, max(windows), n)
        tokens, positions = torch.from_numpy(self._last[:n]), torch.from_numpy(lengths)
        back = torch.from_numpy(self._back[:n]) if self._back[:n].any() else None
        logits = self.decoder.decode(tokens, positions, windows, self.cache, back)
        if self.decoder.chosen is not None:
            for request, row in zip(self.requests, self.decoder.chosen.view(n, 1, -1), strict=True):
                request.routed(row)
        lengths += 1
        return self._finish_step(logits, 0)

    def remove(self, request: Request) -> None:
        self._drop_row(self.requests.index(request))

    def clear(self) -> list[Request]:
        """Every request leaves, in row order; keys and values are forgotten."""
        out, self.requests = self.requests, []
        self.cache.clear()
        return out

    def _finish_step(self, logits: torch.Tensor, first: int) -> list[Request]:
        """Sample the next token of rows first..n-1 (logits [n - first, vocab]), hand it to the requests, drop ended
        rows."""
        rows = slice(first, len(self.requests))
        requests = self.requests[first:]
        tokens, logprobs = sample(
            logits,
            torch.from_numpy(self._temperatures[rows]),
            uniforms(self._seeds[rows], self._lengths[rows]),
            [i for i, r in enumerate(requests) if r.greedy],
            [i for i, r in enumerate(requests) if r.cut],
            self._top_k[rows],
            self._top_p[rows],
        )
        self._last[rows] = tokens.numpy()
        ended = [
            (row, request)
            for row, (request, token, logprob) in enumerate(zip(requests, tokens.tolist(), logprobs.tolist(), strict=True), first)
            if request.append(token, logprob)
        ]
        for row, _ in reversed(ended):
            self._drop_row(row)
        return [request for _, request in ended]

    def _drop_row(self, row: int) -> None:
        """The last row moves into the hole."""
        last = len(self.requests) - 1
        if row != last:
            self.cache.move(last, row, int(self._lengths[last]))
            self.requests[row] = self.requests[last]
            for column in self._columns():
                column[row] = column[last]
        self.requests.pop()

    def _sort(self) -> None:
        """Longest rows first, so that blocks of rows have like lengths."""
        n = len(self.requests)
        order = np.argsort(-self._lengths[:n], kind="stable")
        lengths = self._lengths[:n]
        now = sum(int(lengths[a : a + BLOCK_ROWS].max()) for a in range(0, n, BLOCK_ROWS))
        best = int(lengths[order[::BLOCK_ROWS]].sum())
        if now < SORT_GAIN * best:
            return
        self.cache.permute(torch.from_numpy(order), self.longest())
        self.requests = [self.requests[i] for i in order]
        for column in self._columns():
            column[:n] = column[order]

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (self._lengths, self._last, self._seeds, self._temperatures, self._top_k, self._top_p, self._back)
