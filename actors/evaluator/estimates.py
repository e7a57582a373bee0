"""What several samples of a prompt say about a policy (pure): pass@k, maj@k, and how sure a mean is.

A sample is right when its reward is at least 1. `rewards` and `answers` are lists by prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, sqrt

from actors.runtime.seeds import rng_for

RIGHT = 1.0
SUBSETS = 200  # drawn for maj@k where there are more
DRAWS = 1000
Z95 = 1.959964


def powers(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n}) if n > 0 else []


def pass_at(k: int, n: int, right: int) -> float:
    """Chance that one of k samples drawn from n, `right` of them right, is right: 1 - C(n - right, k) / C(n, k)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def majority(votes: Sequence[str], right: str) -> float:
    """Chance that the answer with the most votes is `right`, ties drawn by lot."""
    counts = Counter(votes)
    most = max(counts.values())
    first = [answer for answer, count in counts.items() if count == most]
    return float(right in first) / len(first)


def maj_at(k: int, votes: Sequence[str], right: str, seed: str) -> float:
    """Mean of `majority` over subsets of k votes: over all for k = n, else over SUBSETS drawn, which leaves it unbiased."""
    if k == len(votes):
        return majority(votes, right)
    rng = rng_for(0, "majority", seed, k)
    return sum(majority(rng.sample(list(votes), k), right) for _ in range(SUBSETS)) / SUBSETS


def at_k(rewards: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """pass@k and maj@k for k = 1, 2, 4, ..., n, means over prompts. Right answers count as one answer, however they are written;
    a sample without an answer votes for nobody else's. Empty with one sample a prompt."""
    n = min(map(len, rewards), default=0)
    if n < 2:
        return {}
    found: dict[str, float] = {}
    rights = [sum(reward >= RIGHT for reward in of) for of in rewards]
    votes = [
        ["right" if reward >= RIGHT else f"wrong {answer or i}" for i, (reward, answer) in enumerate(zip(of, said, strict=True))]
        for of, said in zip(rewards, answers, strict=True)
    ]
    for k in powers(n):
        found[f"pass@{k}"] = sum(pass_at(k, len(of), c) for of, c in zip(rewards, rights, strict=True)) / len(rewards)
        if k > 2:  # of two votes the first wins
            found[f"maj@{k}"] = sum(maj_at(k, of, "right", str(p)) for p, of in enumerate(votes)) / len(votes)
    return found


def interval(rewards: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % confidence interval of the mean over prompts. One sample a prompt, each 0 or 1: Wilson's. Else the percentile bootstrap
    over prompts (DRAWS, a fixed seed), since samples of one prompt are not independent."""
    import numpy as np  # the front door reads settings of this room, and needs no numpy for it

    means = np.array([sum(of) / len(of) for of in rewards if of], dtype=np.float64)
    n = len(means)
    if n == 0:
        return 0.0, 1.0
    if all(len(of) == 1 and of[0] in (0.0, 1.0) for of in rewards):
        p, z2 = float(means.mean()), Z95 * Z95
        middle, half = p + z2 / (2 * n), Z95 * sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)
    rng = np.random.default_rng(0)
    drawn = np.array([means[rng.integers(n, size=n)].mean() for _ in range(DRAWS)])
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)
