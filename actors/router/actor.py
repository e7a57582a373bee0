"""Router room: keeps one sglang-router running at an address that never changes in a run.

Reads  nothing    Writes  nothing but events    Owns  the router's process and its log
The router holds no state worth keeping: engines register themselves, again after a restart, and until then their workers
send requests straight to them. If it dies no sample is lost; for a moment the load is uneven.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from actors.router.launch import DEFAULTS, KEY
from actors.router.probe import answers
from actors.runtime.child import PYTHON, ArgValue, Child, command_line, last_line
from actors.runtime.context import Context
from actors.runtime.deadline import deadline, first_of, within
from actors.runtime.run import Refused
from bus.errors import DeadlineExceeded
from bus.messages.events import EventKind
from bus.messages.waits import Wait

POLL_S = 0.1
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`args`: sglang-router's own flags without dashes, passed on as they are. `token`: what it asks of its callers; a `command` of
    the user's own gets it in the environment, as MILES_ASYNC_ROUTER_KEY."""

    host: str = "127.0.0.1"
    port: int
    prometheus_port: int
    command: tuple[str, ...] = ()
    args: dict[str, ArgValue] = {}
    boot_deadline_s: float = 60.0
    token: str = ""


class Router:
    """The room."""

    def __init__(self, context: Context, spec: RouterSpec) -> None:
        self._context = context
        self._spec = spec
        self._child = Child()
        self._log = Path(context.spec.run_dir or ".") / "router" / "log"

    async def run(self) -> None:
        """Until draining: waits until the router ends, then starts it again. Shutdown: 1 end the router."""
        context = self._context
        context.version = 0
        failures = 0
        try:
            while not context.draining.is_set():
                if await self._start():
                    failures = 0
                    with context.waiting(Wait.REQUESTS):
                        await first_of(self._child.wait(), context.draining.wait())
                    if context.draining.is_set():
                        return
                    why = f"router ended with exit code {self._child.exit_code}"
                    await context.event(EventKind.ROUTER_ENDED, f"{why}: {last_line(self._log)}; starting it again")
                pause_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                failures += 1
                await within(pause_s, context.draining)
        finally:
            await self._child.stop()

    async def _start(self) -> bool:
        """Start the router and wait until it answers. Refused when its flags are wrong."""
        context, spec = self._context, self._spec
        await self._child.stop()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = spec.command or (*PYTHON, "actors.router.launch")
        address: dict[str, ArgValue] = {
            "host": spec.host,
            "port": spec.port,
            "prometheus-host": spec.host,
            "prometheus-port": spec.prometheus_port,
        }
        await self._child.start(command_line(command, DEFAULTS | spec.args | address), self._log, {**os.environ, KEY: spec.token})
        try:
            async with deadline(spec.boot_deadline_s, f"boot of the router (log: {self._log})"):
                while self._child.alive and not await answers(spec.host, spec.port):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except DeadlineExceeded as error:
            await context.event(EventKind.ROUTER_BOOT_FAILED, str(error))
            return False
        if self._child.alive:
            await context.event(EventKind.ROUTER_READY, f"sglang-router at http://{spec.host}:{spec.port}")
            return True
        code, line = self._child.exit_code, last_line(self._log)
        if code == 2:
            raise Refused(f"sglang-router refuses its flags: {line}. Correct the --router-* flags. Log: {self._log}")
        await context.event(EventKind.ROUTER_BOOT_FAILED, f"exit code {code}: {line} (log: {self._log})")
        return False


async def run(context: Context, spec: RouterSpec) -> None:
    """The router's process."""
    await Router(context, spec).run()
