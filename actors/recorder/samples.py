"""runs/<name>/samples.jsonl: what the policy writes, whole groups as text, a few at each look. Bounded: the older half goes.

A line is one sample as `actors.runtime.readable` writes it, with the `step` at which it was looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bus import Entry

FILE, OLDER = "samples.jsonl", "samples.1.jsonl"
MOST_BYTES = 64 << 20  # of each of the two files
GROUPS_A_LOOK = 4
TEXT_CHARS = 20_000  # of a prompt or a response


def chosen(entries: Sequence[Entry], trained: Collection[str]) -> list[Entry]:
    """At most GROUPS_A_LOOK of kept groups (newest first), spread over those that the last step trained, else over all."""
    found = [entry for entry in entries if entry.fields.get("group") in trained] or [e for e in entries if e.fields.get("group")]
    return found[:: max(1, -(-len(found) // GROUPS_A_LOOK))][:GROUPS_A_LOOK]


def append(run_dir: Path, samples: Iterable[dict[str, Any]]) -> None:
    """Write whole lines; what is full becomes the older file, in place of the one before."""
    file = run_dir / FILE
    if file.exists() and file.stat().st_size > MOST_BYTES:
        file.replace(run_dir / OLDER)
    with file.open("ab") as opened:
        opened.write(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))


def read_samples(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """All samples of these files, in order; a line that is none (cut short by a crash) is left out."""
    for file in files:
        if not file.is_file():
            continue
        with file.open("rb") as opened:
            for line in opened:
                try:
                    sample = msgspec.json.decode(line)
                except msgspec.DecodeError:
                    continue
                if isinstance(sample, dict) and {"sample", "step", "reward"} <= sample.keys():
                    yield sample
