"""runs/<name>/samples.jsonl: what the policy writes, whole groups as text, a few at each look. Bounded: the older half goes.

A line is one sample as `actors.runtime.readable` writes it, with the `step` at which it was looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.recorder.file import append_lines, objects
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
    append_lines(run_dir / FILE, samples, older=run_dir / OLDER, most_bytes=MOST_BYTES)


def read_samples(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """All samples of these files, in order."""
    for file in filter(Path.is_file, files):
        with file.open("rb") as opened:
            yield from (sample for sample in objects(opened) if {"sample", "step", "reward"} <= sample.keys())
