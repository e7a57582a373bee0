"""Whether a worker that joined by hand may have its name, and may stay.

Reads  the run's identity, vitals, who has a name    Owns  this process's hold on its name
Always true: of two processes with one name the one that took it last stays. Nobody watches over these workers, and what they were
told when they joined is told once: so they look themselves whether it still holds.
"""

from __future__ import annotations

import asyncio
import secrets
from math import inf
from typing import TYPE_CHECKING

from actors.runtime.host import SILENT_BEATS, lives
from bus.errors import BusRefused
from bus.identity import Identity, hold_name, holder_of, read_identity

if TYPE_CHECKING:
    from actors.runtime.context import Context
    from bus import Bus

ME = secrets.token_hex(8)
LOOK_S = 0.5
LIVE = ("max_running",)  # a knob, which workers follow
ELSEWHERE = ("url", "life")  # of the bus: how this host reaches it, and what the bus itself looks after


async def take_name(bus: Bus, name: str, heartbeat_s: float) -> None:
    """Have the name from now on. Waits until who had it last is silent for long enough, woken by time; BusRefused when that one is
    heard again: two workers of one name would take each other's samples for their own."""
    had = (await bus.vitals()).get(name)
    if had is not None and had.state not in ("stopped", "failed") and await holder_of(bus, name) != ME and lives(had) is not False:
        before_s = (await bus.silences()).get(name, inf)
        while before_s < SILENT_BEATS * heartbeat_s:
            await asyncio.sleep(LOOK_S)
            silent_s = (await bus.silences()).get(name, inf)
            if silent_s < before_s:
                raise BusRefused(
                    f"worker name {name!r} refused: a worker of this name works on host {had.host} (pid {had.pid}). Choose another "
                    "--name, or leave it out: then it is made of host and pid."
                )
            before_s = silent_s
    await hold_name(bus, name, ME)


class Stay:
    """One stay of this process in a run. `known`: what the run told when it joined."""

    def __init__(self, name: str, known: Identity) -> None:
        self._name, self._told = name, _told(known)
        self.changed = ""  # what the run tells its workers by now, and did not then
        self.taken = False  # somebody else has the name

    async def watch(self, context: Context) -> None:
        """Ends the room once the run tells its workers something else, or the name is another's; woken by time."""
        while not context.draining.is_set():
            await context.clock.sleep(context.spec.heartbeat_s)
            holder = await holder_of(context.bus, self._name)
            if not holder:
                await hold_name(context.bus, self._name, ME)  # a server that lost something
            known = await read_identity(context.bus)
            self.taken = holder not in ("", ME)
            if known is not None:
                now, then = _told(known), self._told
                self.changed = ", ".join(sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key)))
            if (self.taken or self.changed) and not context.draining.is_set():
                context.state = "draining"
                context.draining.set()
                await context.event("leaves", self.why(), level="warning" if self.taken else "info")

    def why(self) -> str:
        """Why it ended the room, in words; empty where it did not."""
        if self.taken:
            return f"another process took the name {self._name} while this one was not heard"
        if self.changed:
            return f"the run was started again with other settings for its workers ({self.changed}), which it takes"
        return ""


def _told(known: Identity) -> dict[str, object]:
    """What a worker goes by, by name. Of another release the doctor speaks."""
    bus = {f"bus.{key}": value for key, value in known.bus.items() if key not in ELSEWHERE}
    worker = {key: value for key, value in known.worker.items() if key not in LIVE}
    own = ("run_seed", "heartbeat_s", "drain_timeout_s", "loop_deadline_s")
    more = {name: getattr(known, name) for name in own}
    return bus | worker | more
