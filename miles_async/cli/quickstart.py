"""`miles-async quickstart [--flag value ...]`: `miles-async train quickstart`, of the settings and data that ship."""

import argparse

from miles_async.cli import train

run = train.run


def parse(words: list[str]) -> argparse.Namespace:
    """As `train` has it; --help TOPIC stays a topic."""
    return train.parse(words if {*train.HELP} & {*words} else ["quickstart", *words])
