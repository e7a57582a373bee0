"""Generation room: one elastic worker with one engine.

Reads  tail, prefixes, eval.prompts, prompts (readers "generation"), active, policy (logs)
Writes  rollouts, eval.rollouts, parked
Owns   its leases (leasing.py); prefixes of long samples saved on the bus every `partial_save_tokens` tokens
A sample leaves in one commit: done, lost, or parked with what it has. Killed at any await, its entry is claimed by a peer
after the lease, which goes on from the last saved prefix. A sample's first token is made by its task's step or a later one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from actors.generation.engine import (
    AnswerBroken,
    AnswerRefused,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
    RouteBroken,
    VersionUnknown,
)
from actors.generation.leasing import LEASED, Leases
from actors.generation.pace import Pace
from actors.generation.sample import Running, start
from actors.generation.sharing import TURN, Sharing
from actors.generation.spec import GenerationSpec, open_link
from actors.runtime.child import Child
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.logs import fold_log
from actors.runtime.prompts import vocabulary_of
from actors.runtime.refusals import Row
from bus import Commit, Entry, Out, Tail, ledger
from bus.errors import Poison
from bus.messages.control import BOOTING
from bus.messages.policy import Activate, PolicyActive, Sending, Turn
from bus.messages.samples import Parked, ParkReason, PrefixDropped, PrefixResume, RolloutDone, RolloutLost, SampleTask
from bus.messages.versions import VersionSpan
from bus.topology import ACTIVE, EVAL_PROMPTS, EVAL_ROLLOUTS, PARKED, POLICY, ROLLOUTS

# Of `policy` only these: steps are large, and not for workers.
FOR_US = ("active.order", "active.state", "policy.sending", "policy.restored", TURN)
RESENDS = 8  # in a row without a new token; then the sample is parked
AGAIN_S = 0.1  # before a request whose way broke is sent again
MOST_BROKEN = 2  # answers to one sample that cannot be read; one more, and it is poison
MOST_REFUSED, GROUPS_REFUSED = 32, 8  # answers in a row, and groups among them; then it is not the samples


class Worker:
    """The room."""

    def __init__(self, context: Context, spec: GenerationSpec, spare: Child | None = None) -> None:
        self._context = context
        self._spec = spec
        self._link = open_link(context, spec, spare)
        self._sharing = Sharing(context, self._link, spec.gives_back)
        self._pace = Pace(context, self._link, spec.max_running, spec.tail_wait_s)
        self._vocabulary = vocabulary_of(spec.model_path)
        self._consumer = Consumer(context, LEASED, "generation", on_dead=as_lost(context, _dead), vocabulary=self._vocabulary)
        self._leases = Leases(
            context, self._link, self._sharing, self._pace, self._consumer, lambda: self._order is not None, spec.hold_s
        )
        remedy = "The engine serves another model than this worker was told of, or is broken."
        self._answers = Row(
            context.clock.monotonic, "the engine's answers", remedy, most=MOST_REFUSED, of=GROUPS_REFUSED
        )
        self._running: dict[str, Running] = {}
        self._order: Activate | None = None
        self._changed = asyncio.Event()  # an order arrived, others serve something else, the engine changed

    async def run(self) -> None:
        """Shutdown: 1 no new leases · 2 running samples are aborted and parked · 3 lease keeper and follower stop ·
        4 engine and connections close."""
        tail = Tail(self._context.bus, [ACTIVE, POLICY], start="$")
        await tail.open()
        await self._sharing.open()
        stop = asyncio.Event()
        try:
            async with self._consumer.leased(self._leases.free), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_orders(tail, stop))
                tasks.create_task(self._keep_engine(stop))
                tasks.create_task(self._pace.follow(self._consumer.reader, stop))
                try:
                    async with asyncio.TaskGroup() as samples:
                        await self._leases.take(samples, self._handle)
                        await self._abort_all()
                finally:
                    stop.set()
                    self._changed.set()
                    self._link.interrupt()
        finally:
            await self._link.close()
            await tail.close()

    # -- engine -------------------------------------------------------------------------------------------------

    async def _follow_orders(self, tail: Tail, stop: asyncio.Event) -> None:
        """The newest order that names this worker, the trainer's word that it sends, whose turn it is; woken by the blocking
        read. Older orders tell what labels stand for."""
        await fold_log(self._context, reversed(await self._context.bus.last(ACTIVE, 64)), self._recall)
        while not stop.is_set():
            await fold_log(self._context, await tail.read(0.5), self._hear, types=FOR_US)

    def _recall(self, entry: Entry, message: Activate | PolicyActive) -> None:
        if isinstance(message, Activate):
            self._link.know(message)
        else:
            self._leases.standing.fold(message)
            self._pace.hear(message)

    def _hear(self, entry: Entry, message: object) -> None:
        self._leases.standing.fold(message)
        self._leases.wake()
        if isinstance(message, PolicyActive):
            self._pace.hear(message)
            self._changed.set()
        if isinstance(message, Sending) and self._context.name in message.workers:
            self._link.sending(message.version.id)
        if isinstance(message, Turn):
            self._sharing.hear(message)
            self._changed.set()
            self._link.interrupt()
        if isinstance(message, Activate):
            self._link.know(message)
            ours = not message.workers or self._context.name in message.workers
            if ours and (self._order is not None or not self._link.has(message)):
                self._order = message
                self._changed.set()
                self._link.interrupt()

    async def _keep_engine(self, stop: asyncio.Event) -> None:
        """Boots the engine, activates what is ordered, boots it again when it failed, keeps out of the way in the trainer's
        turn; woken by `_changed`."""
        link, sharing = self._link, self._sharing
        while not stop.is_set():
            await link.check()
            if sharing.aside:
                self._changed.clear()
                await sharing.step_aside()
                with self._context.waiting("the trainer's turn on the GPU to end"):
                    await self._until_changed()
                continue
            if link.absent:
                self._changed.clear()
                with self._context.waiting(BOOTING):
                    await link.boot(lambda: sharing.aside)
                if link.absent:  # draining, or the trainer's turn came in between
                    await self._until_changed()
                continue
            order, self._order = self._order, None
            if order is not None:
                try:
                    with self._context.waiting(f"activation of version {order.version.id}"):
                        await link.activate(order, lambda: self._order is not None or sharing.aside or stop.is_set())
                except (EngineUnavailable, RequestRefused) as error:
                    await link.fail(error)
                self._leases.wake()
                continue
            await sharing.come_back()
            self._changed.clear()
            if self._leases.standing.behind(link.serving):
                await link.leave_route()
            if self._order is None and not link.absent and not sharing.aside and not stop.is_set():
                await self._until_changed()

    async def _until_changed(self) -> None:
        """A second at most, since servers die without a word."""
        try:
            await asyncio.wait_for(self._changed.wait(), 1.0)
        except TimeoutError:
            return

    # -- samples ------------------------------------------------------------------------------------------------

    async def _abort_all(self) -> None:
        """Ask the engine to end what runs; each sample parks itself with the tokens it has. Asked again until none is left:
        a request on its way was unknown to the engine the first time. Ends with the last sample or with the drain time."""
        engine = self._link.engine
        while engine is not None and self._context.in_flight:
            self._link.let_go()  # samples that wait there, or for a version, see that we are draining
            self._leases.wake()
            answers = await asyncio.gather(*map(engine.abort, list(self._running)), return_exceptions=True)
            for error in answers:
                if isinstance(error, EngineUnavailable | RequestRefused):
                    await self._link.fail(error)
                    return
                if error is not None:
                    raise error
            await self._context.clock.sleep(0.1)

    async def _handle(self, entry: Entry) -> None:
        """One entry to its commit. Failures of the engine park the sample; poison is buried with its group's marker."""
        try:
            await self._consumer.one(entry, self._do)
        finally:
            self._leases.done(entry)

    async def _do(self, entry: Entry, message: SampleTask | PrefixResume | PrefixDropped) -> None:
        if not isinstance(message, PrefixDropped):
            await self._run_sample(entry, message)
            return
        task = message.task
        lost = RolloutLost(
            sample_id=task.sample_id,
            group_id=task.group_id,
            n_samples=task.n_samples,
            reason=message.reason,
            prompt_id=task.prompt_id,
            tokens_made=message.tokens_made,
            eval_name=task.eval_name,
        )
        await self._commit(entry, lost)

    async def _run_sample(self, entry: Entry, message: SampleTask | PrefixResume) -> None:
        context = self._context
        task = message.task if isinstance(message, PrefixResume) else message
        pieces = await context.bus.load_prefix(task.sample_id) if entry.deliveries > 1 else []
        running = start(message, pieces, mask_prefix=self._spec.mask_offpolicy)
        resumed = running.base.n_tokens
        began = context.clock.monotonic()
        self._running[task.sample_id] = running
        reason: ParkReason | Literal["lease"] | None = None
        try:
            if not running.ended():
                reason = await self._leases.admit(running) or await self._generate(entry, running)
        finally:
            del self._running[task.sample_id]
        if reason == "lease":
            self._consumer.forget([entry])
            return
        response = running.response()
        out: RolloutDone | Parked
        if reason is None:
            out = RolloutDone(
                task=task,
                response=response,
                finish="stop" if running.finish == "stop" else "length",
                worker=context.name,
                resumed_tokens=resumed,
                generate_s=context.clock.monotonic() - began,
                running=context.in_flight,
            )
        else:
            out = Parked(task=task, response=response, reason=reason, worker=context.name)
            context.count(f"parked/{reason}")
        context.count("tokens", running.made_here)
        await self._commit(entry, out, ledger.spans_after(response.spans, running.counted), saved=running.has_saved)

    async def _generate(self, entry: Entry, running: Running) -> ParkReason | Literal["lease"] | None:
        """Stream tokens until the sample ends (None) or must be parked (the reason); "lease" when a peer took over."""
        slice_left = self._context.knobs.max_tokens_per_slice or running.remaining
        end = running.n_tokens + min(running.remaining, slice_left)
        why: ParkReason = "slice"
        leaves_at = self._pace.leaves_at(entry, running.task)
        if leaves_at is not None and leaves_at < end:
            end, why = leaves_at, "tail"
        idle = 0
        while idle <= RESENDS:
            before = running.n_tokens
            if before >= end:
                return why
            reason = await self._stream(entry, running, end - before)
            if reason != "again":
                return why if reason == "slice" else reason
            if running.ended():
                return None
            idle = 0 if running.n_tokens > before else idle + 1
        return "engine"

    async def _stream(
        self, entry: Entry, running: Running, max_tokens: int
    ) -> ParkReason | Literal["lease", "again"] | None:
        """One request to the engine. "again": it was ended for a reason that is not the sample's."""
        context, link = self._context, self._link
        await link.until_open()
        engine = link.engine
        if context.draining.is_set():
            return "drain"
        if engine is None or link.absent:
            return "engine"
        sampling = running.task.sampling
        running.finish = None
        request = GenerateRequest(
            rid=running.task.sample_id,
            input_ids=running.input_ids(),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            sampling_seed=sampling.seed,
            extra_key=link.salt or None,
            routing_key=running.task.group_id,
            vocabulary=self._vocabulary,
        )
        save_every = int(context.knobs.partial_save_tokens) if context.knobs.partial_rollout else 0
        try:
            async for chunk in engine.generate(request):
                running.take(chunk, link.versions)
                self._pace.tokens += len(chunk.token_ids)
                if running.finish is None and save_every and running.unsaved() >= save_every:
                    fault_point(context.name, "before_save")
                    held = await context.bus.save_prefix(
                        entry, context.name, running.task.sample_id, running.next_chunk()
                    )
                    fault_point(context.name, "after_save")
                    if not held:
                        context.count("leases_lost")
                        await engine.abort(running.task.sample_id)
                        return "lease"
        except RouteBroken as error:
            context.count("routes_broken")
            context.log.warning("sample %s is sent again: %s", running.task.sample_id, error)
            await context.clock.sleep(AGAIN_S)
            return "again"
        except VersionUnknown as error:
            if link.routed:
                return "again"  # a peer's engine is ahead of what we heard, or serves what we never will
            await link.fail(error, of=engine)
            self._changed.set()
            return "engine"
        except EngineUnavailable as error:
            await link.fail(error, of=engine)
            self._changed.set()
            return "engine"
        except AnswerRefused as error:
            context.count("answers_refused")
            self._answers.failed(running.task.group_id, str(error))
            running.broken += isinstance(error, AnswerBroken)
            if isinstance(error, AnswerBroken) and running.broken <= MOST_BROKEN:
                await context.clock.sleep(AGAIN_S)
                return "again"
            raise Poison(f"the engine's answer is refused: {error}") from error
        except RequestRefused as error:
            raise Poison(f"the engine refuses the request: {error}") from error
        self._answers.worked()
        if running.finish == "abort":
            if context.draining.is_set():
                return "drain"
            kept = link.resends and context.knobs.pause_generation_mode != "abort"
            return "again" if kept or link.released else "abort"
        if running.finish == "length" and running.remaining > 0:
            return "slice"
        if running.finish is None:
            return "engine"
        return None

    async def _commit(
        self, entry: Entry, out: RolloutDone | RolloutLost | Parked, made: Sequence[VersionSpan] = (), *, saved: bool = True
    ) -> None:
        """The sample leaves. `made`: spans of tokens that the ledger does not know yet. `saved`: pieces of it lie on the bus."""
        context = self._context
        is_eval = bool(out.eval_name if isinstance(out, RolloutLost) else out.task.eval_name)
        sample_id = out.sample_id if isinstance(out, RolloutLost) else out.task.sample_id
        stream = PARKED if isinstance(out, Parked) else EVAL_ROLLOUTS if is_eval else ROLLOUTS
        done = await self._consumer.commit(
            Commit(
                ack=(entry,),
                append=(Out(stream, out),),
                ledger=ledger.generated(context.name, made) if not is_eval else {},
                delete_prefixes=(sample_id,) if saved else (),
                bounded=not isinstance(out, Parked),
            )
        )
        if done:
            context.count("samples")


def _dead(entry: Entry, lost: RolloutLost) -> Commit:
    """A sample that no engine can run, or an entry that cannot be used: its group must still close."""
    stream = EVAL_ROLLOUTS if lost.eval_name or entry.stream is EVAL_PROMPTS else ROLLOUTS
    return Commit(append=(Out(stream, lost),), delete_prefixes=(lost.sample_id,))


async def run(context: Context, spec: GenerationSpec, spare: Child | None = None) -> None:
    """A worker's process."""
    await Worker(context, spec, spare).run()
