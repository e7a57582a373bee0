"""Generation room: one elastic worker with one engine.

Reads  tail, prefixes, eval.prompts, prompts (readers "generation"), active, policy (logs)
Writes  rollouts, eval.rollouts, parked
Owns   its leases (leasing.py); prefixes of long samples saved on the bus every `partial_save_tokens` tokens
A sample leaves in one commit: done, lost, or parked with what it has. Killed at any await, its entry is claimed by a peer
after the lease, which goes on from the last saved prefix. A sample's first token is made by its task's step or a later one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import msgspec

from actors.generation.engine import EngineUnavailable, RequestRefused
from actors.generation.engines.records import engine_kind
from actors.generation.given import given_response
from actors.generation.leasing import LEASED, Leases
from actors.generation.opening import open_link
from actors.generation.pace import Pace
from actors.generation.pictures import Pictures
from actors.generation.rollouts.live import Live
from actors.generation.rollouts.outcome import outcome_of
from actors.generation.rollouts.programs import LeftOut, Programs
from actors.generation.rollouts.session import Program
from actors.generation.rollouts.world import Worlds
from actors.generation.sample import Running, start
from actors.generation.sharing import TURN, Sharing
from actors.generation.spec import GenerationSpec
from actors.generation.turns import Leaves, Turns
from actors.runtime.child import Child
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.content import lost_of
from actors.runtime.context import Context
from actors.runtime.deadline import within
from actors.runtime.logs import fold_log
from actors.runtime.loop import collect_seldom
from actors.runtime.prompts import decoder_of, routed_shape, vocabulary_of
from bus import Commit, Entry, Out, Tail, ledger
from bus.asides import put_aside, response_aside, response_whole
from bus.errors import Transient
from bus.inspect import wall_of
from bus.messages.active import Activate, PolicyActive
from bus.messages.policy import Sending, Turn
from bus.messages.reasons import DropReason
from bus.messages.samples import Parked, PrefixDropped, PrefixResume, Response, RolloutDone, RolloutLost, SampleTask
from bus.messages.waits import Wait
from bus.topology import ACTIVE, EVAL_PROMPTS, EVAL_ROLLOUTS, PARKED, POLICY, ROLLOUTS

# Of `policy` only these: steps are large, and not for workers.
FOR_US = ("active.order", "active.state", "policy.sending", "policy.restored", TURN)


def once() -> Callable[[], bool]:
    """False at the first call alone: who gives up after one try asks it."""
    calls = count()
    return lambda: next(calls) > 0


class Worker:
    """The room."""

    def __init__(self, context: Context, spec: GenerationSpec, spare: Child | None = None, program: Program | None = None) -> None:
        self._context = context
        self._spec = spec
        self._link = open_link(context, spec, spare)
        self._sharing = Sharing(context, self._link, spec.gives_back, spec.lent_s)
        self._pace = Pace(context, self._link, spec.max_running, spec.tail_wait_s)
        self._vocabulary = vocabulary_of(spec.model_path)
        self._consumer = Consumer(context, LEASED, "generation", on_dead=as_lost(context, _dead), vocabulary=self._vocabulary)
        self._leases = Leases(
            context, self._link, self._sharing, self._pace, self._consumer,
            lambda: self._order is not None, spec.hold_s, spec.takes_samples,
        )  # fmt: skip
        decode = decoder_of(spec.model_path)
        self._programs = Programs(context, spec.program, spec.program_deadline_s, spec.program_values, decode, program)
        self._worlds = Worlds(context, spec.environments_s) if spec.environments_s else None
        pictures = Pictures(context, "" if engine_kind(spec.engine).reads_ids else spec.model_path)
        routed = routed_shape(spec.model_path) if spec.routed else None
        self._changed = asyncio.Event()  # an order arrived, others serve something else, the engine changed
        self._turns = Turns(context, self._link, self._pace, self._vocabulary, self._changed.set, routed, pictures, decode)
        self._running: dict[str, Live] = {}
        self._order: Activate | None = None

    async def run(self) -> None:
        """Shutdown: 1 no new leases · 2 running samples are aborted and parked · 3 lease keeper and follower stop ·
        4 engine and connections close."""
        tail = Tail(self._context.bus, [ACTIVE, POLICY], start="$")
        await tail.open()
        await self._sharing.open()
        stop = asyncio.Event()
        try:
            async with self._consumer.leased(self._leases.claimable), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_orders(tail, stop))
                tasks.create_task(self._keep_engine(stop))
                tasks.create_task(self._pace.follow(self._consumer.reader, stop))
                beside: list[asyncio.Task[None]] = []
                if self._worlds is not None:
                    await self._worlds.open()
                    beside.append(tasks.create_task(self._worlds.follow()))
                try:
                    async with asyncio.TaskGroup() as samples:
                        await self._leases.take(samples, self._handle)
                        await self._park_all()
                finally:
                    stop.set()
                    for one in beside:
                        one.cancel()
                    self._changed.set()
                    self._link.interrupt()
        finally:
            await self._link.close()
            await tail.close()
            if self._worlds is not None:
                await self._worlds.close()

    # -- engine -------------------------------------------------------------------------------------------------

    async def _follow_orders(self, tail: Tail, stop: asyncio.Event) -> None:
        """The newest order that names this worker, the trainer's word that it sends, whose turn it is; woken by the blocking
        read. Older orders tell what labels stand for."""
        told = reversed(await self._context.bus.last(ACTIVE, 64))
        await fold_log(self._context, told, self._recall, types=("active.order", "active.state"))
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
            if self._sharing.lent:
                self._order = None  # of a turn that is over; it is told anew
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
            sharing.look()
            if sharing.is_to_boot() and link.absent:
                with self._context.waiting(Wait.BOOTING):
                    await self._boot(once())
            if sharing.aside:
                self._changed.clear()
                with self._context.waiting(sharing.waits_for, first=sharing.lent):
                    await sharing.step_aside(self._park_all)
                    await self._until_changed()
                continue
            if link.absent:
                self._changed.clear()
                with self._context.waiting(Wait.BOOTING):
                    await self._boot(lambda: sharing.aside, unwanted=lambda: sharing.recalled)
                if link.absent:  # draining, or the trainer's turn came in between
                    await self._until_changed()
                continue
            order, self._order = self._order, None
            if order is not None:
                try:
                    with self._context.waiting(Wait.ACTIVATION, version=order.version.id):
                        await link.activate(order, lambda: self._order is not None or sharing.aside or stop.is_set())
                except (EngineUnavailable, RequestRefused) as error:
                    await link.fail(error)
                self._leases.wake()
                continue
            await sharing.come_back()
            self._changed.clear()
            if self._leases.standing.behind(link.serving):
                await link.route(joins=False)
            if self._order is None and not link.absent and not sharing.aside and not stop.is_set():
                await self._until_changed()

    async def _boot(self, given_up: Callable[[], bool], unwanted: Callable[[], bool] = lambda: False) -> None:
        """A boot takes minutes: it ends with the run, and when it is `unwanted` (a lent GPU is wanted back). In our own turn the
        trainer waits for its end."""
        link = self._link
        async with asyncio.TaskGroup() as tasks:
            boot = tasks.create_task(link.boot(given_up))
            boot.add_done_callback(lambda _: self._changed.set())
            while not (boot.done() or self._context.draining.is_set() or unwanted()):
                self._changed.clear()
                await self._until_changed()
            boot.cancel()
        if link.absent and link.process is not None:
            await link.process.stop()

    async def _until_changed(self) -> None:
        """A second at most, since servers die without a word."""
        await within(1.0, self._changed)

    # -- samples ------------------------------------------------------------------------------------------------

    async def _park_all(self) -> None:
        """Ask the engine to end what runs; each sample parks itself with the tokens it has. Asked again until none is left:
        a request on its way was unknown to the engine the first time. Ends with the last sample or with its caller's deadline."""
        engine = self._link.engine
        while engine is not None and self._context.in_flight:
            self._link.let_go()  # samples that wait there, or for a version, see that they are to leave
            self._leases.wake()
            for live in self._running.values():
                live.drain()
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
        await self._commit(entry, _lost(entry, message, reason=message.reason, tokens_made=message.tokens_made), None, {})

    async def _run_sample(self, entry: Entry, message: SampleTask | PrefixResume) -> None:
        context, programs = self._context, self._programs
        task = message.task if isinstance(message, PrefixResume) else message
        if task.given_tokens is not msgspec.UNSET:
            await self._give(entry, task)
            return
        if isinstance(message, PrefixResume):
            message = msgspec.structs.replace(message, response=await response_whole(context.bus, message.response))
        # Saved by a former delivery, to a worker that was killed or failed.
        pieces = await context.bus.load_prefix(task.sample_id) if entry.deliveries > 1 else []
        running = start(message, pieces, mask_prefix=self._spec.mask_offpolicy)
        if not running.marks:
            running.mark("issued", "", wall_of(entry.id))
        if entry.deliveries > 1:
            running.mark("delivered again", context.name, context.clock.wall())
        running.mark("resumed" if running.begun else "begun", context.name, context.clock.wall())
        saves = programs.resumable and bool(context.knobs.partial_rollout)
        began = context.clock.monotonic()
        try:
            while True:
                if running.begun and not programs.resumable:
                    running = programs.restarted(running, "what it talks to cannot be rebuilt")
                resumed = running.n_tokens
                self._plan(entry, running)
                live = Live(self._turns, self._leases.admit, entry, running, saves=saves, worlds=self._worlds)
                self._running[task.sample_id] = live
                settle = partial(outcome_of, running=running, vocabulary=self._vocabulary)
                found = await programs.play(live, self._consumer.attempt(entry), settle)
                if found != "diverged":
                    break
                running = programs.restarted(running, "it asked for something else than before")
        except LeftOut:
            context.count("tokens", running.made_here)
            lost = _lost(entry, task, reason="cancelled", tokens_made=running.n_tokens)
            return await self._commit(entry, lost, running, {DropReason.RESTARTED: running.thrown})
        finally:
            self._running.pop(task.sample_id, None)
        context.count("tokens", running.made_here)
        if isinstance(found, str):
            await self._park(entry, running, found)
            return
        running.mark("ended", context.name, context.clock.wall())
        out = RolloutDone(
            task=task,
            response=msgspec.structs.replace(found.response, marks=tuple(running.marks)),
            finish=found.finish,
            worker=context.name,
            resumed_tokens=resumed,
            generate_s=context.clock.monotonic() - began,
            running=running.beside,
            episode=found.episode,
        )
        thrown = {DropReason.DISCARDED: found.discarded, DropReason.RESTARTED: running.thrown}
        await self._commit(entry, await put_aside(context.bus, out), running, thrown)

    async def _give(self, entry: Entry, task: SampleTask) -> None:
        """A response of the data goes on as it is."""
        serving = self._link.serving
        response = given_response(task, serving) if serving is not None else None
        if response is None:
            raise Transient(f"no version is served while {task.sample_id} is taken")
        out = RolloutDone(task=task, response=response, finish="stop", worker=self._context.name)
        commit = Commit(
            ack=(entry,),
            append=(Out(ROLLOUTS, out),),
            ledger=ledger.generated(self._context.name, response.made),
            bounded=True,
        )
        if await self._consumer.commit(commit):
            self._context.count("samples")

    def _plan(self, entry: Entry, running: Running) -> None:
        """When this sample gives its slot to others of its own accord: one that could not go on never does."""
        if not self._programs.resumable:
            return
        knobs = self._context.knobs
        if knobs.max_tokens_per_slice:
            running.park_at = running.n_tokens + knobs.max_tokens_per_slice
        leaves_at = self._pace.leaves_at(entry, running.task)
        if leaves_at is not None and (running.park_at is None or leaves_at < running.park_at):
            running.park_at, running.park_why = leaves_at, "tail"

    async def _park(self, entry: Entry, running: Running, reason: Leaves) -> None:
        """It goes on elsewhere, or its peer has it already."""
        if reason == "lease" or reason == "diverged":
            self._consumer.forget([entry])
            return
        self._context.count(f"parked/{reason}")
        running.mark(f"parked: {reason}", self._context.name, self._context.clock.wall())
        nothing = Response(marks=tuple(running.marks))
        parked = Parked(task=running.task, response=nothing, reason=reason, worker=self._context.name)
        thrown = running.thrown
        if self._programs.resumable:
            so_far = msgspec.structs.replace(await response_aside(self._context.bus, running.response()), marks=nothing.marks)
            parked = msgspec.structs.replace(parked, response=so_far, journal=running.journal())
        else:
            thrown += running.n_tokens
        await self._commit(entry, parked, running, thrown={DropReason.RESTARTED: thrown})

    async def _commit(
        self, entry: Entry, out: RolloutDone | RolloutLost | Parked, running: Running | None, thrown: Mapping[DropReason, int]
    ) -> None:
        """The sample leaves. `thrown`: tokens that go nowhere, by reason; those of `running` that the ledger does not know yet are
        counted with them."""
        context = self._context
        is_eval = bool(out.eval_name if isinstance(out, RolloutLost) else out.task.eval_name)
        sample_id = out.sample_id if isinstance(out, RolloutLost) else out.task.sample_id
        stream = PARKED if isinstance(out, Parked) else EVAL_ROLLOUTS if is_eval else ROLLOUTS
        accounts: dict[str, int] = {}
        if running is not None and not is_eval:
            accounts = ledger.generated(context.name, running.uncounted())
            for reason, n in thrown.items():
                accounts |= ledger.dropped(reason, 0, n)
        done = await self._consumer.commit(
            Commit(
                ack=(entry,),
                append=(Out(stream, out),),
                ledger=accounts,
                delete_prefixes=(sample_id,) if running is None or running.has_saved else (),
                bounded=not isinstance(out, Parked),
            )
        )
        if done:
            context.count("samples")


def _lost(entry: Entry, message: Any, **fields: Any) -> RolloutLost:
    lost = lost_of(entry, message, "")
    assert lost is not None  # its names were looked at
    return msgspec.structs.replace(lost, **fields)


def _dead(entry: Entry, lost: RolloutLost) -> Commit:
    """A sample that no engine can run, or an entry that cannot be used: its group must still close."""
    stream = EVAL_ROLLOUTS if lost.eval_name or entry.stream is EVAL_PROMPTS else ROLLOUTS
    return Commit(append=(Out(stream, lost),), delete_prefixes=(lost.sample_id,))


async def run(context: Context, spec: GenerationSpec, spare: Child | None = None) -> None:
    """A worker's process."""
    collect_seldom()
    if spec.agent is None and not spec.rollout_function:
        return await Worker(context, spec, spare).run()
    if spec.agent is None:
        from actors.generation.rollouts.function import open_function as open_program
    else:  # a web server and transformers, which take their time
        from actors.generation.endpoint.opened import open_program  # type: ignore[assignment]
    async with open_program(context, spec) as program:
        await Worker(context, spec, spare, program).run()
