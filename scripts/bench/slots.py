"""Slots that are found by themselves within a masked share, beside fixed ones: whole runs in simulated time, the rooms' own code.

    python -m scripts.bench slots --out docs/measurements/slots.json

Geometric lengths (mean 690 tokens, cut at 2,048), 32 groups of 8, a step of training 1.9 s, one engine of at most 384 slots whose
requests take 2 ms a token alone and 31 us more for each one beside it (about an H100 with a model of 0.6B). `early`: 18 steps after
the run's first 6, of more seeds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from actors.generation.slots import Limits
from actors.runtime.seeds import rng_for
from miles_async.console.whatif.outcome import SimulatedOutcome
from miles_async.console.whatif.setup import Draw, DrawnGroup, SimulatedKnobs, SimulatedPace
from miles_async.console.whatif.simulation import Simulation
from scripts.bench import command

MOST, TOKEN_S, SLOWED_S = 384, 0.002, 31e-6
PACE = SimulatedPace(train_s=1.9, publish_s=(0.1,), between_s=(0.02,), hop_s=0.005, slowdown=SLOWED_S / TOKEN_S)
FIXED, ALLOWED = (160, 176, 192, 216, 256, 384), ((1, 0.015), (2, 0.005), (2, 0.015), (2, 0.05), (4, 0.015), (4, 0.025))


def groups(chance: random.Random) -> Iterator[DrawnGroup]:
    while True:
        tokens = [min(2048, 1 + int(chance.expovariate(1 / 690))) for _ in range(8)]
        yield DrawnGroup(tuple(Draw(n, TOKEN_S * n) for n in tokens))


def play(bound: int, slots: int, auto: Limits | None, steps: int, warm: int, seeds: int) -> dict[str, float]:
    """Means over the seeds."""
    knobs = SimulatedKnobs(
        max_weight_staleness=bound, staleness_policy="split", rollout_batch_size=32, n_samples_per_prompt=8, slots=slots, auto=auto,
    )  # fmt: skip
    found: list[SimulatedOutcome] = []
    for seed in range(seeds):
        chance = rng_for(seed, "slots")
        found.append(Simulation(knobs, PACE, groups(chance), chance).play(steps, warm))
    return {
        "step_s": round(fmean(o.step_s for o in found), 3),
        "masked": round(fmean(o.masked for o in found), 5),
        "masked_most": round(max(o.masked for o in found), 5),
        "slots": round(fmean(o.slots for o in found), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=10, help="steps before them that do not count")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    long = (args.steps, args.warm, args.seeds)
    for bound in sorted({bound for bound, _ in ALLOWED}):
        rows += [{"bound": bound, "fixed": slots, **play(bound, slots, None, *long)} for slots in FIXED]
        for allowed in (a for b, a in ALLOWED if b == bound):
            auto = Limits.of(8, (MOST,), allowed, bound, 1)
            found = play(bound, auto.first, auto, *long)
            early = play(bound, auto.first, auto, 18, 6, 3 * args.seeds)
            rows.append({"bound": bound, "allowed": allowed, **found, "early": early})
        print("\n".join(json.dumps(row) for row in rows if row["bound"] == bound), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"command": command(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
