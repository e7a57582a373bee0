"""Sampler room: starts prompt groups while slots are free.

Reads  verdicts, policy, active, knobs (logs)    Writes  prompts    Owns  the data set cursor (state field `sampler`)
One commit appends the samples of the new groups, lists the groups as open, counts them as issued and moves the cursor,
guarded by the cursor's old value: killed anywhere, no prompt is skipped and none is issued twice.
"""

from __future__ import annotations

import msgspec

from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.prompts import DataSpec, Prompt, load_prompts
from actors.runtime.run import Refused
from actors.runtime.seeds import seed_for
from actors.sampler.admission import free_slots, open_limit
from actors.sampler.order import Cursor, Order
from actors.sampler.progress import Progress
from bus import Commit, Guard, Out, Tail
from bus.knobs.live import KnobValues
from bus.messages.base import pack_ints
from bus.messages.groups import OpenGroup
from bus.messages.policy import GroupsGivenUp
from bus.messages.samples import SampleTask, Sampling
from bus.topology import ACTIVE, GROUPS, POLICY, PROMPTS, VERDICTS

GROUPS_PER_COMMIT = 16
QUIET_READS = 6  # of half a second without news


class SamplerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings of the sampler."""

    data: DataSpec
    n_samples_per_prompt: int
    num_rollout: int
    shuffle: bool = True
    stop_token_ids: tuple[int, ...] = ()
    rm_type: str = ""
    top_k: int = -1
    lookahead: int = 0
    update_weights_interval: int = 1


class Position(msgspec.Struct, frozen=True):
    """The sampler's durable state: cursor, and up to where given-up groups have been issued again."""

    cursor: Cursor = Cursor()
    reissued: str = "0-0"

    def text(self) -> str:
        return f"{self.cursor.text()}@{self.reissued}"

    @staticmethod
    def parse(text: str) -> Position:
        cursor, _, reissued = text.partition("@")
        return Position(Cursor.parse(cursor), reissued or "0-0")


