"""How an engine is paused for new weights, and what becomes of its requests.

Always true: no token counts as made by a newer version than it was. Requests go on where the engine names the version of each
chunk exactly; paused in place also where it counts the tokens made so far (inside.py), and elsewhere with the chunks at the
boundary as the older version's. Under the other modes, or behind a router, they end and go on as new requests.
"""

from __future__ import annotations

from typing import cast

from actors.generation.engine import Attached, Engine, PauseMode
from bus.messages.versions import PolicyVersion

LAST_STEP_S = 0.25  # a decode step is far shorter; what has not ended then is ended in the pause


async def pause(engine: Engine, kind: Attached, mode: str, before: PolicyVersion | None) -> str:
    """Pause the engine; returns what became of its requests. `before`: the version that made their tokens so far."""
    if kind.exact_in_place if mode == "in_place" else kind.exact:
        await engine.pause(cast(PauseMode, mode))
        return "ended" if mode == "abort" else "kept"
    if mode == "in_place" and before is not None:
        if await engine.pause_counted(str(before.id)) is not None:
            return "kept"
        await engine.pause("in_place")
        if engine.count_as_older(str(before.id)):
            return "kept"
    return await end_requests(engine)


async def pause_to_count(engine: Engine, kind: Attached, mode: str, before: PolicyVersion | None, broadcast: bool) -> str | None:
    """Pause in place an engine that counts in the call that brings the weights (`broadcast`: they come so): one call less while
    requests wait. The version that made its tokens; None, and nothing is paused, where it goes otherwise."""
    counts = broadcast and engine.counts_when_receiving
    if mode != "in_place" or before is None or not counts or kind.exact_in_place:
        return None
    await engine.pause("in_place")
    return str(before.id)


async def end_requests(engine: Engine) -> str:
    """Most end with the step under way, before the pause: to take them back out of the batch costs SGLang 60 ms for 256, and it
    never removes them from its table."""
    await engine.end_running(LAST_STEP_S)
    await engine.pause("retract")
    await engine.abort_all()
    return "sent again"
