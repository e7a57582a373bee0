"""Whether a worker that joined by hand may have its name, and may stay.

Reads  the run's identity, who has a name
Nobody watches over these workers, and what they were told when they joined is told once: so they look themselves whether it still
holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.runtime.holding import take_name
from bus.errors import BusRefused, NameTaken
from bus.identity import Identity, read_identity
from bus.messages.events import EventKind

if TYPE_CHECKING:
    from actors.runtime.context import Context
    from bus import Bus

LIVE = ("max_running",)  # a knob, which workers follow
ELSEWHERE = ("url", "life")  # of the bus: how this host reaches it, and what the bus itself looks after


async def take_worker_name(bus: Bus, name: str, heartbeat_s: float) -> None:
    """Have the name from now on, before anything boots; BusRefused when a worker of that name is heard."""
    try:
        await take_name(bus, name, heartbeat_s)
    except NameTaken:
        other = await bus.names.holder_of(name)
        raise BusRefused(
            f"worker name {name!r} refused: a worker of this name works on host {other.who.host if other else '?'} (pid "
            f"{other.who.pid if other else '?'}). Choose another --name, or leave it out: then it is made of host and pid."
        ) from None


class Stay:
    """One stay of this process in a run. `known`: what the run told when it joined."""

    def __init__(self, known: Identity) -> None:
        self._told = _told(known)
        self.changed = ""  # what the run tells its workers by now, and did not then

    async def watch(self, context: Context) -> None:
        """Ends the room once the run tells its workers something else; woken by time."""
        while not context.draining.is_set():
            await context.clock.sleep(context.spec.heartbeat_s)
            if (known := await read_identity(context.bus)) is not None:
                now, then = _told(known), self._told
                self.changed = ", ".join(sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key)))
            if self.changed and not context.draining.is_set():
                context.state = "draining"
                context.draining.set()
                await context.event(EventKind.LEAVES, self.why())

    def why(self) -> str:
        """Why it ended the room, in words."""
        return f"the run was started again with other settings for its workers ({self.changed}), which it takes"


def _told(known: Identity) -> dict[str, object]:
    """What a worker goes by, by name. Of another release the doctor speaks."""
    bus = {f"bus.{key}": value for key, value in known.bus.items() if key not in ELSEWHERE}
    worker = {key: value for key, value in known.worker.items() if key not in LIVE}
    own = ("run_seed", "heartbeat_s", "drain_timeout_s", "loop_deadline_s")
    more = {name: getattr(known, name) for name in own}
    return bus | worker | more
