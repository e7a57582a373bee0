"""Files of an evaluation's samples, one for each data set and step: eval_samples/NAME_STEP.jsonl. Which file is whose (pure but for
looking into the folder).

A data set may have any name: what a file's name cannot hold stands in it as %XX.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "eval_samples"
_ODD = re.compile(r"[%/\x00-\x1f\x7f]")
_FILE = re.compile(r"(.*)_\d{7,}\.jsonl", re.DOTALL)


def file_of(run_dir: Path, name: str, step: int) -> Path:
    """Where the samples of a data set lie that were made at a step."""
    plain = _ODD.sub(lambda found: f"%{ord(found[0]):02x}", name)
    return run_dir / FOLDER / f"{plain}_{step:07d}.jsonl"


def kept_files(run_dir: Path) -> dict[str, list[Path]]:
    """All of them, by data set, those of a set by step."""
    found: dict[str, list[Path]] = {}
    for file in sorted((run_dir / FOLDER).glob("*_*.jsonl")):
        if match := _FILE.fullmatch(file.name):
            name = re.sub(r"%([0-9a-f]{2})", lambda one: chr(int(one[1], 16)), match[1])
            found.setdefault(name, []).append(file)
    return found
