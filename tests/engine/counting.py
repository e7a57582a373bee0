"""An environment for tests; it loads nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any


class Counts:
    """Says its process, how often it was asked, and the sum; odd things by name."""

    def reset(self, task: dict[str, Any]) -> list[Any]:
        self.told, self.pid, self.task = 0, os.getpid(), task
        return ["begun", task["sample_id"]]

    async def step(self, action: Any) -> list[Any]:
        if action == "pid":
            return [self.pid, 0.0, False]
        if action == "hang":
            await asyncio.sleep(60)
        if action == "die":
            os._exit(3)
        if action == "flood":
            return ["x" * 200_000, 0.0, False]
        if action == "raise":
            raise ValueError("no such move")
        if action == "fork":
            return [os.system("true"), 0.0, False]  # noqa: ASYNC221 - it has this process for itself
        if action == "setsid":  # a helper that is to stay, as a browser's
            return [int(subprocess.check_output(["setsid", "sh", "-c", "sleep 900 >&- & echo $!"])), 0.0, False]  # noqa: ASYNC221
        if action == "cat":
            return [len(subprocess.check_output(["cat"])), 0.0, False]  # noqa: ASYNC221
        if action == "random":
            return [os.urandom(4), 0.0, False]
        self.told += int(action)
        return [self.told, 0.0, False]
