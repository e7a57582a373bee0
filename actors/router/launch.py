"""`python -m actors.router.launch FLAGS` is sglang-router with the key of its callers taken from the environment: as a flag every
user of the host could read it."""

import os
import runpy
import sys

from actors.router.args import KEY, MODULE

if __name__ == "__main__":
    if key := os.environ.pop(KEY, ""):
        sys.argv += ["--api-key", key]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
