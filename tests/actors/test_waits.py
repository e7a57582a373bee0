"""What an actor waits for, and since when."""

from __future__ import annotations

from actors.runtime.context import Context
from bus import Bus, BusConfig
from bus.knobs.live import LiveKnobs
from tests.bus.suite.clock import ManualClock
from tests.declared import actor_of


def a_context() -> tuple[Context, ManualClock]:
    config, clock = BusConfig(url="redis://127.0.0.1:1", run="r"), ManualClock()
    bus = Bus(config, clock)
    return Context(actor_of(name="reward-0", role="reward", bus=config), bus, LiveKnobs(bus)), clock


async def reads(context: Context, clock: ManualClock, answers: list[bool]) -> list[float]:
    """A loop that reads: for each read, since when the actor says it has waited, in seconds from the first."""
    found = []
    for answered in answers:
        with context.waiting("an entry of rollouts") as heard:
            await clock.advance(0.5)
            found.append(context.vitals().waits_since)
            if answered:
                heard()
    return [since - found[0] for since in found]


async def test_a_loop_that_gets_nothing_has_waited_since_its_first_read() -> None:
    assert await reads(*a_context(), [False] * 3) == [0.0, 0.0, 0.0]


async def test_a_busy_loop_waits_anew_after_each_answer() -> None:
    assert await reads(*a_context(), [True, True, False, False]) == [0.0, 0.5, 1.0, 1.0]