class Sampler:
    """The room; `run` is its loop."""

    def __init__(self, context: Context, spec: SamplerSpec) -> None:
        self._context = context
        self._spec = spec
        prompts, too_long = load_prompts(spec.data)
        self._prompts: list[Prompt] = prompts
        self._too_long = too_long
        self._order = Order(n_prompts=len(prompts), run_seed=context.spec.run_seed, shuffle=spec.shuffle)
        self._row_of = {f"p{prompt.index}": row for row, prompt in enumerate(prompts)}

    async def run(self) -> None:
        """Waits for news of groups, steps and versions (woken by the blocking read); fills free slots after each."""
        context = self._context
        if self._too_long:
            await context.event("prompts left out", f"{self._too_long} prompts exceed the length limit", level="warning")
        tail = Tail(context.bus, [VERDICTS, POLICY, ACTIVE])
        try:
            await self._rebuild(tail)
            quiet = 0
            while not context.draining.is_set():
                if context.bus.link.server_restarts != self._restarts:
                    await self._rebuild(tail)
                issued = 0 if self._progress.finished else await self._fill()
                what = "slots: news of verdicts, policy or active" if not issued else "news"
                with context.waiting(what):
                    news = await tail.read(0.5)
                quiet = 0 if news or issued else quiet + 1
                if quiet >= QUIET_READS:
                    quiet = 0
                    await self._reconcile()
                for entry in news:
                    message = await context.bus.message(entry)
                    self._progress.fold(message)
                    if isinstance(message, GroupsGivenUp) and message.reissue:
                        self._again.append((entry.id, message.prompts))
        finally:
            await tail.close()

    async def _reconcile(self) -> None:
        """Nothing moves: give up slots of groups that the run no longer lists. Their closing was said on a server that
        forgot it, or to one that was asked before."""
        listed = await self._context.bus.hash_of(self._context.bus.keys.open_groups)
        gone = self._progress.untrained() - listed.keys()
        for group_id in gone:
            self._progress.close(group_id)
        if gone:
            await self._context.event("slots freed", f"{len(gone)} groups are closed, which was not heard")

    async def _rebuild(self, tail: Tail) -> None:
        """Everything in memory from the streams: positions first, so that nothing falls between scan and tail."""
        bus = self._context.bus
        self._restarts = bus.link.server_restarts
        self._progress = Progress()
        self._again: list[tuple[str, tuple[str, ...]]] = []
        await tail.open()
        newest = await bus.last(VERDICTS)
        tail.positions[VERDICTS.name] = newest[0].id if newest else "0"
        self._position = Position.parse(await bus.state("sampler"))
        kept = {entry.fields.get("group", "") for entry in await bus.scan_all(GROUPS)}
        for group_id in await bus.hash_of(bus.keys.open_groups):
            self._progress.issued(group_id, kept=group_id in kept)
        await self._issue_again()

    async def _issue_again(self) -> None:
        """After the bus was lost and restored from a checkpoint, every open group's samples are gone: put them back.
        The state field `reissue` says how far this came, so that a kill in between repeats nothing."""
        bus = self._context.bus
        done = await bus.state("reissue")
        if not done.startswith("pending"):
            return
        groups = sorted((await bus.hash_of(bus.keys.open_groups)).items())
        for group_id, raw in groups:
            if group_id <= done.partition(":")[2]:
                continue
            opened = msgspec.msgpack.decode(raw, type=OpenGroup)
            row = self._row_of.get(opened.prompt_id)
            if row is None:
                raise Refused(
                    f"open group {group_id} is of prompt {opened.prompt_id}, which {self._spec.data.path} does not hold. "
                    "Give the data set the run began with."
                )
            tasks = self._tasks(group_id, self._prompts[row], opened.attempt, self._context.knobs)
            then = f"pending:{group_id}"
            fault_point(self._context.name, "reissuing")
            outs = [Out(PROMPTS, task) for task in tasks]
            await bus.commit(Commit(append=outs, guard=Guard("reissue", done, then), bounded=True))
            done = then
        await bus.commit(Commit(guard=Guard("reissue", done, "done")))
        await self._context.event("issued again", f"{len(groups)} groups of a lost bus")

    async def _fill(self) -> int:
        """Issue what fits; returns the number of groups issued."""
        context, progress = self._context, self._progress
        knobs = context.knobs
        per_step = int(knobs.rollout_batch_size)
        per_version = per_step * self._spec.update_weights_interval
        waves = progress.drops_in_a_row / max(1, int(knobs.over_sampling_batch_size))
        if knobs.max_waves and waves >= knobs.max_waves:
            raise Refused(
                f"filter starving: {progress.drops_in_a_row} groups in a row were dropped ({waves:.0f} waves of "
                f"--over-sampling-batch-size {knobs.over_sampling_batch_size}; --max-waves {knobs.max_waves}). Make the "
                "prompts easier or harder, change --dynamic-sampling-filter-path, or raise --max-waves."
            )
        slots = free_slots(
            open_groups=progress.open_groups,
            in_generation=progress.in_generation,
            limit=open_limit(
                groups_per_step=per_version,
                max_staleness=int(knobs.max_weight_staleness),
                lookahead=self._spec.lookahead if knobs.staleness_policy == "wait" else 0,
            ),
            over_sampling=int(knobs.over_sampling_batch_size),
            still_needed=(self._spec.num_rollout - max(progress.step, 0)) * per_step
            + (int(knobs.over_sampling_batch_size) - per_step),
        )
        if progress.active_step < 0:
            slots = 0  # nobody serves a version yet: groups issued now would wait, not run
        issued = 0
        while issued < slots:
            issued += await self._issue(min(GROUPS_PER_COMMIT, slots - issued), knobs)
        return issued

    async def _issue(self, n_groups: int, knobs: KnobValues) -> int:
        context = self._context
        before, position = self._position, self._position
        outs: list[Out] = []
        opened: dict[str, bytes] = {}
        for _ in range(n_groups):
            row, attempt, position = self._next(position)
            prompt = self._prompts[row]
            group_id = f"g{position.cursor.group:07d}"
            outs += [Out(PROMPTS, task) for task in self._tasks(group_id, prompt, attempt, knobs)]
            opened[group_id] = msgspec.msgpack.encode(
                OpenGroup(
                    group_id=group_id,
                    prompt_id=f"p{prompt.index}",
                    n_samples=self._spec.n_samples_per_prompt,
                    attempt=attempt,
                    step=self._progress.step,
                    source_index=prompt.index,
                    epoch=position.cursor.epoch,
                )
            )
        fault_point(context.name, "before_append")
        await context.bus.commit(
            Commit(
                append=outs,
                open_groups=opened,
                ledger={"issued": len(outs)},
                guard=Guard("sampler", "" if before == Position() else before.text(), position.text()),
                bounded=True,
            )
        )
        fault_point(context.name, "after_append")
        self._position = position
        for group_id in opened:
            self._progress.issued(group_id)
        context.count("groups_issued", len(opened))
        return len(opened)

    def _next(self, position: Position) -> tuple[int, int, Position]:
        """(row, attempt, position after it): given-up prompts first, then the data set."""
        while self._again:
            entry_id, prompts = self._again[0]
            if _after(position.reissued, entry_id) or not prompts:
                self._again.pop(0)
                continue
            row = self._row_of.get(prompts[0])
            self._again[0] = (entry_id, prompts[1:])
            cursor = msgspec.structs.replace(position.cursor, group=position.cursor.group + 1)
            done = entry_id if len(prompts) == 1 else position.reissued
            if row is not None:
                return row, 1, Position(cursor, done)
        row, cursor = self._order.take(position.cursor)
        return row, 0, Position(cursor, position.reissued)

    def _tasks(self, group_id: str, prompt: Prompt, attempt: int, knobs: KnobValues) -> list[SampleTask]:
        spec = self._spec
        tokens = pack_ints(prompt.token_ids)
        tasks: list[SampleTask] = []
        for index in range(spec.n_samples_per_prompt):
            sample_id = f"{group_id}/{index}"
            tasks.append(
                SampleTask(
                    sample_id=sample_id,
                    group_id=group_id,
                    index=index,
                    n_samples=spec.n_samples_per_prompt,
                    prompt_id=f"p{prompt.index}",
                    prompt_tokens=tokens,
                    prompt_text=prompt.text,
                    label=prompt.label,
                    rm_type=str(prompt.metadata.get("rm_type", spec.rm_type)),
                    metadata=prompt.metadata,
                    sampling=Sampling(
                        temperature=float(knobs.rollout_temperature),
                        top_p=float(knobs.rollout_top_p),
                        top_k=spec.top_k,
                        max_new_tokens=int(knobs.rollout_max_response_len),
                        stop_token_ids=spec.stop_token_ids,
                        seed=seed_for(self._context.spec.run_seed, sample_id, attempt) & 0x7FFFFFFF,
                    ),
                    attempt=attempt,
                    knob_epoch=knobs.epoch,
                    step=self._progress.step,
                )
            )
        return tasks


def _after(position: str, entry_id: str) -> bool:
    """Whether `position` is at or past `entry_id`."""

    def parts(text: str) -> tuple[int, int]:
        ms, _, seq = text.partition("-")
        return int(ms), int(seq or 0)

    return parts(position) >= parts(entry_id)


async def run(context: Context, spec: SamplerSpec) -> None:
    """The sampler's process."""
    await Sampler(context, spec).run()
