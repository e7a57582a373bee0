"""One GPU for the engine and the trainer (--colocate): in the trainer's turn the engine's memory is given back.

Reads  policy.turn (from the worker's loop), the state field `turn`    Writes  event `memory released`

Always true: the event with a turn's number is told only once the engine holds nothing of what `tags` name: it gave that
back, it has not been started, or its process has ended. Samples under way stay with the worker and go on afterwards.
"""

from __future__ import annotations

from actors.generation.link import EngineLink
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from bus.messages.policy import Turn

TURN = "policy.turn"
ORDER_S = 30.0  # from the engines' turn to the order of the version that the trainer announced; then they go on without it


class Sharing:
    """Whose turn it is, as far as this worker knows. `tags`: what its engine gives back, SGLang's names; none = it shares
    with nobody and the turn is always its own."""

    def __init__(self, context: Context, link: EngineLink, tags: tuple[str, ...]) -> None:
        self._context = context
        self._link = link
        self._tags = tags
        self._turn = Turn(holder="trainer", number=0) if tags else Turn(holder="engines", number=0)
        self._heard_at = 0.0
        self._told = -1

    @property
    def aside(self) -> bool:
        """Whether it is the trainer's turn; also before the trainer said anything, since it loads its model first."""
        return self._turn.holder == "trainer"

    async def open(self) -> None:
        """Read what was said last."""
        if self._tags and (mark := await self._context.bus.state("turn")):
            self.hear(Turn.of_mark(mark))

    def hear(self, turn: Turn) -> None:
        """The trainer takes its turn, or gives it."""
        if not self._tags:
            return
        self._turn, self._told = turn, -1
        self._heard_at = self._context.clock.monotonic()

    async def step_aside(self) -> None:
        """Give the memory back and say so, once for each turn."""
        number = self._turn.number
        if self._told == number:
            return
        began = self._context.clock.monotonic()
        await self._link.release(self._tags)
        fault_point(self._context.name, "released")
        if self._turn.number != number or not self.aside or number == 0:
            return
        self._told = number
        took = self._context.clock.monotonic() - began
        await self._context.event("memory released", f"for turn {number} of the trainer", turn=number, release_s=took)

    async def come_back(self) -> None:
        """Take the memory again in the engines' turn; unless a version is on its way, whose weights come first."""
        awaited = self._turn.publishes and self._context.clock.monotonic() - self._heard_at < ORDER_S
        if self._link.released and self._link.sound and not awaited:
            await self._link.take_back()


__all__ = ("TURN", "Sharing")
