"""While a step is trained, the trainer takes in what comes for the next one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from actors.trainer import actor
from actors.trainer.backend import StepBatch, StepResult
from actors.trainer.backends import NoTraining
from actors.trainer.spec import TrainerSpec
from bus.messages.groups import GroupKept
from bus.messages.policy import StepDone
from bus.topology import GROUPS, POLICY
from miles_async.launcher.plan import told
from miles_async.settings.flat import Flat
from tests.actors.garbage import list_open
from tests.actors.house import messages, open_bus, put, running, scored, until
from tests.declared import PLAIN, backend_of

DEADLINE_S = 20.0


class Slow(NoTraining):
    """Its steps end when the test says so."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def train_step(self, batch: StepBatch) -> StepResult:
        self.begun.release()
        assert self.may_end.acquire(timeout=DEADLINE_S)
        return super().train_step(batch)


def kept(group: int) -> GroupKept:
    return GroupKept(group_id=f"g{group}", prompt_id=f"p{group}", samples=(scored(group, 0, 0.0), scored(group, 1, 1.0)))


async def test_groups_that_come_while_a_step_is_trained_are_taken_in_before_it_ends(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Slow()
    monkeypatch.setattr(actor, "open_backend", lambda name: backend)
    flags = {
        "save": "",
        "load": "",
        "backend": backend_of(hf_checkpoint=""),
        "weights_dir": str(tmp_path),
        "num_rollout": 2,
    }
    spec = told(TrainerSpec, Flat(PLAIN), **flags)
    async with open_bus(redis_url, run_name) as bus:
        await list_open(bus, "g1", "g2", "g3", "g4", generated=24)

        async def four_taken() -> bool:
            pending, *_ = await bus.link.run("XPENDING", bus.keys.stream(GROUPS.name), "trainer")
            return int(pending) == 4

        async def over() -> bool:
            return context.version == 3

        await put(bus, GROUPS, kept(1), kept(2))
        async with running(bus, "trainer", actor.run, spec) as context:
            assert await asyncio.to_thread(backend.begun.acquire, timeout=DEADLINE_S)
            await put(bus, GROUPS, kept(3), kept(4))
            await until(four_taken, deadline_s=DEADLINE_S)
            backend.may_end.release(2)
            await until(over, deadline_s=DEADLINE_S)
        steps = [m for m in await messages(bus, POLICY) if isinstance(m, StepDone)]
        assert [set(step.groups) for step in steps] == [{"g1", "g2"}, {"g3", "g4"}]
