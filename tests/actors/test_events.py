"""What an actor tells an operator: under a declared kind, at its level."""

from __future__ import annotations

from actors.runtime.context import Context
from bus import Bus, BusConfig
from bus.knobs.live import LiveKnobs
from bus.messages.events import EventKind
from bus.topology import EVENTS
from tests.actors.house import messages
from tests.declared import actor_of


async def test_an_event_has_its_kinds_level_unless_told_otherwise_and_says_what_it_is_about(redis_url: str, run_name: str) -> None:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        context = Context(actor_of(name="trainer", role="trainer", bus=bus.config), bus, LiveKnobs(bus))
        await context.event(EventKind.STEP_SKIPPED, "step 3")
        await context.event(EventKind.SELF_CHECK, "found", level="error", step=1)
        await context.event(EventKind.BATCH, "two\nlines", about="stale_tokens")
        await context.refusals.add("judge", "it raised", kind=EventKind.JUDGE_RAISED)
        told = [(e.kind, e.level, e.text, e.data) for e in await messages(bus, EVENTS)]
    assert told == [
        ("step skipped", "error", "step 3", {}),
        ("self-check", "error", "found", {"step": 1}),
        ("batch/stale_tokens", "warning", "two lines", {}),
        ("judge raised", "error", "judge: it raised", {}),
    ]
