"""Partial room: keeps samples that stopped before their end, and offers them again ahead of fresh prompts.

Reads  parked (readers "partial"), policy (log)    Writes  prefixes, tail    Owns  nothing that outlives it
Each parked sample moves in one commit to `prefixes`: to be resumed, started again, or reported as given up; or, when it has
become long and slots are kept for such, to `tail`: to be resumed there.
"""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from actors.partial.decide import POLICIES, BufferPolicy, Waiting, mask_prefix
from actors.runtime.consume import bury, header_number, keep_leases
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.hooks import load_hook
from bus import Commit, Entry, Out, Reader, Tail
from bus.errors import Poison
from bus.messages.base import EMPTY
from bus.messages.policy import Restored, StepDone
from bus.messages.samples import Parked, PrefixDropped, PrefixResume, Response, SampleTask
from bus.topology import PARKED, POLICY, PREFIXES, TAIL


class PartialSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`buffer_filter`: a built-in policy by name or a dotted path of one's own."""

    buffer_filter: str = "fifo"
    mask_offpolicy: bool = False


class PartialBuffer:
    """The room."""

    def __init__(self, context: Context, spec: PartialSpec) -> None:
        self._context = context
        self._spec = spec
        self._policy: BufferPolicy = POLICIES.get(spec.buffer_filter) or load_hook(spec.buffer_filter)
        self._reader = Reader(context.bus, [PARKED], "partial", context.name)
        self._step = 0

    async def run(self) -> None:
        """Until draining: waits for parked samples (woken by the blocking read) and for steps."""
        context = self._context
        tail = Tail(context.bus, [POLICY])
        stop = asyncio.Event()
        await self._reader.open()
        await tail.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keep_leases(context, self._reader, stop))
                tasks.create_task(self._follow(tail, stop))
                try:
                    while not context.draining.is_set():
                        with context.waiting("an entry of parked") as heard:
                            if entries := await self._reader.read(256, 0.5):
                                heard()
                        await self._place(entries)
                finally:
                    stop.set()
        finally:
            await self._reader.close()
            await tail.close()

    async def _follow(self, tail: Tail, stop: asyncio.Event) -> None:
        """The training step, from the policy log; woken by the blocking read."""
        while not stop.is_set():
            for entry in await tail.read(0.5):
                message = await self._context.bus.message(entry)
                if isinstance(message, StepDone | Restored):
                    self._step = message.step

    async def _place(self, entries: list[Entry]) -> None:
        waiting: list[Waiting] = []
        for order, entry in enumerate(entries):
            try:
                if entry.deliveries > self._context.bus.config.max_deliveries:
                    raise Poison(f"delivered {entry.deliveries} times without an acknowledgement")
                waiting.append(Waiting(order, cast(Parked, await self._context.bus.message(entry))))
            except Poison as error:
                await bury(self._context, self._reader, entry, None, error, _on_dead)
        if not waiting:
            return
        by_order = {w.order: w.parked for w in waiting}
        for plan in self._policy(self._step, waiting):
            parked = by_order.pop(plan.order)
            await self._move(entries[plan.order], parked, plan.action)
        for order, parked in by_order.items():  # a policy of the user's that left some out: they resume last
            await self._move(entries[order], parked, "resume")

    async def _move(self, entry: Entry, parked: Parked, action: str) -> None:
        task, response = parked.task, parked.response
        ledger: dict[str, int] = {}
        out: PrefixResume | PrefixDropped
        if action == "drop":
            out = PrefixDropped(task=task, tokens_made=response.n_tokens)
        elif action == "restart":
            out = PrefixResume(task=task, response=Response(tokens=EMPTY, logprobs=EMPTY, loss_mask=EMPTY))
            ledger = {"tokens/dropped/restarted": response.n_tokens} if response.n_tokens else {}
        else:
            out = PrefixResume(task=task, response=mask_prefix(response) if self._spec.mask_offpolicy else response)
        stream = TAIL if isinstance(out, PrefixResume) and self._is_tail(parked, out.response) else PREFIXES
        fault_point(self._context.name, "before_commit")
        result = await self._context.bus.commit(Commit(ack=(entry,), append=(Out(stream, out),), ledger=ledger))
        fault_point(self._context.name, "after_commit")
        self._reader.forget([entry])
        if result.done:
            self._context.count(f"prefixes/{action}" if stream is PREFIXES else "prefixes/tail")

    def _is_tail(self, parked: Parked, response: Response) -> bool:
        """Whether it was parked for the tail's slots, or ran there and was parked for another reason."""
        knobs = self._context.knobs.values
        after = int(knobs.get("tail_after_tokens", 0))
        long = 0 < after <= response.n_tokens and not parked.task.eval_name
        return response.n_tokens > 0 and (parked.reason == "tail" or long)


def _on_dead(entry: Entry, message: object, error: str) -> Commit:
    """A parked entry that cannot be read: generation reports the sample as lost."""
    tokens = header_number(entry, "tokens")
    task = SampleTask(
        sample_id=entry.fields.get("id", ""),
        group_id=entry.fields.get("group", ""),
        index=0,
        n_samples=0,
        prompt_id="",
        prompt_tokens=EMPTY,
    )
    dropped = PrefixDropped(task=task, tokens_made=tokens, reason="malformed")
    return Commit(append=(Out(PREFIXES, dropped),) if task.sample_id else ())


async def run(context: Context, spec: PartialSpec) -> None:
    """The partial buffer's process."""
    await PartialBuffer(context, spec).run()
