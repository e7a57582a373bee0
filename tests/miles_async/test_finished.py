"""Whether a run that ended has done all its steps: the trainer's word, against the steps that this start asks for."""

from __future__ import annotations

from actors.runtime.context import Context
from actors.trainer.restart import Voice
from bus import Bus, BusConfig
from bus.knobs.live import LiveKnobs
from bus.messages.policy import Finished, Restored
from bus.messages.versions import PolicyVersion
from miles_async.launcher.resume import finished_step
from tests.declared import actor_of


async def test_a_finished_run_that_is_given_more_steps_and_stopped_before_its_trainer_is_up_has_not_finished(
    redis_url: str, run_name: str
) -> None:
    """It was taken for one that had done those too, and never went on. One given fewer has done those that it did."""
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        assert await finished_step(bus, 4) == 0, "nobody spoke"
        spec, version = actor_of(name="trainer", role="trainer", bus=bus.config), PolicyVersion(9, 8)
        voice = Voice(Context(spec, bus, LiveKnobs(bus)))
        await voice.open()
        await voice.say(version, Finished(step=8, version=version))
        assert [await finished_step(bus, steps) for steps in (5, 8, 12)] == [8, 8, 0]
        await voice.say(version, Restored(step=8, version=version, checkpoint="", samples=()))
        assert await finished_step(bus, 8) == 0
