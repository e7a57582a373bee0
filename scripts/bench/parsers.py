"""What the parsers of model text cost at worst.

    python -m scripts.bench parsers [CHARACTERS]     100,000 by default

CPU milliseconds by reader over all texts of tests/hostile.py, and the text that cost them: a worker's loop stands for as long.
"""

from __future__ import annotations

import sys
import time

from tests.hostile import hostile, readers


def main(n: int) -> None:
    worst: dict[str, tuple[float, str]] = {}
    texts = list(hostile(n))
    for name, read in readers().items():
        for text_name, text in texts:
            began = time.process_time()
            read(text)
            worst[name] = max(worst.get(name, (0.0, "")), (time.process_time() - began, text_name))
    print(f"{len(texts)} texts of {n:,} characters, {len(worst)} readers")
    for name, (seconds, text_name) in sorted(worst.items(), key=lambda item: -item[1][0]):
        print(f"{seconds * 1e3:8.1f} ms  {name:50} {text_name}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
