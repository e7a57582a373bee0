"""The only source of randomness (pure): a seed follows from the run's seed and a stable id, never from arrival order."""

from __future__ import annotations

import hashlib
import random


def seed_for(run_seed: int, *stable_id: object) -> int:
    """A 63-bit seed for one decision."""
    text = "/".join(map(str, (run_seed, *stable_id)))
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1


def rng_for(run_seed: int, *stable_id: object) -> random.Random:
    """A generator of its own for one decision."""
    return random.Random(seed_for(run_seed, *stable_id))
