"""`miles-async quickstart [--flag value ...]`: `miles-async train quickstart`, of the settings and data that ship."""

import argparse

from miles_async.cli import train

USAGE = """\
usage: miles-async quickstart [--flag value ...]

Train a tiny model on arithmetic, on two CPU cores in a minute or two. It is `miles-async train quickstart`, from any folder, and
takes the same flags. The run is written to runs/quickstart of the current folder; the same command again resumes it.
"""


def run(args: argparse.Namespace) -> int:
    """As `train` has it, but for its usage."""
    return train.run(args, USAGE)


def parse(words: list[str]) -> argparse.Namespace:
    """As `train` has it; --help TOPIC stays a topic."""
    return train.parse(words if {*train.HELP} & {*words} else ["quickstart", *words])
