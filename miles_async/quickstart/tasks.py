"""Every task by the name that `builtin:` gives its model. `python -m miles_async.quickstart.tasks` writes the shipped data anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.columns import COLUMNS
from miles_async.quickstart.steps import STEPS
from miles_async.quickstart.task import Problem, Task

TASKS: Mapping[str, Task] = {task.name: task for task in (ARITHMETIC, COLUMNS, STEPS)}


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    """One object per line with the string columns `prompt` and `label`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for problem in problems:
            out.write(json.dumps({"prompt": problem.prompt, "label": problem.label}) + "\n")


def main() -> None:
    """Rewrite the shipped files of every task under `configs/data/` of the current directory."""
    for name, task in TASKS.items():
        train, held_out = task.shipped()
        write_jsonl(Path(f"configs/data/{name}_train.jsonl"), train)
        write_jsonl(Path(f"configs/data/{name}_held_out.jsonl"), held_out)


if __name__ == "__main__":
    main()
