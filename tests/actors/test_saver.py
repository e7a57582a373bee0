"""The policy log of a run that writes no checkpoint; where a checkpoint's copy is made."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec

from actors.runtime.context import ActorSpec, Context
from actors.trainer.actor import Trainer
from actors.trainer.intake import Intake
from actors.trainer.saver import KEPT_STEPS, TRIM_STEPS, Saver
from actors.trainer.spec import TrainerSpec
from bus import Bus, Out
from bus.knobs.live import LiveKnobs
from bus.messages.policy import StepDone
from bus.messages.versions import PolicyVersion
from bus.topology import EVENTS, POLICY
from miles_async.launcher.plan import told
from miles_async.settings.flat import Flat
from tests.actors.house import messages, open_bus
from tests.declared import PLAIN, backend_of


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


class Copy:
    """What a backend's snapshot is to the saver; tells the thread that asked for it."""

    def __init__(self) -> None:
        self.thread = threading.current_thread().name

    def write(self, directory: Path) -> None:
        (directory / "thread").write_text(self.thread)

    def write_hf(self, directory: Path) -> None:
        directory.mkdir()  # its parent is not there


async def test_a_checkpoint_is_copied_in_the_backends_thread_and_a_failed_export_costs_nothing_else(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async with open_bus(redis_url, run_name) as bus:
        knobs = LiveKnobs(bus)
        await knobs.open()
        context = Context(ActorSpec(name="trainer", role="trainer", bus=bus.config), bus, knobs)
        backend = told(
            TrainerSpec,
            Flat(PLAIN),
            load="",
            backend=backend_of(hf_checkpoint=""),
            weights_dir="",
            num_rollout=1,
            save=str(tmp_path),
        )
        trainer = Trainer(context, msgspec.structs.replace(backend, backend_name="none", save_hf=f"{tmp_path}/hf/{{rollout_id}}"))
        trainer._version = PolicyVersion(id=1, step=1)
        trainer._backend.snapshot = Copy  # type: ignore[method-assign]
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(knobs.follow(over))
            await trainer._save(tasks)
            over.set()
        [failed] = [e for e in await messages(bus, EVENTS) if e.kind == "export failed"]
        assert f"step 1 not exported to {tmp_path}/hf/0" in failed.text and trainer._saver.saved_step == 1
        assert next(tmp_path.glob("*/thread")).read_text().startswith("train")
        trainer._thread.shutdown()
