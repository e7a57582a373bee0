"""`python -m tests.actors.standing_room SPEC`: a room whose samples do, by their label, what holds up or ends a process."""

from __future__ import annotations

import asyncio
import ctypes
import re
import time
from collections.abc import Callable
from typing import Any

from actors.runtime.consume import Consumer, as_lost
from actors.runtime.context import Context
from actors.runtime.run import main
from actors.runtime.whole import off_loop
from bus import Commit, Entry, Out
from bus.messages.samples import RolloutDone, RolloutLost, SampleTask
from bus.topology import PROMPTS, ROLLOUTS
from tests.actors.house import rollout


def backtracks() -> None:
    """For years, in C, with the interpreter's lock."""
    re.match(r"(a+)+$", "a" * 60 + "b")


async def _later(does: Callable[[], None]) -> None:
    await asyncio.sleep(0.01)
    does()


async def misdeed(label: str) -> None:
    match label:
        case "regex":
            await _later(backtracks)
        case "task":
            await asyncio.gather(_later(backtracks), asyncio.sleep(3.0))
        case "thread":
            await off_loop(backtracks)
        case "sleep":
            time.sleep(1000)  # noqa: ASYNC251 - the fault
        case "short":
            time.sleep(6.0)  # noqa: ASYNC251 - the fault
        case "crash":
            ctypes.string_at(0)


async def body(context: Context, _room: dict[str, Any]) -> None:
    def lost(entry: Entry, message: RolloutLost) -> Commit:
        return Commit(append=(Out(ROLLOUTS, message),))

    async def handle(entry: Entry, message: SampleTask) -> Commit:
        await asyncio.sleep(0.05)
        await misdeed(message.label)
        group = int(message.group_id[1:])
        made: RolloutDone = rollout(group, message.index, n=message.n_samples)
        return Commit(ack=(entry,), append=(Out(ROLLOUTS, made),))

    consumer = Consumer(context, [PROMPTS], "generation", on_dead=as_lost(context, lost), concurrency=4)
    await consumer.run(handle)


if __name__ == "__main__":
    main(dict[str, Any], body)
