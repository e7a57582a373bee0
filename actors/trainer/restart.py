"""Where a trainer goes on: what it may say, which checkpoint it takes up, and what of the bus that checkpoint holds.

Reads  checkpoints, groups, the state field `trainer`    Writes  policy (guarded)    Owns  what this trainer said last
Always true: of two trainers of one run only one can go on, and a bus that lost its last moments is noticed before the next word.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from actors.runtime.context import Context
from actors.runtime.run import Refused
from actors.trainer.backend import TrainBackend
from actors.trainer.checkpoint import (
    BusState,
    booked_as_trained,
    consumed_before,
    is_older,
    iter_dir,
    newest_written,
    read_bus_state,
    refusal,
    resume_point,
)
from actors.trainer.intake import Intake
from actors.trainer.spec import TrainerSpec
from bus import Commit, Guard, Out, ledger
from bus.errors import BusWentBack, CheckpointRefused, InvariantBroken
from bus.messages.policy import Finished, Restored, StepDone
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait
from bus.topology import POLICY


class Voice:
    """What the trainer says on the policy log, each guarded by what it said before."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._marker = ""  # value of the state field `trainer`
        self._restarts = 0  # of the server, as far as they were looked at

    async def open(self) -> str:
        """Take up what the trainer before said last, and return it."""
        bus = self._context.bus
        self._restarts = bus.link.server_restarts
        self._marker = await bus.state("trainer")
        return self._marker

    async def say(self, version: PolicyVersion, message: Restored | StepDone | Finished) -> None:
        """Append to policy. InvariantBroken when another trainer spoke meanwhile."""
        marker = f"{version.step}:{version.id}:{type(message).__name__}"
        said = Commit(append=(Out(POLICY, message),), guard=Guard("trainer", self._marker, marker))
        try:
            await self._context.bus.commit(said)
        except InvariantBroken:
            await self.check()  # which has another name for it where the server lost writes
            raise
        self._marker = marker

    async def check(self) -> None:
        """A server that came back without what was said here last has lost its last second: start again from the
        checkpoint, so that everyone hears from where."""
        bus = self._context.bus
        if self._restarts == bus.link.server_restarts:
            return
        self._restarts = bus.link.server_restarts
        known = await bus.state("trainer")
        if known != self._marker:
            raise InvariantBroken(
                f"the bus came back at {known or 'nothing'!r}, this trainer had said {self._marker!r}: it lost its last "
                "moments. The trainer starts again from its last checkpoint."
            )


class Start(NamedTuple):
    """`version`: of the weights now; `saved`: step of the checkpoint they came from, None for none; `word`: what to say of it."""

    version: PolicyVersion
    saved: int | None
    word: Restored


async def begin(
    context: Context,
    spec: TrainerSpec,
    voice: Voice,
    intake: Intake,
    backend: TrainBackend,
    in_thread: Callable[..., Awaitable[Any]],
) -> Start:
    """Load the checkpoint that the tracker names and settle what it holds with the bus. Raises Refused, and BusWentBack for a bus
    older than the checkpoints."""
    bus = context.bus
    parent, state = await _loaded(context, spec, backend, in_thread)
    step = state.step if state is not None else 0
    inside: tuple[str, ...] = ()
    said = await voice.open()
    # Before the first checkpoint nothing was acknowledged: the steps are done again from the first weights.
    if state is None and booked_as_trained(await ledger.read_accounts(bus)):
        where = f"run {bus.config.run} is at step {said.split(':')[0]} on the bus"
        if not spec.save:
            raise Refused(f"{where} and keeps no checkpoints (--no-save): its weights are lost. The same command begins again.")
        raise Refused(
            f"{where} but no checkpoint is found in {spec.load or '(no --load)'}: its weights are lost. Point --load to its "
            "checkpoints or choose another --name."
        )
    if state is not None:
        if await is_older(bus, parent, state):
            raise BusWentBack(f"the bus came back older than the checkpoints before {step}. It is made anew from that.")
        while await intake.fetch(256, 0.0, step=step):
            continue
        intake.adopt(consumed_before(parent, state)[0], state.step)
        inside = await intake.inside_but_open()
        await intake.acknowledge(state.step, None)
    former = state.version.id if state is not None else 0
    # A bus that lost its last second may have forgotten ids whose weights engines already serve.
    number = await bus.next_number("version", at_least=max(former, newest_written(Path(spec.weights_dir))) + 1)
    version = PolicyVersion(id=number, step=step, parent=former)
    checkpoint = str(iter_dir(parent, step)) if state is not None else ""
    word = Restored(step=step, version=version, checkpoint=checkpoint, samples=inside)
    return Start(version, None if state is None else step, word)


async def _loaded(
    context: Context, spec: TrainerSpec, backend: TrainBackend, in_thread: Callable[..., Awaitable[Any]]
) -> tuple[Path, BusState | None]:
    """The directory of checkpoints, and the state of the one that was loaded. One of our own is taken up whole, that of another
    run as the settings say."""
    parent, step = Path(spec.load), None
    try:
        begins = resume_point(spec.load, spec.save, spec.ckpt_step) if spec.load else None
        if begins is None:
            return parent, None
        parent, step = begins
        state = read_bus_state(parent, step, fingerprint=spec.fingerprint)
        left_out = {"optim": spec.no_load_optim, "rng": spec.no_load_rng}
        own = parent.absolute() == Path(spec.save).absolute()
        drops = tuple(name for name, out in left_out.items() if out and not own)
        with context.waiting(Wait.CHECKPOINT_LOADED, step=step):
            await in_thread(backend.load, iter_dir(parent, step), drops)
    except CheckpointRefused as error:
        raise Refused(refusal(error, parent, step)) from error
    return parent, state
