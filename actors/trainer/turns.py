"""Turns on GPUs that the trainer shares with engines (--colocate), or lends to them (--lend-trainer-gpus, lender.py).

Writes  policy (turn), the state field `turn`    Reads  event `memory released`, vitals of the workers

    trainer     Turn(trainer, n)            workers    engines give their memory back, event `memory released` with n
    trainer     takes its memory again once all have said so, trains one step or as many as batches are complete
    trainer     publishes, moves its memory to the host, Turn(engines, n)      workers    take theirs again, load, go on

Always true: the trainer's tensors are on the device only between the last `memory released` of its turn and Turn(engines).
A trainer that dies in its turn leaves the engines aside until the next one starts, which takes a turn before it loads. Engines
that are lent GPUs boot in that first turn, where the trainer waits for it, or else in a turn of their own, which may end it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from actors.runtime.context import Context
from actors.runtime.deadline import deadline
from actors.runtime.faultpoints import fault_point
from actors.runtime.host import lives
from actors.runtime.logs import fold_log
from actors.trainer.backend import TrainBackend
from actors.trainer.spec import TurnSpec
from bus import Commit, Entry, Out, Tail
from bus.messages.control import Event, Vitals
from bus.messages.policy import Turn
from bus.messages.waits import Wait
from bus.topology import EVENTS, POLICY

SILENT_S = 10.0  # a worker without a word for so long is gone, while the run stops and nobody starts it again
ENDED = ("draining", "stopped")


class GpuTurns:
    """Nothing happens here when no worker shares the GPUs: the turn is always the trainer's."""

    def __init__(self, context: Context, spec: TurnSpec, backend: TrainBackend, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._context = context
        self._spec = spec
        self._backend = backend
        self._in_thread = in_thread
        self._number = 0
        self._asleep = False
        self._boots = False  # in the turn that is being taken
        self.released: list[Event] = []  # by the workers, for the newest turn
        self.held = not spec.workers
        self.times: dict[str, float] = {}
        """Seconds of the last change: metrics of the step that follows."""

    @property
    def shared(self) -> bool:
        """Whether all engines are aside while the trainer works: versions are for the end of its turn."""
        return bool(self._spec.workers) and not self._spec.lends

    async def take(self, *, first: bool = False) -> None:
        """Until every engine has given its memory back and the trainer has its own. `first`: it has none yet. Raises
        DeadlineExceeded naming who did not; the supervisor then starts the trainer again."""
        if self.held:
            return
        self._boots, self.released = first and self._spec.lends, []
        context, bus = self._context, self._context.bus
        began = context.clock.monotonic()
        self._number = await bus.next_number("turns", at_least=self._number + 1)
        async with Tail(bus, [EVENTS], start="$") as tail:
            await self._say(Turn(holder="trainer", number=self._number, boots=self._boots))
            fault_point(context.name, "turn_taken")
            await self._until_released(tail)
            if self._boots:  # who starts from now on meets the trainer's memory
                await bus.commit(Commit(state={"turn": Turn(holder="trainer", number=self._number).mark}))
        released = context.clock.monotonic()
        if self._asleep:
            await self._in_thread(self._backend.wake)
            self._asleep = False
        self.held = True
        self.times |= {"perf/turn_s": released - began, "perf/wake_s": context.clock.monotonic() - released}

    @property
    def _patience_s(self) -> float:
        """Longest wait for all: of engines that are lent the GPUs after the first turn, what their workers keep themselves, and as
        long as a dead one is not known to be dead."""
        spec = self._spec
        return spec.return_s + 2 * SILENT_S if spec.lends and not self._boots else spec.deadline_s

    async def _until_released(self, tail: Tail) -> None:
        missing = set(self._spec.workers)
        clock = self._context.clock
        heard = dict.fromkeys(missing, clock.monotonic())  # by our own clock

        def hear(_: Entry, message: Event | Vitals) -> None:
            if message.actor in heard:
                heard[message.actor] = clock.monotonic()
            if isinstance(message, Event) and message.data.get("turn") == self._number:
                missing.discard(message.actor)
                self.released.append(message)

        workers = ", ".join(sorted(missing))
        with self._context.waiting(Wait.GPU, workers=workers):
            async with deadline(self._patience_s, f"turn {self._number}: the wait for {Wait.GPU.text(workers=workers)}"):
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
            silent = self._context.clock.monotonic() - heard[name] > SILENT_S
            if self._spec.lends and not self._context.draining.is_set():
                # Its engine died with it. In the first turn its successor may be on its way, and would boot.
                over = lives(vitals) is False or vitals.state in (*ENDED, "failed")
                if over and (silent or not self._boots):
                    found.add(name)
            elif (silent and self._context.draining.is_set()) or vitals.state in ENDED:
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
