"""What the policy wrote, as the report shows it: samples of the whole run in a bounded number of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.samples import FILE, OLDER, read_samples
from actors.runtime.readable import bounded

TEXT_CHARS = 3_000  # of a prompt, a response or a turn
SHOWN_SAMPLE = (*("sample", "step", "reward", "rewards", "label", "version", "tokens", "finish", "prompt", "response", "turns"),)


def samples_of(run_dir: Path, news: Sequence[Mapping[str, Any]], n_bytes: int) -> list[dict[str, Any]]:
    """What the policy wrote, in at most about so many bytes: looks (steps at which samples were kept) spread over the run, the
    newest among them. `news`: those on the record."""
    looks: dict[int, list[dict[str, Any]]] = {}
    for sample in _kept(run_dir, news):
        looks.setdefault(int(sample["step"]), []).append(sample)
    sizes = {step: len(msgspec.json.encode(found)) for step, found in looks.items()}
    every, newest_first = 1, sorted(looks, reverse=True)
    while every < len(looks) and sum(sizes[step] for step in newest_first[::every]) > n_bytes:
        every += 1
    chosen, left = [], n_bytes
    for step in newest_first[::every]:
        for sample in looks[step]:
            left -= len(msgspec.json.encode(sample))
            if left >= 0:
                chosen.append(sample)
    return chosen


def _kept(run_dir: Path, news: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those of the files of samples; of a run without, those that were news. What is none of ours is left out."""
    found = False
    for source in (read_samples((run_dir / OLDER, run_dir / FILE)), news):
        for sample in () if found and source is news else source:
            try:
                yield _bounded(sample)
                found = True
            except (KeyError, TypeError, ValueError, AttributeError):
                continue


def _bounded(sample: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: sample[name] for name in SHOWN_SAMPLE if name in sample}
    shown |= {"step": int(sample["step"]), "reward": float(sample["reward"]), "tokens": int(sample.get("tokens", 0))}
    shown["rewards"] = {str(name): float(value) for name, value in sample.get("rewards", {}).items()}
    for name in ("label", "prompt", "response"):
        shown[name] = bounded(str(shown.get(name, "")), TEXT_CHARS)
    if isinstance(shown.get("turns"), list):
        said = [turn for turn in shown["turns"] if isinstance(turn, dict)]
        shown["turns"] = [{"by": str(t.get("by", "")), "text": bounded(str(t.get("text", "")), TEXT_CHARS)} for t in said]
        shown.pop("response")  # it is the turns together
    return shown
