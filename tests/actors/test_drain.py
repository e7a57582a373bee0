"""How long an actor that was asked to end is waited for."""

from __future__ import annotations

import asyncio

import pytest

from actors.runtime import drain
from actors.runtime.drain import KEEPS, SILENT_S, Heard, Patience, drained
from bus.messages.control import Vitals
from bus.messages.waits import Wait
from tests.actors.house import open_bus


def waited(patience: Patience, says: list[tuple[float, str]]) -> float:
    """When the patience was over. `says`: until when the actor says what."""
    now = 0.0
    for until, what in says:
        while now < until:
            now += 1.0
            if patience.is_over(now, what):
                return now
    return -1.0


@pytest.mark.parametrize(
    ("says", "over"),
    [
        ([(99, "")], 30.0),
        ([(99, "the engine to boot")], 30.0),
        ([(50, Wait.CHECKPOINT), (99, "")], 81.0),  # what comes after it has the whole drain, whenever after the last look it ended
        ([(20, Wait.STEP_ENDS), (300, Wait.CHECKPOINT), (999, "")], 331.0),
        ([(10_000, Wait.STEP_ENDS)], KEEPS[Wait.STEP_ENDS] + 30.0),
        ([(100, Wait.STEP_ENDS), (10_000, Wait.CHECKPOINT)], 100 + KEEPS[Wait.CHECKPOINT] + 30.0),
    ],
)
def test_what_would_be_lost_is_waited_for_and_has_an_end(says: list[tuple[float, str]], over: float) -> None:
    assert waited(Patience(30.0, 0.0), says) == over


async def test_who_ends_in_time_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_S", 0.01)
    ended, clock = asyncio.Event(), asyncio.get_running_loop().time

    async def finishes() -> str:
        ended.set()
        return Wait.CHECKPOINT

    assert await drained(ended.wait(), Patience(0.0, clock()), clock, finishes)

    async def nothing() -> str:
        return ""

    assert not await drained(asyncio.Event().wait(), Patience(0.05, clock()), clock, nothing)


async def test_an_actor_whose_vitals_stand_still_finishes_nothing(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bus(redis_url, run_name) as bus:
        heard, now = Heard(bus), 100.0
        monkeypatch.setattr(bus.clock, "monotonic", lambda: now)

        async def says(wall: float) -> None:
            vitals = Vitals(
                actor="trainer", role="trainer", pid=1, host="h", state="draining", wall=wall, waits_for=Wait.CHECKPOINT
            )
            await bus.set_vitals("trainer", vitals)

        assert await heard.finishes("trainer") == "", "it has said nothing yet"
        await says(1.0)
        now += 1.0
        assert await heard.finishes("trainer") == Wait.CHECKPOINT
        now += SILENT_S
        assert await heard.finishes("trainer") == ""
        await says(2.0)
        now += 1.0
        assert await heard.finishes("trainer") == Wait.CHECKPOINT
        heard.hurries = True
        assert await heard.finishes("trainer") == ""
