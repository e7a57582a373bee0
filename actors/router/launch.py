"""sglang-router's flags as we set them, and its start: `python -m actors.router.launch FLAGS` takes the key of its callers from the
environment, since as a flag every user of the host could read it."""

import os
import runpy
import sys

MODULE = "sglang_router.launch_router"
KEY = "MILES_ASYNC_ROUTER_KEY"
# Siblings of a group share their prompt, so they go to one engine; new groups go to the engine with the fewest requests.
DEFAULTS: dict[str, str | int] = {
    "policy": "manual",
    "assignment-mode": "min_load",
    "request-timeout-secs": 14400,
    "health-check-interval-secs": 5,
    "log-level": "warn",
}

if __name__ == "__main__":
    if key := os.environ.pop(KEY, ""):
        sys.argv += ["--api-key", key]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
