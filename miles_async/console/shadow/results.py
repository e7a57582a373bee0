"""runs/<name>/shadow-<label>.jsonl: a line for each thing compared, and lines of kind `summary`, of which the last one counts.

Owns  that file: one shadow at a time writes it, and begins it anew.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from bus.errors import UNREADABLE, printable
from miles_async.console.text import plural
from miles_async.settings.errors import SettingsError, refusal

PREFIX = "shadow-"
TAIL_BYTES = 1 << 16  # of a file, in which its last summary lies


class Results:
    """The file of one shadow. Use as `with`."""

    def __init__(self, run_dir: Path, label: str) -> None:
        self.path = run_dir / f"{PREFIX}{label}.jsonl"
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise SettingsError(f"cannot write {self.path}: {(error.strerror or str(error)).lower()}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise refusal("label", label, f"another shadow writes {self.path}", "Choose another.") from None
        self._file.truncate(0)

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Whole lines."""
        self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def last_summary(path: Path) -> dict[str, Any] | None:
    """The newest summary in a file; None while there is none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            found = msgspec.json.decode(line)
        except UNREADABLE:
            continue
        if isinstance(found, dict) and found.get("kind") == "summary":
            return found
    return None


def notes(run_dir: Path) -> list[str]:
    """A line for each shadow of a run, for its report."""
    found = [(path, last_summary(path)) for path in sorted(run_dir.glob(f"{PREFIX}*.jsonl"))]
    return [f"Shadow {' '.join(as_text(summary))}" for _, summary in found if summary is not None and summary.get("groups")]


def as_text(summary: Mapping[str, Any]) -> list[str]:
    """A summary in a few lines."""
    s = summary
    lines = [f"{s['what']} {s['label']}, {s['source']}: {plural(s['groups'], s['unit'])}, {plural(s['pairs'], 'pair')}."]
    if s["groups"]:
        sure = "no interval yet" if s["low"] is None else f"95 %: {s['low']:+.4g} to {s['high']:+.4g}"
        lines.append(f"run {s['run']:.4g}, shadow {s['shadow']:.4g}, difference {s['difference']:+.4g} ({sure}).")
    if "kept" in s:
        lines.append(f"groups kept {', '.join(f'{who} {n}' for who, n in s['kept'].items())}.")
        lines += [f"they differ at {', '.join(s['differ'])}{' ...' if len(s['differ']) >= 8 else ''}."] if s["differ"] else []
    if "equal" in s and s["pairs"]:
        lines.append(f"{s['equal']} of {plural(s['pairs'], 'pair')} equal.")
    for name, (mean, shadow, half) in s.get("metrics", {}).items():
        lines.append(f"{name}: run {mean:.4g}, shadow {shadow:.4g}, difference {shadow - mean:+.3g} ± {half:.2g}.")
    for what, unit in (("missed", s["unit"]), ("left out", "sample" if s["what"] == "reward" else s["unit"])):
        if counts := {why: n for why, n in s[what.replace(" ", "_")].items() if n}:
            share = f" ({sum(counts.values()) / (s['groups'] + sum(counts.values())):.1%})" if what == "missed" else ""
            reasons = ", ".join(f"{why} {n}" for why, n in counts.items())
            lines.append(f"{what}: {plural(sum(counts.values()), unit)}{share}: {reasons}.")
    if s["error"]:
        lines.append(f"It ended: {s['error']}")
    return [printable(line) for line in lines]
