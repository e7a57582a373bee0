"""What a rule says, and the names of all rules. docs/troubleshooting.md has a row for each name."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["error", "warning", "info"]
Rule = Literal[
    # rooms and hosts
    "nobody there", "no actor", "no launcher", "actor failed", "gone", "silent actor", "stopped process", "crash loop",
    "stalled", "long wait", "clock", "slow link", "release", "disk", "host memory",
    # streams and the server
    "role", "eviction", "memory", "append-only file", "snapshot", "persistence", "stream gone", "full stream",
    "abandoned entry", "ledger", "incomplete group", "dead letters",
    # engines and versions
    "engine silent", "engine failing", "weights refused", "stale worker", "slow weights", "slow engine",
    # the flow of samples
    "filter starving", "slow rewards", "checkpoint failed", "evaluation stuck", "idle trainer", "endless step", "governor",
    # learning
    "self-check", "log-probs differ", "gradient", "GPU memory", "reward falls", "entropy collapsed", "entropy grows", "ESS falls",
    "answers cut", "answers empty", "answers shrink", "length bias",
]  # fmt: skip
BRIEF_S = 5.0  # shorter than this is the ordinary course of things
PATIENCE_S = 60.0  # a wait that should be short is a fault after this


class Finding(msgspec.Struct, frozen=True):
    """One sentence, what it is about, and for how long it has been so (seconds, 0 = unknown)."""

    level: Level
    rule: Rule
    about: str
    text: str
    since_s: float = 0.0
