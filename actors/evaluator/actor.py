"""Evaluator: measures active versions on held-out prompts, beside training, on a share of its slots.

Reads  active, policy (logs), eval.scored (readers "evaluator")    Writes  eval.prompts, eval.results
Takes back  eval.prompts (readers "generation") of an evaluation that is given up
Owns   what it issued last and whether that is over (state fields `eval`, `eval.done`), what it gave up (`eval.given_up`),
eval_samples/; collected scores are its pending entries until the set is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from actors.evaluator.kept import file_of, kept_files
from actors.evaluator.schedule import DONE, Issued, due, is_under_way, result
from actors.evaluator.sets import EvalSet, Sets
from actors.runtime.consume import Consumer, as_lost
from actors.runtime.contained import named
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.logs import fold_log
from actors.runtime.pictures import PromptPictures
from actors.runtime.prompts import Tokenizer, most_new_tokens
from actors.runtime.readable import readable
from actors.runtime.seeds import seed_for
from bus import Commit, Entry, Guard, Out, Reader, Tail
from bus.errors import Poison
from bus.messages.active import PolicyActive
from bus.messages.base import pack_ints
from bus.messages.events import EventKind
from bus.messages.groups import index_of
from bus.messages.policy import Finished, Restored
from bus.messages.samples import Picture, RolloutLost, SampleTask, Sampling, Scored
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.topology import ACTIVE, EVAL_PROMPTS, EVAL_RESULTS, EVAL_SCORED, POLICY

TASKS_PER_COMMIT = 200
GIVEN_UP = "eval.given_up"
"""State field: steps of the evaluations that were given up last."""
MOST_GIVEN_UP = 16
HEARD = ("active.state", "policy.finished", "policy.restored")


class EvaluatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up settings."""

    sets: tuple[EvalSet, ...]
    num_rollout: int
    max_in_flight: int = 0  # samples; 0 = all at once
    keep: int = 20  # evaluations whose samples are kept, for each data set
    stop_token_ids: tuple[int, ...] = ()
    context: int = 0  # most tokens of a prompt and its response together; 0 = as many as engines take
    rollout_stop: tuple[str, ...]
    rm_type: str
    before_train: bool = True
    final: bool = True


