"""What an actor waits for, and since when."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.runtime.context import Context
from bus import Bus, BusConfig
from bus.knobs.live import LiveKnobs
from bus.messages.waits import Wait
from tests.bus.suite.clock import ManualClock
from tests.bus.suite.proxy import LossyProxy
from tests.declared import actor_of


def a_context() -> tuple[Context, ManualClock]:
    config, clock = BusConfig(url="redis://127.0.0.1:1", run="r"), ManualClock()
    bus = Bus(config, clock)
    return Context(actor_of(name="reward-0", role="reward", bus=config), bus, LiveKnobs(bus)), clock


async def reads(context: Context, clock: ManualClock, answers: list[bool]) -> list[float]:
    """A loop that reads: for each read, since when the actor says it has waited, in seconds from the first."""
    found = []
    for answered in answers:
        with context.waiting(Wait.ENTRY, streams="rollouts") as heard:
            await clock.advance(0.5)
            found.append(context.vitals().waits_since)
            if answered:
                heard()
    return [since - found[0] for since in found]


async def test_a_loop_that_gets_nothing_has_waited_since_its_first_read() -> None:
    assert await reads(*a_context(), [False] * 3) == [0.0, 0.0, 0.0]


async def test_a_busy_loop_waits_anew_after_each_answer() -> None:
    assert await reads(*a_context(), [True, True, False, False]) == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("answers_s", "told_s"),
    [
        ([2.0, 2.0], None),  # while it starts
        ([2.0, 0.01, 0.01], 0.01),  # late answers: it waited for a core
        ([0.01] * 5 + [2.0] * 4, 0.01),
        ([0.5, 0.02, 0.5, 0.5, 0.02, 0.5, 0.5, 0.02, 0.5], 0.5),  # quick ones: between two fetches its link is free
        ([0.5] * 5 + [0.01] * 5, 0.01),  # its link is well again
    ],
)
async def test_how_late_the_bus_answers_is_told_by_the_middle_of_the_last_answers(
    redis_url: str, run_name: str, tmp_path: Path, answers_s: list[float], told_s: float | None
) -> None:
    clock, late_s = ManualClock(), 0.0
    async with LossyProxy(redis_url, tmp_path) as proxy, Bus(BusConfig(url=proxy.url, run=run_name)) as bus:
        context = Context(actor_of(name="b", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        context.clock = clock
        await bus.set_vitals("b", context.vitals())  # the first one takes several answers
        proxy.before_reply = lambda: clock.advance(late_s)
        for answer_s in answers_s:
            late_s = answer_s
            await context.beat()
    assert context.counters.get("bus_answer_s") == (None if told_s is None else pytest.approx(told_s))
