"""The policy log of a run that writes no checkpoint."""

from __future__ import annotations

from pathlib import Path

from actors.runtime.context import ActorSpec, Context
from actors.trainer.intake import Intake
from actors.trainer.saver import KEPT_STEPS, TRIM_STEPS, Saver
from bus import Bus, Out
from bus.knobs.live import LiveKnobs
from bus.messages.policy import StepDone
from bus.messages.versions import PolicyVersion
from bus.topology import POLICY
from tests.actors.house import open_bus


async def trained(bus: Bus, saver: Saver, steps: range) -> None:
    for step in steps:
        version = PolicyVersion(id=step, step=step)
        await bus.append([Out(POLICY, StepDone(step=step, version=version, trained_on=version, groups=()))])
        await saver.no_checkpoint(step)


async def test_without_checkpoints_the_policy_log_keeps_its_newest_part(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus:
        context = Context(ActorSpec(name="trainer", role="trainer", bus=bus.config), bus, LiveKnobs(bus))
        saver = Saver(context, Intake(context), save=tmp_path, keep_last=1, fingerprint="")
        await trained(bus, saver, range(1, KEPT_STEPS))
        assert await bus.length(POLICY) == KEPT_STEPS - 1
        await trained(bus, saver, range(KEPT_STEPS, 3 * KEPT_STEPS + 1))
        assert KEPT_STEPS <= await bus.length(POLICY) <= KEPT_STEPS + TRIM_STEPS
        [newest] = await bus.last(POLICY)
        assert (await bus.message(newest)).step == 3 * KEPT_STEPS
