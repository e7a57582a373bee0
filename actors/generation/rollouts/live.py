"""The session of an episode that runs here: calls are answered from its journal as far as that goes, then by the engine.

Owns   one run of a program. Always true: before the environment is asked, all that the model said is saved; before its answer
reaches the program, that is saved too. So whoever goes on after a crash tells the environment the same, and gets the same tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

import msgspec

from actors.generation.rollouts import Program, Segment, Task, Trajectory
from actors.generation.rollouts.session import Watch
from actors.generation.rollouts.stops import until, watching
from actors.generation.rollouts.world import World, Worlds
from actors.generation.sample import ModelTurn, Running, digest_of, limit_of
from actors.generation.turns import Leaves, Turns
from actors.runtime.contained import contained
from actors.runtime.faultpoints import fault_point
from actors.runtime.labels import label_of
from actors.runtime.whole import off_loop
from bus import Entry
from bus.errors import Poison
from bus.messages.base import pack_ints
from bus.messages.samples import Call, ParkReason, SampleTask, Sampling

Admit = Callable[[Running], Awaitable[ParkReason | None]]
MOST_TOLD_BYTES = 4 << 20  # of one answer, which is saved on the bus
MOST_CALLS = 10_000  # of one episode; a program that makes more never ends


def task_of(task: SampleTask, prompt: list[int]) -> Task:
    """A sample as its program sees it; what it does to the metadata stays its own."""
    return Task(
        sample_id=task.sample_id,
        group_id=task.group_id,
        index=task.index,
        n_samples=task.n_samples,
        prompt=prompt,
        prompt_text=task.prompt_text,
        label=label_of(task.label, task.metadata),
        metadata=msgspec.msgpack.decode(msgspec.msgpack.encode(task.metadata)),
        sampling=task.sampling,
        eval_name=task.eval_name,
    )


class Live:
    """One run of an episode's program. `admit`: waits until the sample may go on here. `saves`: whether its journal is of use to
    anyone."""

    def __init__(
        self, turns: Turns, admit: Admit, entry: Entry, running: Running, *, saves: bool, worlds: Worlds | None = None
    ) -> None:
        self.task = task_of(running.task, list(running.prompt))
        self._turns = turns
        self._admit = admit
        self._entry = entry
        self._running = running
        self._saves = running.saves = saves
        self._worlds = worlds
        self._world: World | None = None
        self._next = 0
        self._asked: set[int] = set()
        self._owner: asyncio.Task[Any] | None = None
        self._reason: Leaves | None = None
        self._generating = 0

    # -- the worker's side --------------------------------------------------------------------------------------

    async def play(self, program: Program, deadline_s: float | None) -> list[Trajectory] | Leaves:
        """Run the program: what it returned, or why its sample must leave. Raises what the program raises, and TimeoutError."""
        self._owner = asyncio.current_task()
        assert self._owner is not None
        try:
            async with asyncio.timeout(deadline_s):
                with contained():
                    found = await program(self.task, self)
        except asyncio.CancelledError:
            if self._reason is None or self._owner.uncancel() > 0:
                raise
        except Exception:
            if self._reason is None:
                raise
            self._owner.uncancel()  # it made another exception of the cancellation
        else:
            if self._reason is None:
                if self._worlds is not None and self._world is not None:
                    await self._worlds.over(self.task.sample_id)
                known = self._running.turns.keys() | self._running.told.keys()
                if not isinstance(found, list):  # a text would be taken for a reason to leave
                    raise Poison(f"the rollout program returned {found!r:.100} for {self.task.sample_id}, no list of trajectories")
                return "diverged" if known - self._asked else found
            self._owner.uncancel()
        finally:
            self._owner = None
        return self._reason

    def drain(self) -> None:
        """The worker ends: a program that is not in a turn of the model goes on elsewhere. What it asks the environment now, it
        will ask again."""
        if not self._generating:
            self.leave("drain")

    def leave(self, reason: Leaves) -> None:
        """End the program now: the sample goes on elsewhere. No turn of the model may be under way."""
        if self._owner is not None and self._reason is None:
            self._reason = reason
            self._owner.cancel()

    @property
    def reason(self) -> Leaves | None:
        """Why the sample leaves; None while it stays."""
        return self._reason

    def adopt(self, segment: Segment, of: Live) -> Segment:
        """A turn that another session made, as one of this. For programs whose journals are not saved, before either ends."""
        no = self._next
        self._next += 1
        self._asked.add(no)
        of._running.hand_over(segment.call, self._running, no)
        segment.call = no
        return segment

    async def _leave(self, reason: Leaves) -> NoReturn:
        """End the program; this call, and any later one, does not return."""
        self._reason = self._reason or reason
        if self._owner is not None:
            self._owner.cancel()
        await asyncio.Future()
        raise AssertionError("unreachable")

    @property
    def n_tokens(self) -> int:
        """Tokens of the model so far."""
        return self._running.n_tokens

    # -- the program's side -------------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        return max(0, self._running.remaining)

    async def generate(self, tokens: Sequence[int], sampling: Sampling | None = None, *, watch: Watch | None = None) -> Segment:
        running, no = self._running, await self._number()
        asked = list(tokens)
        if asked != running.prompt:
            array("i", asked)  # TypeError or OverflowError in the program, which has given something else than token ids
        turn = running.turns.get(no)
        if turn is None:
            if no in running.told:
                await self._leave("diverged")
            turn = running.open(no, asked)
        elif turn.digest and turn.digest != digest_of(pack_ints(asked)):
            await self._leave("diverged")
        turn.asked = asked
        sampling = sampling or self.task.sampling
        if sampling.stop:
            watch = watching(self._turns.decode, sampling.stop, watch)
        more: Callable[[ModelTurn], bool] | None = None
        if watch is not None:

            def more(turn: ModelTurn) -> bool:
                return not watch(() if getattr(watch, "blind", False) else turn.tokens.tolist())

            if turn.tokens and not more(turn):
                turn.finish = "stop"
        if sampling.temperature != self.task.sampling.temperature and not self.task.eval_name:
            raise Poison(
                f"a turn of {self.task.sample_id} asks for temperature {sampling.temperature}, its task has "
                f"{self.task.sampling.temperature}, and a sample is trained at one. Leave it out, or set --rollout-temperature."
            )
        if not turn.ended(limit_of(turn, running, sampling), sampling.stop_token_ids):
            self._generating += 1
            try:
                reason = await self._admit(running) or await self._turns.run(self._entry, running, turn, sampling, more)
            finally:
                self._generating -= 1
            if reason is not None:
                await self._leave(reason)
        if len(running.turns) > 1 and not turn.experts.n:
            turn.forget()
        ends: Literal["stop", "length"] = "stop" if turn.finish == "stop" else "length"
        made = Segment("model", turn.tokens, turn.logprobs, turn.spans, ends, no)
        return until(self._turns.decode, made, sampling.stop) if sampling.stop else made

    def world(self) -> World:
        if self._worlds is None:
            raise Poison("session.world(): this run keeps no environments. Set --environment-path.")
        if self._world is None:
            t = self.task
            label = label_of(t.label, t.metadata)
            task = {"sample_id": t.sample_id, "prompt": t.prompt_text, "label": label, "metadata": t.metadata}
            again = partial(self._leave, "diverged")
            self._world = World(self, t.sample_id, task, self._worlds.ask, again, deadline_s=self._worlds.deadline_s)
        return self._world

    async def tell(self, name: str, call: Callable[..., Awaitable[Any] | Any], *args: Any, deadline_s: float = 60.0) -> Any:
        running, no = self._running, await self._number()
        digest = digest_of(name.encode(), msgspec.msgpack.encode(args))
        known = running.told.get(no)
        if known is not None:
            if known.digest != digest:
                await self._leave("diverged")
            return msgspec.msgpack.decode(known.answer or b"\xc0")
        if no in running.turns:
            await self._leave("diverged")
        await self.save()
        fault_point(self._turns.worker, "before_tell")
        async with asyncio.timeout(deadline_s):
            value = await off_loop(call, *args)
        answer = msgspec.msgpack.encode(value)
        if len(answer) > MOST_TOLD_BYTES:
            raise ValueError(f"{name} gave {len(answer):,} bytes, and a journal keeps at most {MOST_TOLD_BYTES:,} of an answer")
        fault_point(self._turns.worker, "after_tell")
        running.answered(Call(no, digest, answer=answer))
        await self.save()
        return msgspec.msgpack.decode(answer)

    async def _number(self) -> int:
        """The number of the call that begins now."""
        if self._owner is None or self._reason is not None:
            await self._leave(self._reason or "diverged")
        no = self._next
        if no >= MOST_CALLS:
            raise Poison(f"the rollout program of {self.task.sample_id} made {MOST_CALLS} calls and did not end")
        self._next += 1
        self._asked.add(no)
        return no

    async def save(self) -> None:
        if self._saves and self._running.dirty() and not await self._turns.save(self._entry, self._running):
            await self._leave("lease")
