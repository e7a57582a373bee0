"""Scripts that make the figures of the docs: README.md. `python -m scripts.bench` lists them."""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def command() -> str:
    """What this process was started with, as results tell it."""
    return " ".join(["python -m scripts.bench", Path(sys.argv[0]).stem, *sys.argv[1:]])
