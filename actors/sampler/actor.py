"""Sampler room: starts prompt groups while engines have room and the staleness bound leaves credits.

Reads  verdicts, policy, active, knobs (logs)    Writes  prompts    Owns  the place in the data (state `sampler`, `sampler.data`)
One commit appends the samples of the new groups, lists the groups as open, counts them as issued and moves the cursor,
guarded by the cursor's old value: killed anywhere, no prompt is skipped and none is issued twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from zlib import crc32

import msgspec

from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.logs import fold_log
from actors.runtime.pictures import PromptPictures
from actors.runtime.prompts import DataSpec, Prompt, Prompts, most_new_tokens, read_apart
from actors.runtime.run import RunEnds
from actors.runtime.seeds import seed_for
from actors.runtime.staleness import rule_of
from actors.sampler.admission import engine_room, group_credits
from actors.sampler.order import Cursor, RowOrder
from actors.sampler.progress import SamplerProgress, mask_of
from bus import Commit, Entry, Guard, Out, Tail, ledger
from bus.knobs.live import KnobValues
from bus.messages.base import pack_ints
from bus.messages.events import EventKind
from bus.messages.groups import OpenGroup
from bus.messages.policy import GroupsGivenUp
from bus.messages.reasons import DropReason
from bus.messages.samples import Picture, SampleTask, Sampling
from bus.messages.waits import Wait
from bus.streams.hop import id_key
from bus.topology import ACTIVE, GROUPS, PARKED, POLICY, PREFIXES, PROMPTS, TAIL, VERDICTS

GROUPS_PER_COMMIT = 16
QUIET_S = 3.0  # without news; then what is held here is compared with the run's list
LOOK_AGAIN_S = 0.05  # at free slots of engines, which nobody tells the sampler


class SamplerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings of the sampler."""

    data: DataSpec
    n_samples_per_prompt: int
    num_rollout: int
    shuffle: bool = True
    stop_token_ids: tuple[int, ...] = ()
    context: int = 0  # most tokens of a prompt and its response together; 0 = as many as engines take
    rollout_stop: tuple[str, ...]
    rm_type: str
    top_k: int = -1
    lookahead: int = 0
    keeps_checkpoints: bool = True
    batch_hook_timeout_s: float  # of a data source of the user's, for each row


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

    def __init__(self, context: Context, spec: SamplerSpec, found: Prompts) -> None:
        self._context = context
        self._spec = spec
        self._prompts, self._too_long, self._unseen = found.prompts, found.too_long, found.unseen
        self._pictures = PromptPictures(context)
        self._order = RowOrder(parts=found.parts, run_seed=context.spec.run_seed, shuffle=spec.shuffle)
        self._data = f"{len(self._prompts)}:{_digest(self._prompts)}"
        self._row_of = {f"p{prompt.index}": row for row, prompt in enumerate(self._prompts)}

    async def run(self) -> None:
        """Waits for news of groups, steps and versions (woken by the blocking read); fills free slots after each."""
        context = self._context
        if self._too_long:
            await context.event(EventKind.PROMPTS_LEFT_OUT, f"{self._too_long} prompts exceed the length limit")
        if self._unseen:
            text = f"{len(self._unseen)} prompts whose pictures cannot be shown, the first: {self._unseen[0]}"
            await context.event(EventKind.PROMPTS_LEFT_OUT, text)
        await self._note_data()
        tail = Tail(context.bus, [VERDICTS, POLICY, ACTIVE])
        try:
            await self._rebuild(tail)
            heard_at = context.clock.monotonic()
            while not context.draining.is_set():
                if context.bus.link.server_restarts != self._restarts:
                    await self._rebuild(tail)
                issued = 0 if self._progress.finished else await self._fill()
                wait = Wait.NEWS if issued else Wait.ENGINE_SLOTS if self._credits else Wait.CREDITS
                with context.waiting(wait):
                    news = await tail.read(LOOK_AGAIN_S if self._credits else 0.5)
                now = context.clock.monotonic()
                if news or issued:
                    heard_at = now
                elif now - heard_at > QUIET_S:
                    heard_at = now
                    await self._reconcile()
                await fold_log(context, news, self._hear)
                if any(entry.stream is POLICY for entry in news):  # samples may have been acknowledged before it was said
                    await self._pictures.free()
        finally:
            await self._pictures.free()
            await tail.close()

    async def _note_data(self) -> None:
        """Say where the prompts are others than those that the run had: its place among them now means others."""
        known = await self._context.bus.state("sampler.data")
        if known == self._data:
            return
        if known:
            now, before = str(len(self._prompts)), known.partition(":")[0]
            what = f"not the {before}" if now != before else f"others than the {before}"
            first = (await self._context.bus.state_as("sampler", Position.parse)).cursor.group + 1
            text = f"{self._spec.data.path} has {now} prompts, and {what} that the run had; it goes on at its place among them, "
            text += f"and from group {_group_id(first)} on the id of a prompt means its row there"
            await self._context.event(EventKind.PROMPTS_CHANGED, text)
        await self._context.bus.commit(Commit(state={"sampler.data": self._data}))

    def _hear(self, entry: Entry, message: object) -> None:
        self._progress.fold(message)
        if isinstance(message, GroupsGivenUp) and message.reissue:
            self._again.append((entry.id, message.prompts))

    async def _reconcile(self) -> None:
        """Nothing moves: give up credits of samples that the run no longer lists. Their closing was said on a server that
        forgot it, or to one that was asked before."""
        listed: dict[str, int] = {}
        for opened in await self._listed():
            listed[opened.group_id] = listed.get(opened.group_id, 0) | mask_of(opened.indexes)
        gone = self._progress.unlisted(listed)
        for group_id, mask in gone.items():
            self._progress.close(group_id, mask)
        if gone:
            await self._context.event(EventKind.SLOTS_FREED, f"samples of {len(gone)} groups are closed, which was not heard")

    async def _listed(self) -> list[OpenGroup]:
        """The run's open samples, by group and part."""
        return list((await self._context.bus.open_groups()).values())

    async def _rebuild(self, tail: Tail) -> None:
        """Everything in memory from the streams: positions first, so that nothing falls between scan and tail."""
        bus = self._context.bus
        self._restarts = bus.link.server_restarts
        self._progress = SamplerProgress(keeps=self._spec.keeps_checkpoints)
        self._credits = False
        self._again: list[tuple[str, tuple[str, ...]]] = []
        await tail.open()
        newest = await bus.last(VERDICTS)
        tail.positions[VERDICTS.name] = newest[0].id if newest else "0"
        self._position = await bus.state_as("sampler", Position.parse)
        kept = {entry.fields.get("id", "") for entry in await bus.scan_all(GROUPS)}
        for key, opened in (await bus.open_groups()).items():
            self._pictures.know(opened.blobs)
            self._progress.issued(opened, judged=key in kept)
        await self._issue_again()

    async def _issue_again(self) -> None:
        """After the bus was lost and restored from a checkpoint, every open group's samples are gone: put them back. Those of a
        prompt that the data holds no more, or another one under its id, are dropped. The state field `reissue` says how far this
        came, so that a kill in between repeats nothing."""
        bus = self._context.bus
        done = await bus.state("reissue")
        if not done.startswith("pending"):
            return
        groups = await bus.open_groups()
        gone: list[str] = []
        for group_id, opened in groups.items():
            if group_id <= done.partition(":")[2]:
                continue
            then = f"pending:{group_id}"
            row = self._row_of.get(opened.prompt_id)
            if row is None or opened.prompt_crc != _crc(self._prompts[row]):
                books = ledger.dropped(DropReason.PROMPT_GONE, len(opened.indexes), 0)
                await bus.commit(Commit(close_groups=(group_id,), ledger=books, guard=Guard("reissue", done, then)))
                self._progress.close(group_id)
                gone.append(opened.prompt_id)
                done = then
                continue
            pictures = await self._pictures.put(self._prompts[row]) or ()
            opened = msgspec.structs.replace(opened, blobs=tuple(picture.blob for picture in pictures))
            tasks = self._tasks(opened, self._prompts[row], self._context.knobs, pictures)
            fault_point(self._context.name, "reissuing")
            outs = [Out(PROMPTS, task) for task in tasks]
            named = {group_id: msgspec.msgpack.encode(opened)} if pictures else {}
            guard = Guard("reissue", done, then)
            await bus.commit(Commit(append=outs, open_groups=named, guard=guard, bounded=True))
            done = then
        await bus.commit(Commit(guard=Guard("reissue", done, "done")))
        await self._context.event(EventKind.ISSUED_AGAIN, f"{len(groups) - len(gone)} groups of a lost bus")
        if gone:
            text = f"{len(gone)} open groups are of prompts that {self._spec.data.path} holds no more, the first {gone[0]}"
            await self._context.event(EventKind.PROMPTS_GONE, f"{text}; they are dropped")

    async def _fill(self) -> int:
        """Issue what fits; returns the number of groups issued."""
        context, progress, spec = self._context, self._progress, self._spec
        knobs = context.knobs
        self._credits = False
        group = spec.n_samples_per_prompt
        batch, over = int(knobs.rollout_batch_size), int(knobs.over_sampling_batch_size)
        waves = progress.drops_in_a_row / (group * max(batch, over))
        if knobs.max_waves and waves >= knobs.max_waves:
            raise RunEnds(
                f"filter starving: {progress.drops_in_a_row} samples in a row were dropped, the last as {progress.last_drop} "
                f"({waves:.0f} waves of {max(batch, over)} groups; --max-waves {knobs.max_waves}). Make the prompts easier or "
                "harder, change --dynamic-sampling-filter-path, or raise --max-waves."
            )
        if progress.active_step < 0:
            return 0  # nobody serves a version yet: samples issued now would wait, not run
        bound = int(knobs.max_weight_staleness)
        credits = group_credits(
            bound=bound,
            interval=int(knobs.update_weights_interval),
            batch=batch,
            over=over,
            group=group,
            lookahead=spec.lookahead if rule_of(str(knobs.staleness_policy), bound) == "wait" else 0,
            open_samples=progress.open_samples,
            untrained=progress.untrained,
            coming=progress.coming(int(knobs.update_weights_interval)),
            unjudged=progress.unjudged,
            steps_left=spec.num_rollout - max(progress.step, 0),
        )
        self._credits = credits > 0
        if not credits:
            return 0
        room = engine_room(slots=self._slots(knobs), under_way=await self._under_way(), group=group)
        # A group that engines could begin is issued whole.
        groups = min(credits, -(-max(0, room) // group))
        issued = 0
        while issued < groups:
            issued += await self._issue(min(GROUPS_PER_COMMIT, groups - issued), knobs)
        return issued

    def _slots(self, knobs: KnobValues) -> int:
        """Samples that all workers which serve a version take at once."""
        usual = int(knobs.sglang_server_concurrency)
        return sum(slots or usual for slots in self._progress.slots.values())

    async def _under_way(self) -> int:
        """Samples with the engines or waiting for them: entries leave these streams when a sample ends."""
        bus = self._context.bus
        return sum([await bus.length(stream) for stream in (PROMPTS, PARKED, PREFIXES, TAIL)])

    async def _issue(self, n_groups: int, knobs: KnobValues) -> int:
        context = self._context
        before, position = self._position, self._position
        outs: list[Out] = []
        opened: list[OpenGroup] = []
        for _ in range(n_groups):
            row, attempt, position = self._next(position)
            prompt = self._prompts[row]
            pictures = await self._pictures.put(prompt)
            if pictures is None:
                continue
            group = OpenGroup(
                group_id=_group_id(position.cursor.group),
                prompt_id=f"p{prompt.index}",
                n_samples=self._spec.n_samples_per_prompt,
                attempt=attempt,
                step=self._progress.active_step,
                source_index=prompt.index,
                epoch=position.cursor.epoch,
                blobs=tuple(picture.blob for picture in pictures),
                prompt_crc=_crc(prompt),
            )
            outs += [Out(PROMPTS, task) for task in self._tasks(group, prompt, knobs, pictures)]
            opened.append(group)
        fault_point(context.name, "before_append")
        await context.bus.commit(
            Commit(
                append=outs,
                open_groups={group.group_id: msgspec.msgpack.encode(group) for group in opened},
                ledger={"issued": len(outs)},
                guard=Guard("sampler", "" if before == Position() else before.text(), position.text()),
                bounded=True,
            )
        )
        fault_point(context.name, "after_append")
        self._position = position
        for group in opened:
            self._progress.issued(group)
        context.count("groups_issued", len(opened))
        return len(opened)

    def _next(self, position: Position) -> tuple[int, int, Position]:
        """(row, attempt, position after it): given-up prompts first, then the data set."""
        while self._again:
            entry_id, prompts = self._again[0]
            if id_key(position.reissued) >= id_key(entry_id) or not prompts:
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

    def _tasks(self, group: OpenGroup, prompt: Prompt, knobs: KnobValues, pictures: tuple[Picture, ...]) -> list[SampleTask]:
        """The samples of a group that are open under its key; they begin under the version served now or a later one."""
        spec = self._spec
        tokens = pack_ints(prompt.token_ids)
        context = 0 if prompt.response else spec.context
        tasks: list[SampleTask] = []
        for index in group.indexes:
            sample_id = f"{group.group_id}/{index}"
            tasks.append(
                SampleTask(
                    sample_id=sample_id,
                    group_id=group.group_id,
                    index=index,
                    n_samples=group.n_samples,
                    prompt_id=group.prompt_id,
                    prompt_tokens=tokens,
                    prompt_text=prompt.text,
                    label=prompt.label,
                    rm_type=str(prompt.metadata.get("rm_type", spec.rm_type)),
                    metadata=prompt.metadata,
                    sampling=Sampling(
                        temperature=1.0 if prompt.response else float(knobs.rollout_temperature),
                        top_p=float(knobs.rollout_top_p),
                        top_k=spec.top_k,
                        max_new_tokens=most_new_tokens(int(knobs.rollout_max_response_len), len(prompt.token_ids), context),
                        stop_token_ids=spec.stop_token_ids,
                        stop=spec.rollout_stop or msgspec.UNSET,
                        seed=seed_for(self._context.spec.run_seed, sample_id, group.attempt) & 0x7FFFFFFF,
                    ),
                    attempt=group.attempt,
                    knob_epoch=knobs.epoch,
                    step=max(0, self._progress.active_step),
                    given_tokens=pack_ints(prompt.response) if prompt.response else msgspec.UNSET,
                    given_mask=memoryview(bytes(prompt.mask)) if prompt.response else msgspec.UNSET,
                    inputs=pictures or msgspec.UNSET,
                )
            )
        return tasks


def _digest(prompts: Iterable[Prompt]) -> str:
    """Of texts and labels, in their order."""
    found = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        found.update(_line(prompt))
    return found.hexdigest()


def _crc(prompt: Prompt) -> int:
    """Of text and label."""
    return crc32(_line(prompt))


def _line(prompt: Prompt) -> bytes:
    return f"{len(prompt.text)}:{prompt.text}{prompt.label}\0".encode()


def _group_id(number: int) -> str:
    return f"g{number:07d}"


async def run(context: Context, spec: SamplerSpec) -> None:
    """The sampler's process."""
    values = {**context.knobs.values, "num_rollout": spec.num_rollout}
    found = await read_apart(context, spec.data, values, within_s=spec.batch_hook_timeout_s)
    if found is not None:
        await Sampler(context, spec, found).run()
