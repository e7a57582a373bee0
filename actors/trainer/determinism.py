"""`--debug-determinism`: what went into each training step and what came out, as hashes; two runs that should be alike differ at
the first line that differs. `diff` of two files shows it: no line has a time.

Owns  determinism.jsonl in the run's folder, one line a step; a step that is done again after a restore has another line
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import xxhash

from bus.messages.groups import GroupKept

FILE = "determinism.jsonl"
NUMBERS = ("train/loss", "train/grad_norm")


def step_line(step: int, groups: Iterable[GroupKept], seed: int, metrics: Mapping[str, float], weights: str) -> dict[str, object]:
    """(pure) `samples`, `tokens`, `masks`, `logprobs`, `rewards` of the batch in training order, each as a hash, so that one sees
    which of them is another; `weights` after the step; numbers to the last bit, as hexadecimal floats."""
    hashes = {name: xxhash.xxh3_64() for name in ("samples", "tokens", "masks", "logprobs", "rewards")}
    for scored in (scored for group in groups for scored in group.samples):
        hashes["samples"].update(f"{scored.sample_id}\n".encode())
        hashes["rewards"].update(float(scored.reward).hex().encode())
        for strand in scored.rollout.strands:
            hashes["tokens"].update(bytes(strand.prompt_tokens) + b"|" + bytes(strand.response.tokens) + b"\n")
            hashes["masks"].update(bytes(strand.response.loss_mask) + b"\n")
            hashes["logprobs"].update(bytes(strand.response.logprobs) + b"\n")
    numbers = {name.removeprefix("train/"): float(metrics[name]).hex() for name in NUMBERS if name in metrics}
    return {
        "step": step,
        "seed": seed,
        **{name: h.hexdigest() for name, h in hashes.items()},
        **numbers,
        "weights": weights,
    }


def write_line(run_dir: Path, line: Mapping[str, object]) -> None:
    """Add one."""
    with (run_dir / FILE).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
