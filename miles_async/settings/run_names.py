"""The name of a run that was given none."""

import re
from datetime import datetime
from pathlib import Path

LONGEST = 64  # as RUN_NAME in rules.py has it
_STAMP = "%Y%m%d-%H%M%S"


def fresh_name(model: str, runs_dir: str, now: datetime | None = None) -> str:
    """Model, date and time of this host, in letters that a run's name may have; counted on where `runs_dir` has that one already.

    >>> fresh_name("Qwen/Qwen3-0.6B", "runs", datetime(2026, 10, 28, 8, 11, 48))
    'Qwen3-0.6B-20261028-081148'
    """
    stamp = (now or datetime.now()).strftime(_STAMP)
    last = re.split(r"[/:]", model.rstrip("/"))[-1]
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("._-") or "run"
    first = f"{plain[: LONGEST - len(stamp) - 5].rstrip('._-')}-{stamp}"
    name, number = first, 1
    while _taken(Path(runs_dir) / name):
        number += 1
        name = f"{first}-{number}"
    return name


def _taken(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:  # a folder that we may not enter is refused by its own name
        return False