class Evaluator:
    """The room."""

    def __init__(self, context: Context, spec: EvaluatorSpec, sets: Sets) -> None:
        self._context = context
        self._spec = spec
        self._sets = sets
        self._given_up: tuple[int, ...] = ()  # steps of evaluations that former settings issued; their scores may come late
        self._active: PolicyVersion | None = None
        self._restored = 0  # version that the trainer restored last: what is older may belong to a lost future
        self._final_step = -1
        self._issued = Issued()
        self._over_at = -1  # version of the last evaluation that is over
        self._last_step = -1  # that was evaluated, of the steps that the run still has
        self._began: dict[str, float] = {}
        self._pictures = PromptPictures(context)
        self._shown: dict[tuple[str, int], tuple[Picture, ...]] = {}  # by data set and prompt, of the evaluation under way
        self._members: dict[str, dict[int, tuple[Entry, Scored | RolloutLost]]] = {}  # by group and number
        self._consumer = Consumer(
            context, [EVAL_SCORED], "evaluator", on_dead=self._buried, batch=256, rebuild=self._members.clear, holds=True
        )

    async def run(self) -> None:
        """Until draining or until the last version is measured."""
        await self._look_back()  # before scores are read: those of one that is given up are not to be counted
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._schedule())
            tasks.create_task(self._consumer.run(self.handle))

    async def _look_back(self) -> None:
        """What was issued before; what is under way and cannot go on is given up."""
        context, bus = self._context, self._context.bus
        self._issued = issued = await bus.state_as("eval", Issued.parse)
        self._last_step = issued.step
        self._given_up = await bus.state_as(GIVEN_UP, lambda text: tuple(map(int, text.split())))
        if not await is_under_way(bus, issued):
            self._over_at = issued.version
        elif issued.sets != self._sets.digest:
            self._over_at = issued.version
            if issued.step not in self._given_up:
                self._given_up = (*self._given_up, issued.step)[-MOST_GIVEN_UP:]
                await bus.commit(Commit(state={GIVEN_UP: " ".join(map(str, self._given_up))}))
            text = f"that of step {issued.step} was under way with other data sets or settings: it is given up, the next one counts"
            await context.event(EventKind.EVALUATION, text, step=issued.step)
            await self._take_back()

    async def _schedule(self) -> None:
        """Waits for versions to become active (woken by the blocking read); issues what is due."""
        context, bus = self._context, self._context.bus
        async with Tail(bus, [ACTIVE, POLICY]) as tail:
            while not context.draining.is_set():
                with context.waiting(Wait.TO_MEASURE):
                    news = await tail.read(0.5)
                await fold_log(context, news, self._hear, types=HEARD)
                await self._act()
                if self._over():
                    context.draining.set()

    async def _take_back(self) -> None:
        """Prompts of the one that is given up, which no worker has taken yet; as one of those readers, so that no other has any."""
        context = self._context
        reader = Reader(context.bus, [EVAL_PROMPTS], "generation", context.name)
        await reader.open()
        try:
            while entries := await reader.read(TASKS_PER_COMMIT, 0.0):
                if (await context.bus.commit(Commit(ack=entries))).done:
                    context.count("evaluation_given_up", len(entries))
                reader.forget(entries)
        finally:
            await reader.close()

    def _hear(self, entry: Entry, message: object) -> None:
        match message:
            case Restored():
                self._restored = message.version.id
                if self._active is not None and self._active.id < self._restored:
                    self._active = None
                if self._issued.version < self._restored:  # steps that are done again are evaluated again
                    self._last_step = min(self._last_step, message.step)
            case PolicyActive() if message.version.id >= self._restored:
                self._active = message.version
            case Finished() if message.step >= self._spec.num_rollout:
                self._final_step = message.step  # not that of a finished run that was given more steps

    def _over(self) -> bool:
        """Whether the last version is measured, or is not to be."""
        if self._final_step < 0 or self._under_way:
            return False
        return self._last_step >= self._final_step or not self._context.knobs.eval_interval

    @property
    def _under_way(self) -> bool:
        return self._issued.version > self._over_at

    async def _act(self) -> None:
        issued, active = self._issued, self._active
        if self._under_way and issued.offset < len(self._sets.samples):
            await self._issue(issued)
            return
        if active is None or self._under_way:
            return  # the former one is still running: this interval is skipped, the final one comes later
        final = self._spec.final and self._final_step >= 0 and active.step >= self._final_step
        interval = int(self._context.knobs.eval_interval or 0)
        if due(
            active_step=active.step,
            last_step=self._last_step,
            interval=interval,
            before_train=self._spec.before_train,
            final=final,
        ):
            if self._sets.unreadable and not await self._sets.read():
                return
            await self._issue(Issued(active.step, active.id, 0, self._sets.digest))

    async def _issue(self, start: Issued) -> None:
        """Put the samples of one evaluation on the bus, in guarded pieces."""
        total = len(self._sets.samples)
        if not total:  # nothing of it can be read
            before = self._issued.text() if self._issued.step >= 0 else ""
            outs, over = await self._results(start, {}, 0.0), {DONE: str(start.version)}
            await self._context.bus.commit(Commit(append=outs, state=over, guard=Guard("eval", before, start.text())))
            self._issued, self._last_step, self._over_at = start, start.step, start.version
        while start.offset < total:
            stop = min(total, start.offset + TASKS_PER_COMMIT)
            if self._spec.max_in_flight:  # the rest follows as scores come
                stop = min(stop, len(self._members.get(f"e{start.step}", ())) + self._spec.max_in_flight)
            if stop <= start.offset:
                return
            then = msgspec.structs.replace(start, offset=stop)
            before = self._issued.text() if self._issued.step >= 0 else ""
            for data, prompt in self._sets.samples[start.offset : stop]:
                if prompt.pictures and (key := (data.name, prompt.index)) not in self._shown:
                    # Of one that cannot be read the worker finds no blob, and its samples are lost with that cause.
                    self._shown[key] = await self._pictures.put(prompt) or tuple(shown.place for shown in prompt.pictures)
            outs = [Out(EVAL_PROMPTS, self._task(start, number)) for number in range(start.offset, stop)]
            fault_point(self._context.name, "before_issue")
            given_up = tuple(step for step in self._given_up if step != start.step)
            state = {} if given_up == self._given_up else {GIVEN_UP: " ".join(map(str, given_up))}  # a step that is done again
            await self._context.bus.commit(Commit(append=outs, state=state, guard=Guard("eval", before, then.text())))
            self._given_up = given_up
            fault_point(self._context.name, "after_issue")
            self._began.setdefault(f"e{start.step}", self._context.clock.monotonic())
            self._issued = start = then
            self._last_step = start.step

    def _task(self, issued: Issued, number: int) -> SampleTask:
        data, prompt = self._sets.samples[number]
        sample_id = f"e{issued.step}/{number}"
        metadata = prompt.metadata | data.metadata
        return SampleTask(
            sample_id=sample_id,
            group_id=f"e{issued.step}",
            index=number,
            n_samples=len(self._sets.samples),
            prompt_id=f"p{prompt.index}",
            prompt_tokens=pack_ints(prompt.token_ids),
            prompt_text=prompt.text,
            label=prompt.label,
            rm_type=str(metadata.get("rm_type", self._spec.rm_type)),
            metadata=metadata,
            sampling=Sampling(
                temperature=data.temperature,
                top_p=data.top_p,
                top_k=data.top_k,
                max_new_tokens=most_new_tokens(data.max_response_len, len(prompt.token_ids), self._spec.context),
                stop_token_ids=self._spec.stop_token_ids,
                stop=self._spec.rollout_stop or msgspec.UNSET,
                seed=seed_for(self._context.spec.run_seed, data.name, sample_id) & 0x7FFFFFFF,
            ),
            step=issued.step,
            eval_name=data.name,
            pinned=issued.version,
            inputs=self._shown.get((data.name, prompt.index)) or msgspec.UNSET,
        )

    async def handle(self, entry: Entry, member: Scored | RolloutLost) -> Commit | None:
        """Collect; with the last one, answer and acknowledge all in one commit."""
        group_id, number = member.group_id, index_of(member.sample_id)
        if group_id in [f"e{step}" for step in self._given_up]:
            self._context.count("evaluation_given_up")
            return Commit(ack=(entry,))
        await self._expected(group_id, number)
        members = self._members.setdefault(group_id, {})
        if number in members and members[number][0].id != entry.id:
            self._context.count("duplicates")
            return Commit(ack=(entry,))
        members[number] = (entry, member)
        if len(members) < len(self._sets.samples):
            fault_point(self._context.name, "collecting")
            return None
        del self._members[group_id]
        step = int(group_id.removeprefix("e"))
        now = self._context.clock.monotonic()
        duration_s = now - self._began.pop(group_id, now)
        issued = Issued(step, self._issued.version)
        outs = await self._results(issued, {n: one for n, (_, one) in sorted(members.items())}, duration_s)
        over = {DONE: str(issued.version)}
        if await self._consumer.commit(Commit(ack=[e for e, _ in members.values()], append=outs, state=over)):
            self._over_at = issued.version
            self._shown.clear()
            await self._pictures.free()
        return None

    async def _results(self, issued: Issued, members: Mapping[int, Scored | RolloutLost], duration_s: float) -> list[Out]:
        """Those of all data sets, from the samples by number."""
        outs = []
        for data in self._spec.sets:
            by_prompt: dict[int, list[Scored | RolloutLost]] = {}
            for n, one in members.items():
                of, prompt = self._sets.samples[n]
                if of is data:
                    by_prompt.setdefault(prompt.index, []).append(one)
            try:
                await asyncio.to_thread(self._keep, data, issued.step, by_prompt.values())
            except Exception as error:  # noqa: BLE001 - a full disk, a model's folder that is being replaced: no evaluation ends by it
                text = f"those of {data.name} at step {issued.step} are lost: {named(error)}"
                await self._context.refusals.add("kept samples", text)
            wall, unreadable = self._context.clock.wall(), self._sets.unreadable.get(data.name, "")
            measured = partial(result, data.name, list(by_prompt.values()), issued=issued, wall=wall, duration_s=duration_s)
            outs.append(Out(EVAL_RESULTS, await asyncio.to_thread(measured, unreadable=unreadable)))
        return outs

    async def _buried(self, entry: Entry, member: Scored | RolloutLost | None, error: str) -> Commit:
        """What follows a dead score: its sample comes again as lost, and is no duplicate then."""
        if member is not None:
            members, number = self._members.get(member.group_id, {}), index_of(member.sample_id)
            if number in members and members[number][0].id == entry.id:
                del members[number]
        return await as_lost(self._context, _dead)(entry, member, error)

    async def _expected(self, group_id: str, number: int) -> None:
        """Poison: nobody waits for this sample, so that it would lie here for ever."""
        issued = self._issued
        if group_id != f"e{issued.step}":  # issued by a former process of ours, as far as is known here
            issued = await self._context.bus.state_as("eval", Issued.parse)
        if group_id != f"e{issued.step}" or issued.version <= self._over_at or not 0 <= number < len(self._sets.samples):
            raise Poison(f"sample {number} of evaluation {group_id!r}, which is not under way")

    def _keep(self, data: EvalSet, step: int, by_prompt: Iterable[Sequence[Scored | RolloutLost]]) -> None:
        """The samples of one data set as text, one JSON object a line, the worst first; the oldest evaluations' go."""
        run_dir = Path(self._context.spec.run_dir)
        file = file_of(run_dir, data.name, step)
        file.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(data.data.tokenizer_dir)
        scored = sorted((m for of in by_prompt for m in of if isinstance(m, Scored)), key=lambda m: m.reward)
        lines = [msgspec.json.encode({"step": step, **readable(m, tokenizer.decode)}) + b"\n" for m in scored]
        file.write_bytes(b"".join(lines))
        for old in kept_files(run_dir)[data.name][: -self._spec.keep]:
            old.unlink(missing_ok=True)


def _dead(entry: Entry, lost: RolloutLost) -> Commit:
    """What follows a dead score: it comes again as lost."""
    return Commit(append=(Out(EVAL_SCORED, lost),))


async def run(context: Context, spec: EvaluatorSpec) -> None:
    """The evaluator's process."""
    sets = Sets(context, spec.sets, spec.rm_type, spec.rollout_stop)
    if await sets.read():
        await Evaluator(context, spec, sets).run()
