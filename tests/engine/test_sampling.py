"""The draw of a token, without a model."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.generation.engines.embedded.sampling import ALL_TOKENS, sample, uniforms


def draw(logits: torch.Tensor, seeds: np.ndarray, *, position: int = 0, k: int = ALL_TOKENS, p: float = 1.0) -> list[int]:
    n = logits.shape[0]
    cut = list(range(n)) if k < ALL_TOKENS or p < 1 else []
    positions = np.full(n, position, np.int64)
    tokens, _ = sample(
        logits.clone(),
        torch.ones(n),
        uniforms(seeds.astype(np.uint64), positions),
        [],
        cut,
        np.full(n, k, np.int64),
        np.full(n, p, np.float32),
    )
    return tokens.tolist()


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20), st.integers(0, 2**31))
def test_a_draw_is_in_range_and_its_own_rows_alone(seeds: list[int], position: int) -> None:
    all_seeds = np.array(seeds, np.uint64)
    together = uniforms(all_seeds, np.full(len(seeds), position, np.int64))
    assert ((together >= 0) & (together < 1)).all()
    for i in range(len(seeds)):
        alone = uniforms(all_seeds[i : i + 1], np.array([position], np.int64))
        assert alone[0] == together[i]


def test_draws_spread_evenly_over_seeds_and_over_positions() -> None:
    n = 20_000
    by_seed = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
    by_position = uniforms(np.zeros(n, np.uint64), np.arange(n, dtype=np.int64))
    for draws in (by_seed, by_position):
        counts, _ = np.histogram(draws, bins=20, range=(0, 1))
        assert abs(counts / n - 0.05).max() < 0.01
    assert abs(np.corrcoef(by_seed[:-1], by_seed[1:])[0, 1]) < 0.03


def test_tokens_come_up_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, float("-inf")])
    n = 20_000
    counts = Counter(draw(logits.repeat(n, 1), np.arange(n)))
    share = torch.tensor([counts[i] / n for i in range(5)])
    torch.testing.assert_close(share, torch.softmax(logits, -1), atol=0.012, rtol=0)
    assert counts[4] == 0


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.05, 1.0))
def test_a_cut_keeps_the_likeliest_tokens_and_always_one(seed: int, k: int, p: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed))
    probs, order = torch.sort(torch.softmax(logits[0], -1), descending=True, stable=True)
    before = probs.cumsum(-1) - probs
    allowed = {int(t) for rank, t in enumerate(order) if rank < k and float(before[rank]) <= p + 1e-6}
    tokens = draw(logits.repeat(50, 1), np.arange(50), k=k, p=p)
    assert set(tokens) <= allowed


def test_a_sure_token_is_drawn_by_every_seed_and_position() -> None:
    logits = torch.full((64, 9), float("-inf"))
    logits[:, 8] = 0.0
    for position in (0, 5, 4095):
        assert draw(logits, np.arange(64), position=position) == [8] * 64
