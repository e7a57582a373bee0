"""Says where a rollout program holds up its worker: nothing else runs while one computes or waits without `await`.

A thread of its own looks whether the event loop still turns. What holds it up is logged with file and line; if that goes on, the
worker ends, so that peers take its samples over, and the one at fault comes on trial (actors/runtime/consume.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable

PATIENCE_S = 5.0
EXIT_HELD_UP = 70


def _place(thread: int) -> str:
    """The innermost lines of a thread, as `file:line`."""
    frame = sys._current_frames().get(thread)
    lines = traceback.extract_stack(frame)[:-4:-1] if frame is not None else []
    return " < ".join(f"{os.path.basename(line.filename)}:{line.lineno}" for line in lines)


async def watch(
    tell: Callable[[str], None],
    *,
    ends_after_s: float,
    patience_s: float = PATIENCE_S,
    leave: Callable[[int], None] = os._exit,
) -> None:
    """Until cancelled. `tell` is called in the thread; `leave` ends the process. A process that was stopped and goes on is not to
    blame: looks are counted, not seconds."""
    loop_thread, over, every_s = threading.get_ident(), threading.Event(), patience_s / 10
    turned = threading.Event()

    def look() -> None:
        still = 0
        while not over.wait(every_s):
            still = 0 if turned.is_set() else still + 1
            turned.clear()
            if still < 10:
                continue
            text = f"the event loop stands still for {still * every_s:.3g} s at {_place(loop_thread)}"
            if still == 10:
                tell(f"{text}: what blocks belongs into session.tell")
            if still * every_s >= ends_after_s:
                tell(f"{text}: this worker ends, its samples go on elsewhere")
                leave(EXIT_HELD_UP)
                return

    threading.Thread(target=look, name="loop-watchdog", daemon=True).start()
    try:
        while True:
            turned.set()
            await asyncio.sleep(every_s / 2)
    finally:
        over.set()
