"""One GPU for the engine and the trainer (--colocate, --lend-trainer-gpus): in the trainer's turn the engine gives its memory back.

Reads  policy.turn (from the worker's loop), the state field `turn`    Writes  events `memory released`, `lent`

Always true: the event with a turn's number is told only once the engine holds nothing of what `tags` name: it gave that
back, it has not been started, or its process has ended. Samples under way stay with the worker and go on afterwards; those of an
engine that was lent the GPU (`lent_s`) go on at peers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from actors.generation.engine import Engine, EngineUnavailable, RequestRefused
from actors.generation.link import EngineLink, State
from actors.generation.pausing import LAST_STEP_S
from actors.runtime.context import Context
from actors.runtime.deadline import deadline
from actors.runtime.faultpoints import fault_point
from bus.errors import DeadlineExceeded
from bus.messages.events import EventKind
from bus.messages.policy import Turn
from bus.messages.waits import Wait

TURN = "policy.turn"
ORDER_S = 30.0  # from the engines' turn to the order of the version that the trainer announced; then they go on without it


class Sharing:
    """Whose turn it is, as far as this worker knows. `tags`: what its engine gives back, SGLang's names; none = it shares
    with nobody and the turn is always its own. `lent_s`: the GPU is the trainer's, which lends it, and has it back within so many
    seconds; 0 = both have turns."""

    def __init__(self, context: Context, link: EngineLink, tags: tuple[str, ...], lent_s: float = 0.0) -> None:
        self._context = context
        self._link = link
        self._tags = tags
        self.lent = lent_s > 0
        self._deadline_s = lent_s / 2 if self.lent else link.control_deadline_s  # for the samples as long as for the memory
        self._turn = Turn(holder="trainer" if tags else "engines", number=0, boots=self.lent)
        self._heard_at = 0.0
        self._told = -1
        self._back_told = False
        self._ready_s: float | None = None  # in this turn of ours: until a version was served
        self._tokens = 0.0  # made before it

    @property
    def aside(self) -> bool:
        """Whether it is the trainer's turn; also before the trainer said anything, since it loads its model first."""
        return self._turn.holder == "trainer"

    def is_to_boot(self) -> bool:
        """Whether the trainer waits until an engine that does not run has booted; True at the first look in a turn alone."""
        waits = self.aside and self._turn.boots
        self._turn = msgspec.structs.replace(self._turn, boots=False)
        return waits

    @property
    def recalled(self) -> bool:
        """Whether a boot in our own turn is to end: the trainer wants its GPU back."""
        return self.lent and self.aside

    @property
    def waits_for(self) -> Wait:
        """While it is aside."""
        return Wait.UNLENT if self.lent else Wait.TURN

    async def open(self) -> None:
        """Read what was said last."""
        if self._tags and (mark := await self._context.bus.state("turn")):
            self.hear(Turn.of_mark(mark))

    def hear(self, turn: Turn) -> None:
        """The trainer takes its turn, or gives it."""
        if not self._tags:
            return
        if turn.holder == "engines":
            self._ready_s, self._tokens, self._back_told = None, self._made(), False
        self._turn, self._told = turn, -1
        self._heard_at = self._context.clock.monotonic()
        self._link.leaving = self.lent and turn.holder == "trainer"

    def _made(self) -> float:
        return self._context.counters.get("tokens", 0.0)

    def look(self) -> None:
        """Now and then in our turn: note when the first version was served."""
        if self._ready_s is None and self._link.serving is not None and not self._link.released:
            self._ready_s = self._context.clock.monotonic() - self._heard_at

    async def step_aside(self, park: Callable[[], Awaitable[None]]) -> None:
        """Give the memory back and say so, once for each turn. `park`: until no sample is left here."""
        number = self._turn.number
        if self._told == number:
            return
        began = self._context.clock.monotonic()
        if self.lent:
            try:
                async with deadline(self._deadline_s, "leaving of the samples on the trainer's GPU"):
                    await park()
            except DeadlineExceeded as error:
                await self._link.fail(EngineUnavailable(str(error)))
        await self._release()
        fault_point(self._context.name, "released")
        if self._turn.number != number or not self.aside or number == 0:
            return
        self._told = number
        took = self._context.clock.monotonic() - began
        lent: dict[str, Any] = {"ready_s": self._ready_s, "tokens": int(self._made() - self._tokens)} if self.lent else {}
        text = f"for turn {number} of the trainer"
        await self._context.event(EventKind.MEMORY_RELEASED, text, turn=number, release_s=took, **lent)

    async def come_back(self) -> None:
        """Take the memory again in the engines' turn; unless a version is on its way, whose weights come first."""
        if self.lent and not self._back_told:
            self._back_told = True
            serving = self._link.serving
            version = serving.id if serving is not None else -1
            await self._context.event(EventKind.LENT, f"the trainer's GPU, after turn {self._turn.number}", version=version)
        awaited = self._turn.publishes and self._context.clock.monotonic() - self._heard_at < ORDER_S
        if self._link.state is State.ASIDE and not awaited:
            await self._take_back()

    async def _release(self) -> None:
        """Requests end and wait until the link is open again. An engine that does not give its memory in time, is broken, or may
        hold parts of two versions is ended, which gives all of it."""
        link = self._link
        engine = link.engine
        missing = tuple(tag for tag in self._tags if tag not in link.released)  # some are away after an update that failed
        if engine is None or not missing:
            return
        if link.state is State.DAMAGED:
            await link.fail(EngineUnavailable("the trainer takes its turn, and the engine may hold parts of two versions"))
        if link.state is not State.BROKEN:
            link.released = self._tags
            link.enter(State.ASIDE)
            try:
                async with deadline(self._deadline_s, "release of the engine's memory"):
                    await link.route(joins=False)
                    await engine.end_running(LAST_STEP_S)
                    await engine.pause("retract")  # SGLang's abort mode looks but once a second whether all requests ended
                    while not await self._given(engine, missing):
                        await self._context.clock.sleep(0.05)
                return
            except (EngineUnavailable, RequestRefused, DeadlineExceeded) as error:
                await link.fail(error)
        if link.process is not None:
            await link.process.stop()

    async def _given(self, engine: Engine, tags: tuple[str, ...]) -> bool:
        """Whether it could be given back; not while a request is at work that was on its way before, or that a router sent from
        a peer who has not heard of the turn: such a peer sends it again."""
        try:
            await engine.abort_all()
            await engine.release_memory(tags)
        except RequestRefused as error:
            self._context.log.info("memory is not released yet: %s", error)
            return False
        return True

    async def _take_back(self) -> None:
        """Take the memory again and go on with the weights that were served before."""
        link, engine = self._link, self._link.engine
        assert engine is not None
        try:
            async with deadline(link.control_deadline_s, "return of the engine's memory"):
                await engine.resume_memory(link.released)
                await engine.resume()
                if link.serving is not None:
                    await link.route(joins=True)
        except (EngineUnavailable, RequestRefused, DeadlineExceeded) as error:
            await link.fail(error)
            return
        link.released = ()
        link.enter(State.READY if link.serving is None else State.SERVING)
