"""Fully asynchronous RL post-training: long-lived actors that meet only on Redis streams.

`run(...)` and `open_run(...)` are the library in Python (docs/python.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_async.api import Knobs, Run, RunEnded, StartedRun, open_run, run, runs
    from miles_async.settings.errors import SettingsError

__version__ = "0.1.0"
__all__ = ["Knobs", "Run", "RunEnded", "SettingsError", "StartedRun", "open_run", "run", "runs"]


_HOMES = {"SettingsError": "miles_async.settings.errors"}


def __getattr__(name: str) -> Any:
    """The library is loaded when it is asked for: the command line starts without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "miles_async.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
