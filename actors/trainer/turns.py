"""Turns on GPUs that the trainer shares with engines (--colocate).

Writes  policy (turn), the state field `turn`    Reads  event `memory released`, vitals of the workers

    trainer     Turn(trainer, n)            workers    engines give their memory back, event `memory released` with n
    trainer     takes its memory again once all have said so, trains one step or as many as batches are complete
    trainer     publishes, moves its memory to the host, Turn(engines, n)      workers    take theirs again, load, go on

Always true: the trainer's tensors are on the device only between the last `memory released` of its turn and Turn(engines).
A trainer that dies in its turn leaves the engines aside until the next one starts, which takes a turn before it loads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from actors.runtime.context import Context
from actors.runtime.deadline import deadline
from actors.runtime.faultpoints import fault_point
from actors.runtime.logs import fold_log
from actors.trainer.backend import TrainBackend
from actors.trainer.spec import TurnSpec
from bus import Commit, Entry, Out, Tail
from bus.messages.control import Event, Vitals
from bus.messages.policy import Turn
from bus.topology import EVENTS, POLICY

SILENT_S = 10.0  # a worker without a word for so long is gone, while the run stops and nobody starts it again


class Turns:
    """Nothing happens here when no worker shares the GPUs: the turn is always the trainer's."""

    def __init__(
        self, context: Context, spec: TurnSpec, backend: TrainBackend, in_thread: Callable[..., Awaitable[Any]]
    ) -> None:
        self._context = context
        self._spec = spec
        self._backend = backend
        self._in_thread = in_thread
        self._number = 0
        self._asleep = False
        self.held = not spec.workers
        self.times: dict[str, float] = {}
        """Seconds of the last change: metrics of the step that follows."""

    @property
    def shared(self) -> bool:
        return bool(self._spec.workers)

    async def take(self) -> None:
        """Until every engine has given its memory back and the trainer has its own. Raises DeadlineExceeded naming who did
        not; the supervisor then starts the trainer again."""
        if self.held:
            return
        context, bus = self._context, self._context.bus
        began = context.clock.monotonic()
        self._number = await bus.next_number("turns", at_least=self._number + 1)
        tail = Tail(bus, [EVENTS], start="$")
        await tail.open()
        try:
            await self._say(Turn(holder="trainer", number=self._number))
            fault_point(context.name, "turn_taken")
            await self._until_released(tail)
        finally:
            await tail.close()
        released = context.clock.monotonic()
        if self._asleep:
            await self._in_thread(self._backend.wake)
            self._asleep = False
        self.held = True
        self.times |= {"perf/turn_s": released - began, "perf/wake_s": context.clock.monotonic() - released}

    async def _until_released(self, tail: Tail) -> None:
        missing = set(self._spec.workers)
        clock = self._context.clock
        heard = dict.fromkeys(missing, clock.monotonic())  # by our own clock

        def hear(_: Entry, message: Event | Vitals) -> None:
            if message.actor in heard:
                heard[message.actor] = clock.monotonic()
            if isinstance(message, Event) and message.data.get("turn") == self._number:
                missing.discard(message.actor)

        what = f"{', '.join(sorted(missing))} to give the GPU to the trainer"
        with self._context.waiting(what):
            async with deadline(self._spec.deadline_s, f"turn {self._number}: the wait for {what}"):
                while missing := missing - await self._gone(missing, heard):
                    await fold_log(self._context, await tail.read(0.5), hear)

    async def _gone(self, workers: set[str], heard: dict[str, float]) -> set[str]:
        """Those that end with their engines and will say nothing more. `heard`: when a word of each came last."""
        if not workers:
            return set()
        known = await self._context.bus.vitals()
        found: set[str] = set()
        for name in workers & known.keys():
            vitals = known[name]
            silent = self._context.draining.is_set() and self._context.clock.monotonic() - heard[name] > SILENT_S
            if silent or vitals.state in ("draining", "stopped"):
                found.add(name)
        return found

    async def give(self, *, publishes: bool) -> None:
        """The engines' turn; only while it is ours. `publishes`: a version they do not have is announced."""
        began = self._context.clock.monotonic()
        if self._spec.offload:
            await self._in_thread(self._backend.sleep)
            self._asleep = True
        self.held = False
        self.times["perf/sleep_s"] = self._context.clock.monotonic() - began
        fault_point(self._context.name, "before_turn_given")
        await self._say(Turn(holder="engines", number=self._number, publishes=publishes))

    async def _say(self, turn: Turn) -> None:
        await self._context.bus.commit(Commit(append=(Out(POLICY, turn),), state={"turn": turn.mark}))
