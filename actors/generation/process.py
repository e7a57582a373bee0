"""An engine server as a child of its worker: started on a port it chooses itself, watched, ended with the worker."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from pathlib import Path

from actors.generation.engine import EngineUnavailable
from actors.runtime.deadline import deadline
from bus.errors import DeadlineExceeded

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: end when the worker dies, also by SIGKILL (Linux; elsewhere the drain must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class EngineProcess:
    """One embedded engine. `start` may be called again after `stop` or after the child died."""

    def __init__(self, *, model_path: str, folder: Path, threads: int, max_running: int, boot_deadline_s: float) -> None:
        self._model_path = model_path
        self._folder = folder
        self._threads = threads
        self._max_running = max_running
        self._boot_deadline_s = boot_deadline_s
        self._child: asyncio.subprocess.Process | None = None
        self.boots = 0

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def start(self) -> str:
        """Boot and return the base URL once the server listens; EngineUnavailable names the log's last line."""
        await self.stop()
        self.boots += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        port_file = self._folder / f"port.{self.boots}"
        port_file.unlink(missing_ok=True)
        log = self._folder / f"engine.{self.boots}.log"
        argv = [
            *(sys.executable, "-m", "actors.generation.embedded"),
            *("--model-path", self._model_path, "--host", "127.0.0.1", "--port", "0"),
            *("--port-file", str(port_file), "--threads", str(self._threads)),
            *("--max-running-requests", str(self._max_running)),
        ]
        with log.open("wb") as out:
            self._child = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=_die_with_parent
            )
        try:
            async with deadline(self._boot_deadline_s, f"boot of the embedded engine (log: {log})"):
                while not (port_file.exists() and port_file.read_text().strip()):
                    if not self.alive:
                        raise EngineUnavailable(f"embedded engine ended at boot with {self._why(log)}")
                    await asyncio.sleep(0.05)
        except DeadlineExceeded as error:
            await self.stop()
            raise EngineUnavailable(str(error)) from error
        return f"http://127.0.0.1:{port_file.read_text().strip()}"

    def _why(self, log: Path) -> str:
        lines = log.read_text(errors="replace").strip().splitlines()
        code = self._child.returncode if self._child is not None else None
        return f"exit code {code}; last log line: {lines[-1] if lines else '(empty)'} (log: {log})"

    async def stop(self) -> None:
        """End the child this object started, politely first."""
        if self._child is None or self._child.returncode is not None:
            return
        self._child.terminate()
        try:
            await asyncio.wait_for(self._child.wait(), 3.0)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()


__all__ = ("EngineProcess",)
