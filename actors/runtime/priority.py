"""CPU priority: whatever is starting comes first, then the actors that pass messages, then what computes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ACTOR_NICE, COMPUTE_NICE = 5, 10  # of nice's 0 to 19; all of them still use every idle core


def lower_to(nice: int) -> None:
    """Lower this thread, those it starts, and its session. Called once what it serves is ready, so that a newcomer boots
    at once where all cores compute. Linux weighs sessions before threads where autogroups are on, hence both. Only in
    a session of its own, as actors and engines are started: nobody else is lowered."""
    if sys.platform == "win32" or os.getsid(0) != os.getpid() or os.nice(0) >= nice:
        return
    os.nice(nice - os.nice(0))
    group = Path("/proc/self/autogroup")
    try:
        if group.exists():
            group.write_text(str(nice))
    except OSError:
        return  # no autogroups in this kernel, or not ours to set: the nice value alone remains
