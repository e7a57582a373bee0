"""Every task by the name that `builtin:` gives its model. `python -m miles_async.quickstart.tasks` writes the shipped data anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from miles_async.quickstart import words
from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.columns import COLUMNS
from miles_async.quickstart.steps import STEPS
from miles_async.quickstart.task import Problem, Task

TASKS: Mapping[str, Task] = {task.name: task for task in (ARITHMETIC, COLUMNS, STEPS)}


def row_of(problem: Problem) -> dict[str, object]:
    """The string columns `prompt` and `label`."""
    return {"prompt": problem.prompt, "label": problem.label}


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """One object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")


def main() -> None:
    """Rewrite the shipped files of every task under `configs/data/` of the current directory."""
    for name, task in TASKS.items():
        _write(name, task.shipped(), row_of)
    _write("words", words.make_words(), words.row_of)


def _write(name: str, made: tuple[list[Problem], list[Problem]], row: Callable[[Problem], dict[str, object]]) -> None:
    for part, problems in zip(("train", "held_out"), made, strict=True):
        write_jsonl(Path(f"configs/data/{name}_{part}.jsonl"), map(row, problems))


if __name__ == "__main__":
    main()
