"""Trainer room: groups in, policy versions out.

Reads  groups (readers "trainer"), active, events, knobs    Writes  policy    Owns  weights, optimizer, step number, checkpoints
A group is acknowledged only after a checkpoint that contains its step is durable, so that a trainer killed anywhere
trains it again exactly if its gradient was lost. Version ids are never reused; a restart says from which step it goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.in_memory import in_use
from actors.runtime.priority import COMPUTE_NICE, lower_to
from actors.runtime.prompts import vocabulary_of
from actors.runtime.seeds import seed_for
from actors.trainer.accounts import trained_samples
from actors.trainer.backend import BatchRefused, StepBatch, StepResult
from actors.trainer.backends import open_backend
from actors.trainer.batch_hooks import BatchHooks
from actors.trainer.batches import Batch, Batches, pictures_of, sample_ids
from actors.trainer.convert import BatchFacts, facts_of, to_samples
from actors.trainer.courier import Courier
from actors.trainer.determinism import step_line, write_line
from actors.trainer.followers import Followers
from actors.trainer.intake import Intake
from actors.trainer.lender import Lender
from actors.trainer.record import RecordedBatch, path_of, read_record, write_record
from actors.trainer.refused import RefusedBatches
from actors.trainer.restart import Voice, begin
from actors.trainer.saver import SaveFailed, Saver
from actors.trainer.selfcheck import tell
from actors.trainer.spec import TrainerSpec
from actors.trainer.step_files import StepFiles
from actors.trainer.tuned import TunedSteps
from actors.trainer.turns import GpuTurns
from bus import Out
from bus.messages.control import STEP_BEGAN
from bus.messages.events import EventKind
from bus.messages.policy import Finished, StepDone
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.topology import TRAINED


class Trainer:
    """The room."""

    def __init__(self, context: Context, spec: TrainerSpec) -> None:
        self._context = context
        self._spec = spec
        self._backend = open_backend(spec.backend_name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._followers = Followers(spec.ranks, context.spec.run_dir, spec.train_master)
        self._intake = Intake(context, vocabulary_of(spec.backend.published_as or spec.backend.hf_checkpoint))
        self._hooks = BatchHooks(context, spec)
        self._refused = RefusedBatches(context, self._intake, self._backend, self._in_thread)
        self._saver = Saver(
            context,
            self._intake,
            self._in_thread,
            beside=self._beside,
            save=Path(spec.save),
            save_hf=spec.save_hf or "",
            keep_last=spec.keep_last,
            retain=spec.save_retain_interval or 0,
            fingerprint=spec.fingerprint,
        )
        self._batches = Batches(
            context, self._intake, interval=spec.update_weights_interval, lookahead=spec.lookahead, ci_test=spec.ci_test
        )
        self._version = PolicyVersion(id=0, step=0)
        self._voice = Voice(context)
        self._courier = Courier(context, spec.courier, self._backend, self._in_thread, Path(spec.weights_dir))
        self._turns = GpuTurns(context, spec.turns, self._backend, self._in_thread)
        self._lender = Lender(context, spec.turns, self._turns, self._intake)
        self._tuned = TunedSteps(context, self._backend, self._in_thread)
        self._step_files = StepFiles(context)
        self._unpublished = False  # since the engines on our GPUs had their turn last
        self._step_knobs: dict[str, Any] = {}
        self._step_epoch = 0  # of the knobs that the step under way took

    async def _in_thread(self, call: Any, *args: Any) -> Any:
        return await self._explained(asyncio.get_running_loop().run_in_executor(self._thread, call, *args))

    async def _beside(self, call: Any, *args: Any) -> Any:
        """In another thread than steps: what may meet the other ranks meanwhile."""
        return await self._explained(asyncio.to_thread(call, *args))

    async def _explained(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except RuntimeError as error:  # what torch raises when a peer is gone
            died = await self._followers.explain() if self._spec.ranks > 1 else None
            if died is not None:
                raise died from error
            raise

    async def run(self) -> None:
        """Shutdown: 1 the step under way ends · 2 last checkpoint · 3 `finished` when all steps are done · 4 other ranks ·
        5 threads. After a failure the other ranks are killed, since they may wait for a step that never comes."""
        os.environ.update(json.loads(self._spec.train_env_vars or "{}"))
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._followers.start()
                tasks.create_task(self._followers.watch(), name="ranks")
                await self._turns.take(first=True)  # engines that are up already make room for the model
                with self._context.waiting(Wait.MODEL):
                    await self._in_thread(self._backend.setup, self._spec.backend)
                    self._context.ranks = self._backend.others
                    await self._in_thread(lower_to, COMPUTE_NICE)
                await self._intake.reader.open()
                await self._courier.open()
                tasks.create_task(self._courier.follow(), name="courier")
                await self._restore(tasks)
                await self._train(tasks)
                await self._end(tasks)
                self._courier.stop()
                await self._followers.part(self._in_thread(self._backend.close))
        finally:
            self._courier.close()
            await self._followers.abandon()
            await self._intake.reader.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    # -- start --------------------------------------------------------------------------------------------------

    async def _restore(self, tasks: asyncio.TaskGroup) -> None:
        """Announce where we go on."""
        context = self._context
        start = await begin(context, self._spec, self._voice, self._intake, self._backend, self._in_thread)
        self._version = start.version
        if start.saved is not None:
            self._saver.saved_step = start.saved
        await self._voice.say(self._version, start.word)
        await self._publish(tasks)
        await self._courier.wait()
        context.version = self._version.id
        if start.saved is not None:
            where = start.word.checkpoint
            await context.event(EventKind.RESTORED, f"Loaded checkpoint from {where} at step {start.saved}", step=start.saved)

    # -- steps --------------------------------------------------------------------------------------------------

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        context, spec = self._context, self._spec
        while self._version.step < spec.num_rollout and not context.draining.is_set():
            await self._tuned.begin(self._version.step + 1)
            began = context.clock.monotonic()
            self._lender.begin()
            batch = await self._next_batch(tasks)
            if batch is None:
                return
            await self._lender.take()
            waited = context.clock.monotonic()
            facts = tasks.create_task(asyncio.to_thread(facts_of, batch.groups, step=self._version.step, bound=batch.bound))
            with context.finishing(Wait.STEP_ENDS):  # until the bus knows of the step: a trainer killed before that repeats it
                result = await self._step(batch, tasks)
                trained = context.clock.monotonic()
                if result is None:
                    continue
                if result.skipped and not spec.replay_from:
                    await self._refused.skipped(batch.keys, self._version.step + 1)
                    continue
                await self._done(batch, result, await facts, began=began, waited=waited, trained=trained)
            if self._version.step == 1 and spec.backend.objective.policy_loss != "nll":  # nobody sampled what is learned
                await tell(context, result.metrics, ends=spec.ci_test)
            if self._version.step % spec.update_weights_interval == 0 or self._version.step == spec.num_rollout:
                await self._publish(tasks)
            if self._save_due():
                await self._save(tasks)

    async def _next_batch(self, tasks: asyncio.TaskGroup) -> Batch | None:
        """None when draining. Shared GPUs are the engines' while this waits: several complete batches are trained in one turn."""
        spec = self._spec
        if spec.replay_from:
            record = await asyncio.to_thread(read_record, path_of(spec.replay_from, self._version.step + 1))
            return Batch(groups=record.groups, bound=self._batches.bound(self._context.knobs), images=record.images)
        batch = await self._batches.next(self._version, check=self._voice.check, idle=lambda: self._give_turn(tasks))
        return batch and msgspec.structs.replace(batch, images=await pictures_of(self._context, batch.groups))

    async def _step(self, batch: Batch, tasks: asyncio.TaskGroup) -> StepResult | None:
        """None when some of the batch was refused and given up, or a function of the user's failed on it."""
        knobs = self._context.knobs
        step = self._version.step
        values = knobs.live | {"max_weight_staleness": batch.bound}
        work = StepBatch(
            samples=to_samples(batch.groups, batch.images),
            step=step,
            seed=seed_for(self._context.spec.run_seed, "step", step),
            knobs=values,
        )
        if not await self._hooks.apply(batch.groups, work.samples):
            return None
        fault_point(self._context.name, "before_step")
        await self._courier.let_go()
        self._context.counters[STEP_BEGAN] = self._context.clock.wall()  # it may not end: a function of the user's is part of it
        try:
            async with self._batches.ahead(tasks, step=step + 1):
                result = await self._tuned.train(work, knobs.epoch)
        except BatchRefused as error:
            await self._refused.settle(batch, work, error)
            return None
        finally:
            del self._context.counters[STEP_BEGAN]
        if not result.skipped:
            self._refused.worked()
        self._step_knobs, self._step_epoch = self._tuned.used
        asked_for = set(result.flags.get("removed", ()))  # by a function of the user's, which are counted
        for reason, found in result.flags.items():
            if not (flagged := [one for one in found if one not in asked_for]):
                continue
            shown = ", ".join(flagged[:5])
            await self._context.event(EventKind.BATCH, f"step {step + 1}: {len(flagged)} samples ({shown})", about=reason)
        return result

    async def _done(
        self, batch: Batch, result: StepResult, facts: BatchFacts, *, began: float, waited: float, trained: float
    ) -> None:
        context, spec, groups = self._context, self._spec, batch.groups
        step = self._version.step
        number = await context.bus.next_number("version", at_least=self._version.id + 1)
        version = PolicyVersion(id=number, step=step + 1, parent=self._version.id)
        metrics = {
            **result.metrics,
            **facts.metrics,
            **self._lender.metrics(),
            "perf/wait_s": waited - began,
            "perf/turned_s": self._batches.turned_s,
            "perf/train_s": trained - waited,
            "perf/step_s": trained - began,
            "perf/tokens_per_s": sum(result.trained_tokens) / max(1e-9, trained - began),
        }
        prompts = {g.group_id: g.prompt_id for g in groups}
        done = StepDone(
            step=step + 1,
            version=version,
            trained_on=self._version,
            groups=tuple(prompts),
            prompts=tuple(prompts.values()),
            samples=sample_ids(groups),
            packing=result.packing,
            seed=seed_for(context.spec.run_seed, "step", step),
            knob_epoch=self._step_epoch,
            metrics=metrics,
            weights_hash=await self._in_thread(self._backend.weights_hash) if spec.record or spec.debug_determinism else "",
            wall=context.clock.wall(),
            lives=facts.lives,
        )
        if spec.debug_determinism:
            line = step_line(done.step, groups, done.seed, metrics, done.weights_hash)
            await self._step_files.write("hashes", done.step, context.spec.run_dir, write_line, Path(context.spec.run_dir), line)
        if spec.record:
            record = RecordedBatch(done=done, groups=groups, knobs=self._step_knobs, images=batch.images)
            await self._step_files.write("batch", done.step, path_of(spec.record, done.step), write_record, spec.record, record)
        if dumped := spec.backend.save_debug_train_data:
            await self._step_files.wrote("train_data", done.step, dumped, result.undumped)
        self._version = version
        fault_point(context.name, "before_done")
        await self._voice.say(version, done)
        fault_point(context.name, "after_done")
        if not spec.replay_from:
            told = trained_samples(list(zip(batch.parts, groups, strict=True)), result, step=step + 1)
            await context.bus.append([Out(TRAINED, some) for some in told], repeatable=True)
            await self._batches.done(batch, result, step=step)
        context.version = number
        context.count("steps")
        if not self._spec.save:
            await self._intake.acknowledge(step + 1, None)
            await self._saver.no_checkpoint(step + 1)

    # -- weights and checkpoints --------------------------------------------------------------------------------

    async def _publish(self, tasks: asyncio.TaskGroup) -> None:
        """The weights as they are now; where engines are aside until the end of our turn, then."""
        self._unpublished = True
        if not self._turns.shared:
            await self._courier.publish(tasks, self._version)

    async def _give_turn(self, tasks: asyncio.TaskGroup, *, last: bool = False) -> None:
        if not last and await self._lender.look(publishes=self._unpublished):
            self._unpublished = False
        if not self._turns.shared or not self._turns.held:
            return
        news, self._unpublished = self._unpublished, False
        if news:
            await self._courier.publish(tasks, self._version)
        await self._turns.give(publishes=news)

    def _save_due(self) -> bool:
        spec, step = self._spec, self._version.step
        if not spec.save:
            return False
        if spec.save_trigger_sentinel and Path(spec.save_trigger_sentinel).exists():
            Path(spec.save_trigger_sentinel).unlink(missing_ok=True)
            return True
        interval = int(self._context.knobs.save_interval or 0)
        return (interval > 0 and step % interval == 0) or step >= spec.num_rollout

    async def _save(self, tasks: asyncio.TaskGroup) -> None:
        await self._turns.take()
        await self._saver.begin(tasks, self._backend.save, self._version)
        if not self._spec.async_save:
            await self._saver.wait()

    async def _end(self, tasks: asyncio.TaskGroup) -> None:
        spec, step = self._spec, self._version.step
        await self._saver.wait()
        if spec.save and self._saver.saved_step < step:
            await self._save(tasks)
            await self._saver.wait()
        await self._give_turn(tasks, last=True)
        await self._courier.wait(last=True)
        if spec.save and self._saver.saved_step < step:
            raise SaveFailed(f"the last checkpoint (step {step}) could not be written to {spec.save}")
        if step >= spec.num_rollout:
            await self._voice.say(self._version, Finished(step=step, version=self._version))


async def run(context: Context, spec: TrainerSpec) -> None:
    """The trainer's process. What it published stays in memory while it lives, also without a launcher."""
    with in_use(Path(spec.weights_dir).parent):
        await Trainer(context, spec).run()
