"""When a checkpoint is written, and what is acknowledged then; the policy log with and without checkpoints."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from actors.runtime.context import Context
from actors.trainer.actor import Trainer
from actors.trainer.checkpoint import TRACKER, iter_dir, latest, read_bus_state
from actors.trainer.intake import Intake
from actors.trainer.saver import KEPT_STEPS, TRIM_STEPS, Saver
from actors.trainer.spec import TrainerSpec
from bus import Bus, Out
from bus.knobs.live import LiveKnobs
from bus.messages.policy import Checkpointed, StepDone
from bus.messages.versions import PolicyVersion
from bus.topology import EVENTS, GROUPS, POLICY
from miles_async.launcher.plan import told
from miles_async.settings.flat import Flat
from tests.actors.house import messages, open_bus, put
from tests.actors.test_trainer_parts import SPLIT, arrive, kept, trainer_of
from tests.actors.test_trainer_parts import Trainer as Fed
from tests.declared import PLAIN, actor_of, backend_of


async def trained(bus: Bus, saver: Saver, steps: range) -> None:
    for step in steps:
        version = PolicyVersion(id=step, step=step)
        await bus.append([Out(POLICY, StepDone(step=step, version=version, trained_on=version, groups=()))])
        await saver.no_checkpoint(step)


async def test_without_checkpoints_the_policy_log_keeps_its_newest_part(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="trainer", role="trainer", bus=bus.config), bus, LiveKnobs(bus))
        saver = Saver(context, Intake(context), asyncio.to_thread, save=tmp_path, keep_last=1, fingerprint="")
        await trained(bus, saver, range(1, KEPT_STEPS))
        assert await bus.length(POLICY) == KEPT_STEPS - 1
        await trained(bus, saver, range(KEPT_STEPS, 3 * KEPT_STEPS + 1))
        assert KEPT_STEPS <= await bus.length(POLICY) <= KEPT_STEPS + TRIM_STEPS
        [newest] = await bus.last(POLICY)
        assert (await bus.message(newest)).step == 3 * KEPT_STEPS


class Copy:
    """What a backend's checkpoint is to the saver; tells the threads that asked for it and finished it."""

    meets = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.thread = threading.current_thread().name

    def write(self) -> None:
        (self.directory / "thread").write_text(self.thread)

    def finish(self) -> None:
        (self.directory / "finished").write_text(threading.current_thread().name)

    def write_hf(self, directory: Path) -> None:
        directory.mkdir()  # its parent is not there


