"""How an actor comes to its name: at once where nobody has it, or who had it is gone; else after a watch.

Reads  names, heard    Writes  names (bus/streams/hold.py)
Always true: a name is taken from a process only if that has ended, as far as this host can see it, or was not heard for `lapse_s`
in which the server answered and this process ran. A server that was away, or a pause of our own, begins the watch anew: whoever
waited for that server too is about to be heard.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from actors.runtime.child import is_alive
from actors.runtime.host import SILENT_BEATS, processes_name
from actors.runtime.leftovers import owner_of
from bus import Bus
from bus.errors import NameTaken
from bus.streams.hold import Held, Who

LOOK_S = 0.5


def me(folder: str = "") -> Who:
    """This process, as others may know it."""
    return Who(pid=os.getpid(), host=socket.gethostname(), processes=processes_name(), began=owner_of(), folder=folder)


def has_ended(who: Who) -> bool:
    """Whether this host sees that the process is no more; False where it cannot tell."""
    return who.processes == processes_name() and not (is_alive(who.pid) and owner_of(who.pid) == who.began)


async def take_name(bus: Bus, name: str, beat_s: float, *, who: Who | None = None, gone: Callable[[Who], bool] = has_ended) -> None:
    """Have the name from now on; its holder is heard of every `beat_s`. Waits until that is silent for long enough, woken by time;
    NameTaken when it is heard again."""
    lapse_s, clock, who = SILENT_BEATS * beat_s, bus.clock, who or me()
    watched: Held | None = None
    watched_s, asked, former = 0.0, clock.monotonic(), None
    while (held := await bus.names.take(name, who, lapse_s=lapse_s, instead_of=former)) is not None:
        passed_s, asked, former = clock.monotonic() - asked, clock.monotonic(), None
        if gone(held.who):
            former = Held(word=held.word, generation=held.generation, token=held.token, who=held.who)  # whenever it was heard
            continue
        if watched is None or held.token != watched.token or passed_s > 4 * LOOK_S:
            watched, watched_s = held, 0.0
        elif held.heard != watched.heard:
            raise NameTaken(
                f"the name {name!r} of run {bus.config.run} is held by {held.who}, which is heard: two would do the same work, so "
                "this one ends."
            )
        else:
            watched_s += passed_s
        # Who was silent for longer than it waits for a server has ended, or stood still.
        long_gone = held.silent_s > lapse_s + bus.config.deadline_s
        if watched_s >= (min(lapse_s, 1.5 * beat_s) if long_gone else lapse_s):
            former = held
            continue
        await clock.sleep(min(LOOK_S, lapse_s / 4))
