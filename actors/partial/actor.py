"""Partial room: keeps samples that stopped before their end, and offers them again ahead of fresh prompts.

Reads  parked (readers "partial"), policy (log)    Writes  prefixes, tail    Owns  nothing that outlives it
Each parked sample moves in one commit to `prefixes`: to be resumed, started again, or reported as given up; or, when it has
become long and slots are kept for such, to `tail`: to be resumed there.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from actors.partial.decide import ACTIONS, POLICIES, BufferPolicy, Plan, Waiting, fifo, mask_prefix
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.contained import named
from actors.runtime.context import Context
from actors.runtime.deadline import followed
from actors.runtime.hooks import copies, load_hook
from actors.runtime.logs import fold_log
from actors.runtime.refusals import RunEnds, Streak
from actors.runtime.whole import in_time
from bus import Commit, Entry, Out, Tail, ledger
from bus.messages.base import EMPTY
from bus.messages.events import EventKind
from bus.messages.policy import PolicyAnnounced, Restored
from bus.messages.reasons import DropReason
from bus.messages.samples import Parked, PrefixDropped, PrefixResume, Response, RolloutLost, SampleTask
from bus.messages.waits import Wait
from bus.topology import PARKED, POLICY, PREFIXES, TAIL

MOST_RAISED = 16  # times in a row


class PartialSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`buffer_filter`: a built-in policy by name or a dotted path of one's own."""

    buffer_filter: str = "fifo"
    mask_offpolicy: bool = False
    hooks_within_s: float = 0.0  # deadline of a policy of one's own


class PartialBuffer:
    """The room."""

    def __init__(self, context: Context, spec: PartialSpec) -> None:
        self._context = context
        self._spec = spec
        self._policy: BufferPolicy = POLICIES.get(spec.buffer_filter) or load_hook(spec.buffer_filter)
        self._consumer = Consumer(context, [PARKED], "partial", on_dead=as_lost(context, _dead))
        remedy = "Mend it, or choose another --buffer-filter-path."
        self._raised = Streak(context.clock.monotonic, "the buffer's policy", remedy, most=MOST_RAISED)
        self._step: int | None = None  # of the newest published weights, as far as it was heard

    async def run(self) -> None:
        """Until draining: waits for parked samples (woken by the blocking read) and for versions."""
        context = self._context
        async with Tail(context.bus, [POLICY]) as tail, self._consumer.leased(), followed(partial(self._follow, tail)):
            while not context.draining.is_set():
                with context.waiting(Wait.ENTRY, streams=PARKED.name) as heard:
                    if entries := await self._consumer.take(256, 0.5):
                        heard()
                await self._place(entries)

    async def _follow(self, tail: Tail, stop: asyncio.Event) -> None:
        """The step of what engines are given, from the policy log; woken by the blocking read. Not the step that is trained: with
        updates every third one a token made now may be two steps old, and what starts again for its age would do so for ever."""
        while not stop.is_set():
            await fold_log(self._context, await tail.read(0.5), self._hear, types=("policy.announced", "policy.restored"))

    def _hear(self, entry: Entry, message: PolicyAnnounced | Restored) -> None:
        self._step = message.version.step if isinstance(message, PolicyAnnounced) else message.step

    async def _place(self, entries: list[Entry]) -> None:
        waiting: list[Waiting] = []
        for order, entry in enumerate(entries):
            if (parked := await self._consumer.readable(entry)) is not None:
                waiting.append(Waiting(order, parked))
        if not waiting:
            return
        by_order = {w.order: w.parked for w in waiting}
        for plan in await self._plans(waiting):
            await self._move(entries[plan.order], by_order.pop(plan.order), plan.action)
        for order, parked in by_order.items():  # a policy of the user's that left some out: they resume last
            await self._move(entries[order], parked, "resume")

    async def _plans(self, waiting: list[Waiting]) -> list[Plan]:
        """What the policy says; first in, first out where it raises or says what cannot be done. Before a version was heard of the
        newest token is taken for new."""
        newest = max((s.step for w in waiting for s in w.parked.response.spans), default=0)
        step = newest if self._step is None else self._step
        try:
            if self._spec.buffer_filter in POLICIES:
                plans = list(self._policy(step, waiting))
            else:  # not in the event loop, which it would hold up
                name = f"--buffer-filter-path {self._spec.buffer_filter}"
                plans = await in_time(name, self._spec.hooks_within_s, lambda: list(self._policy(step, copies(waiting))))
            orders = [plan.order for plan in plans]
            known = {w.order for w in waiting}
            if len(set(orders)) < len(orders) or not set(orders) <= known or any(p.action not in ACTIONS for p in plans):
                raise ValueError(f"it gave plans that do not fit: {plans[:3]!r}")
            plans = [Plan(int(plan.order), plan.action) for plan in plans]
        except RunEnds:
            raise
        except Exception as error:  # noqa: BLE001 - what a policy raises costs its order, no sample
            said = f"{self._spec.buffer_filter}: {named(error)}"
            await self._context.refusals.add("buffer_filter", f"first in, first out instead: {said}", kind=EventKind.POLICY_RAISED)
            self._raised.failed(waiting[0].parked.task.group_id, said)
            return fifo(step, waiting)
        self._raised.worked()
        return plans

    async def _move(self, entry: Entry, parked: Parked, action: str) -> None:
        task, response = parked.task, parked.response
        # Whoever gave its slot back of its own accord was not interrupted.
        if action == "resume" and not self._context.knobs.partial_rollout and parked.reason not in ("slice", "tail"):
            action = "restart"
        books: dict[str, int] = {}
        out: PrefixResume | PrefixDropped
        if action == "drop":
            out = PrefixDropped(task=task, tokens_made=response.n_tokens)
        elif action == "restart":
            out = PrefixResume(task=task, response=Response(marks=response.marks))
            if response.n_tokens and not task.eval_name:  # an evaluation's samples are in no account
                books = ledger.dropped(DropReason.RESTARTED, 0, response.n_tokens)
        else:
            kept = mask_prefix(response) if self._spec.mask_offpolicy else response
            out = PrefixResume(task=task, response=kept, journal=parked.journal)
        stream = TAIL if isinstance(out, PrefixResume) and self._is_tail(parked, out.response) else PREFIXES
        if await self._consumer.commit(Commit(ack=(entry,), append=(Out(stream, out),), ledger=books)):
            self._context.count(f"prefixes/{action}" if stream is PREFIXES else "prefixes/tail")

    def _is_tail(self, parked: Parked, response: Response) -> bool:
        """Whether it was parked for the tail's slots, or ran there and was parked for another reason."""
        after = int(self._context.knobs.tail_after_tokens or 0)
        long = 0 < after <= response.n_tokens and not parked.task.eval_name
        return response.n_tokens > 0 and (parked.reason == "tail" or long)


def _dead(entry: Entry, lost: RolloutLost) -> Commit:
    """What follows a dead entry: generation reports the sample as lost."""
    task = SampleTask(
        sample_id=lost.sample_id,
        group_id=lost.group_id,
        index=0,
        n_samples=lost.n_samples,
        prompt_id=lost.prompt_id,
        prompt_tokens=EMPTY,
        eval_name=lost.eval_name,
    )
    return Commit(append=(Out(PREFIXES, PrefixDropped(task=task, tokens_made=lost.tokens_made, reason=lost.reason)),))


async def run(context: Context, spec: PartialSpec) -> None:
    """The partial buffer's process."""
    await PartialBuffer(context, spec).run()
