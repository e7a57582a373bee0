"""The embedded engine as a child of its worker: a server that chooses its port itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from actors.generation.engine import BootRefused, EngineUnavailable, Opened
from actors.generation.engines.sglang.opening import connecting
from actors.generation.spec import GenerationSpec
from actors.runtime.child import PYTHON, Child, last_line
from actors.runtime.deadline import deadline
from bus.errors import DeadlineExceeded
from bus.private import write_secret

EMBEDDED = (*PYTHON, "actors.generation.engines.embedded")


class EngineProcess:
    """One embedded engine. A `spare` is a child that already loads its libraries: the first boot uses it."""

    def __init__(self, spec: GenerationSpec, folder: Path, spare: Child | None = None) -> None:
        self._spec = spec
        self._folder = folder
        self._child = Child()
        self._spare = spare
        self.boots = 0
        self.note = ""  # of how it runs otherwise than it was asked to: it never does
        self.inside: Path | None = None  # it runs no function of ours

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.alive

    async def start(self) -> str:
        """Boot and return the base URL once the server listens; EngineUnavailable names the log's last line."""
        await self.stop()
        self.boots += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        port_file = self._folder / f"port.{self.boots}"
        port_file.unlink(missing_ok=True)
        log = self._folder / f"engine.{self.boots}.log"
        spec, repeatable = self._spec, self._spec.server_args.get("enable-deterministic-inference")
        argv = [
            *("--model-path", spec.model_path, "--host", "127.0.0.1", "--port", "0"),
            *("--port-file", str(port_file), "--threads", str(spec.threads)),
            *("--max-running-requests", str(spec.max_running)),
            *(["--enable-deterministic-inference"] if repeatable else []),
            *(["--lora-rank", str(spec.adapters.rank), "--lora-alpha", str(spec.adapters.alpha)] if spec.adapters else []),
        ]
        if spec.token:  # in a file: a command line is everybody's to read
            argv += ["--api-key-file", str(write_secret(self._folder / "api-key", spec.token))]
        spare, self._spare = self._spare, None
        if spare is not None and spare.alive:
            self._child = spare
            spare.order(json.dumps({"log": str(log), "argv": argv}).encode() + b"\n")
        else:
            await self._child.start([*EMBEDDED, *argv], log)
        try:
            async with deadline(spec.boot_deadline_s, f"boot of the embedded engine (log: {log})"):
                while not (port_file.exists() and port_file.read_text().strip()):
                    if not self.alive:
                        raise self._ended(log)
                    await asyncio.sleep(0.05)
        except DeadlineExceeded as error:
            await self.stop()
            raise EngineUnavailable(str(error)) from error
        return f"http://127.0.0.1:{port_file.read_text().strip()}"

    def _ended(self, log: Path) -> EngineUnavailable:
        """What the child's end at boot means: status 2 is its refusal, which another try would not change."""
        code, last = self._child.exit_code, last_line(log)
        if code == 2:
            return BootRefused(f"{last} (log: {log})")
        return EngineUnavailable(f"embedded engine ended at boot with exit code {code}; last log line: {last} (log: {log})")

    async def stop(self) -> None:
        """End the child this object started, politely first."""
        await self._child.stop()


def open_embedded(spec: GenerationSpec, folder: Path, spare: Child | None) -> Opened:
    """A server of this worker's own."""
    return Opened(connecting(spec), EngineProcess(spec, folder, spare))
