"""The shipped problems: writes the JSONL files in `configs/data/` (`python -m miles_async.quickstart.data`)."""

from __future__ import annotations

import json
from pathlib import Path

from miles_async.quickstart.task import Problem
from miles_async.quickstart.tasks import TASKS


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