async def test_a_checkpoint_is_copied_in_the_backends_thread_and_a_failed_export_costs_nothing_else(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async with open_bus(redis_url, run_name) as bus:
        knobs = LiveKnobs(bus)
        await knobs.open()
        context = Context(actor_of(name="trainer", role="trainer", bus=bus.config), bus, knobs)
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
        trainer._backend.save = Copy  # type: ignore[method-assign]
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(knobs.follow(over))
            await trainer._save(tasks)
            over.set()
        [failed] = [e for e in await messages(bus, EVENTS) if e.kind == "export failed"]
        assert f"step 1 not exported to {tmp_path}/hf/0" in failed.text and trainer._saver.saved_step == 1
        for said in ("thread", "finished"):
            assert next(tmp_path.glob(f"*/{said}")).read_text().startswith("train")
        trainer._thread.shutdown()


# -- one checkpoint at a time, and nothing acknowledged before it is durable ------------------------------------------------


class Files:
    """A checkpoint that writes what it is told to, after it has looked around."""

    meets = False
    directory: Path

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look

    def copy(self, directory: Path) -> Files:
        self.directory = directory
        return self

    def write(self) -> None:
        self._look()
        (self.directory / "model").write_bytes(b"weights")

    def finish(self) -> None:
        return

    def write_hf(self, directory: Path) -> None:
        raise AssertionError("nobody asked for it")


@asynccontextmanager
async def trained_once(redis_url: str, run_name: str, save: Path) -> AsyncIterator[tuple[Bus, Fed, Saver]]:
    """A trainer after its first step: group g1 is trained, g2 waits."""
    knobs = SPLIT | {"staleness_policy": "whole"}
    async with open_bus(redis_url, run_name, knobs=knobs) as bus, trainer_of(bus) as trainer:
        await arrive(bus, kept(1, 0, 1, 2), kept(2, 0, 1, 2))
        await trainer.train()
        yield bus, trainer, Saver(trainer.context, trainer.intake, asyncio.to_thread, save=save, keep_last=2, fingerprint="f")


async def saved(saver: Saver, files: Files, step: int = 1) -> None:
    async with asyncio.TaskGroup() as tasks:
        await saver.begin(tasks, files.copy, PolicyVersion(step + 1, step))


async def test_a_checkpoint_is_durable_before_anything_is_acknowledged(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with trained_once(redis_url, run_name, tmp_path) as (bus, trainer, saver):
        seen: list[object] = []

        def look() -> None:
            seen.extend([(tmp_path / TRACKER).exists(), [t.consumed.group_id for t in trainer.intake.uncommitted]])

        await saved(saver, Files(look))
        assert seen == [False, ["g1"]]
        assert (latest(tmp_path), saver.saved_step, trainer.intake.uncommitted) == (1, 1, [])
        assert sorted(await bus.hash_of(bus.keys.open_groups)) == ["g2"]
        assert [m.step for m in await messages(bus, POLICY) if isinstance(m, Checkpointed)] == [1]


async def test_of_a_checkpoint_that_failed_nothing_is_acknowledged(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with trained_once(redis_url, run_name, tmp_path) as (bus, trainer, saver):

        def look() -> None:
            raise OSError(28, "No space left on device")

        await saved(saver, Files(look))
        [said] = [m.text for m in await messages(bus, EVENTS) if m.kind == "checkpoint failed"]
        assert said.startswith(f"checkpoint 1 not written to {tmp_path}: No space left on device.")
        assert (latest(tmp_path), saver.saved_step, len(trainer.intake.uncommitted)) == (None, -1, 1)
        assert await bus.length(GROUPS) == 2 and list(tmp_path.glob("iter_*")) == []
        await saved(saver, Files())
        assert latest(tmp_path) == 1 and await bus.length(GROUPS) == 1, "the next one is whole"


async def test_what_an_earlier_start_left_half_written_goes(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with trained_once(redis_url, run_name, tmp_path) as (_, _, saver):
        left = iter_dir(tmp_path, 1) / "of_another_rank"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half")
        await saved(saver, Files())
        assert latest(tmp_path) == 1 and [p.name for p in left.parent.iterdir()] == ["model"]


async def test_a_checkpoint_counts_what_it_holds_as_trained(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with trained_once(redis_url, run_name, tmp_path) as (_, trainer, saver):
        await trainer.intake.acknowledge(1, None)
        await trainer.train()
        await saved(saver, Files(), step=2)
        state = read_bus_state(tmp_path, 2, fingerprint="f")
        assert [c.group_id for c in state.consumed] == ["g2"] and state.open_groups == {}
        assert (state.ledger["issued"], state.ledger["trained"], state.ledger["tokens/trained"]) == (6, 6, 12)


async def test_a_checkpoint_names_the_one_before_it(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with trained_once(redis_url, run_name, tmp_path) as (_, trainer, saver):
        await saved(saver, Files())
        await trainer.train()
        await saved(saver, Files(), step=2)
        assert [read_bus_state(tmp_path, step, fingerprint="f").after for step in (1, 2)] == [0, 1]


async def test_one_checkpoint_is_written_at_a_time(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with trained_once(redis_url, run_name, tmp_path) as (_, _, saver):
        go_on, durable = threading.Event(), []

        def look() -> None:
            assert go_on.wait(30)

        class Second(Files):
            def copy(self, directory: Path) -> Files:
                durable.append(saver.saved_step)
                return super().copy(directory)

        async with asyncio.TaskGroup() as tasks:
            await saver.begin(tasks, Files(look).copy, PolicyVersion(2, 1))
            second = tasks.create_task(saver.begin(tasks, Second().copy, PolicyVersion(3, 2)))
            for _ in range(20):
                await asyncio.sleep(0)
            assert saver._task is not None and not saver._task.done() and not second.done()
            go_on.set()
        assert durable == [1] and latest(tmp_path) == 2


async def test_the_policy_log_goes_back_to_the_oldest_checkpoint_that_is_kept(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    async with trained_once(redis_url, run_name, tmp_path) as (bus, _, saver):
        for step in range(1, 6):
            version = PolicyVersion(step + 1, step)
            await put(bus, POLICY, StepDone(step=step, version=version, trained_on=version, groups=()))
            await saved(saver, Files(), step=step)
        steps = [m.step for m in await messages(bus, POLICY) if isinstance(m, StepDone)]
        assert steps == [4, 5], "a start from checkpoint 4 or 5 finds all that came since checkpoint 3"
