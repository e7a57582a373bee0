"""The library in Python: start runs, and open them while they go on and after; for notebooks and programs.

Everything here blocks and may be called inside a running event loop. Errors are those of the command line, one line each.
"""

from miles_async.api.opened import Knobs, Run, open_run, runs
from miles_async.api.started import RunEnded, StartedRun, run

__all__ = ["Knobs", "Run", "RunEnded", "StartedRun", "open_run", "run", "runs"]
