"""What newcomers' mistakes cost: processor seconds of `miles-async train` until it has told each.

    python -m scripts.bench mistakes [FILE.json]

The mistakes of tests/miles_async/mistakes.py, each in a process and a folder of its own; FILE gets the figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.miles_async.mistakes import MISTAKES, ask, make_folder

BAR_S = 1.0


def main(file: str = "") -> None:
    took: dict[str, float] = {}
    for words in MISTAKES:
        with TemporaryDirectory() as folder:
            found = ask(make_folder(Path(folder)), words)
        if found.status != 2:
            sys.exit(f"not refused: {words}: {found.errors}")
        took[words] = round(found.cpu_s, 2)
    for words, seconds in sorted(took.items(), key=lambda item: -item[1]):
        print(f"{seconds:6.2f} s  {words}")
    quick, middle = sum(s < BAR_S for s in took.values()), sorted(took.values())[len(took) // 2]
    print(f"{quick} of {len(took)} under {BAR_S:g} s; median {middle:.2f} s")
    if file:
        Path(file).write_text(json.dumps(took, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
