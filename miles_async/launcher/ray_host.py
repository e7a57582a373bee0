"""What stands on a node of a Ray cluster for a run: an actor of Ray's that starts, watches and ends processes of the run there.

It knows nothing of the run: its truth is on the bus. Always true: a process that it started ends with it, so that a node which Ray
has given up keeps none. One that has had no process for IDLE_S gives its place back: its launcher is gone.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from actors.runtime.child import PYTHON, Child, free_port, log_tail
from actors.runtime.in_memory import let_go
from actors.runtime.logfiles import all_short
from bus.private import private_directory, write_secret
from miles_async import __version__
from miles_async.settings.checks import not_writable

IDLE_S = 120.0
LOOK_S = 10.0
LINES = 40


class Host:
    """Made by Ray (`ray.remote(Host)`). What is passed in and out is plain data."""

    def __init__(self, folder: str) -> None:
        """`folder`: the launcher's current one, where relative paths of the run start."""
        if Path(folder).is_dir():
            os.chdir(folder)
        self._children: dict[str, tuple[Child, str]] = {}  # with the mark of what it was started for
        self._logs: dict[str, Path] = {}
        self._busy_at = time.monotonic()
        self._group: Any = None  # where this is

    async def hello(self, run_dir: str, proof: str, folders: Sequence[str]) -> dict[str, Any]:
        """Where this is. `proof`: what file `engine.token` in the run's folder holds, for `shared`: this node sees that folder.
        `folders`: that are to be written here; `barred` says why some cannot be."""
        if self._group is None:
            self._group = ray.util.get_current_placement_group()
            self._look()
        context = ray.get_runtime_context()
        try:
            shared = (Path(run_dir) / "engine.token").read_text().strip() == proof
        except OSError:
            shared = False
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
            "release": __version__,
            "shared": shared,
            "barred": {folder: why for folder in folders if (why := not_writable(Path(folder)))},
        }

    def port(self) -> int:
        """One that is free here."""
        return free_port()

    async def start(
        self,
        name: str,
        mark: str,
        words: Sequence[str],
        files: Mapping[str, str],
        folders: Sequence[str],
        environment: Mapping[str, str],
        patience_s: float,
    ) -> tuple[str, int]:
        """Run a module of ours, `words`, with `files` (path -> text) and private `folders` there before. (started, adopted or
        replaced; pid): adopted is what runs already under the same mark, replaced what ran under another."""
        known, how = self._children.get(name), "started"
        if known is not None and known[0].alive:
            if known[1] == mark:
                return "adopted", known[0].pid
            await known[0].stop(patience_s)
            how = "replaced"
        for folder in folders:
            private_directory(Path(folder))
        for file, text in files.items():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            write_secret(Path(file), text)
        run_dir = Path(next(iter(files))).parents[1]
        log = self._logs[name] = run_dir / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        child = Child()
        await child.start((*PYTHON, *words), log, {**os.environ, **environment}, append=True)
        self._children[name] = child, mark
        return how, child.pid

    async def wait(self, name: str) -> tuple[int | None, list[str]]:
        """Until it ends: its exit status and the last lines of its log."""
        if name not in self._children:
            return None, []
        code = await self._children[name][0].wait()
        return code, log_tail(self._logs[name])[-LINES:]

    async def end(self, name: str, patience_s: float) -> bool:
        """SIGTERM, and SIGKILL when it does not obey in time: False then. Negative: SIGTERM alone."""
        child = self._children[name][0] if name in self._children else Child()
        if patience_s < 0:
            child.ask_to_end()
            return True
        return await child.stop(patience_s)

    def clear(self, folder: str) -> None:
        """Take away what the run left in this node's memory."""
        shutil.rmtree(folder, ignore_errors=True)
        let_go(Path(folder).parent)

    def names(self) -> list[str]:
        """Of what runs here."""
        return [name for name, (child, _) in self._children.items() if child.alive]

    def _look(self) -> None:
        """At times: is it still wanted?"""
        if self.names():
            self._busy_at = time.monotonic()
        if time.monotonic() - self._busy_at > IDLE_S:
            ray.util.remove_placement_group(self._group)  # which ends this process too
        for folder in {log.parents[1] for log in self._logs.values()}:
            all_short(folder)
        asyncio.get_running_loop().call_later(LOOK_S, self._look)
