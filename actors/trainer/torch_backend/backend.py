"""`TorchBackend`: the training backend of rank 0, the one the trainer's actor calls.

With WORLD_SIZE > 1 each verb is first sent to the followers (`python -m actors.trainer.torch_backend.follower`, same
environment, other RANK), then run here too; the ranks meet in the collectives inside. Only rank 0 reads and writes files of
checkpoints, so checkpoints need no disk shared between hosts.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers.utils import logging as hf_logging

from actors.runtime.run import Refused
from actors.trainer.backend import BackendConfig, BatchRefused, StepBatch, StepResult
from actors.trainer.batch.packing import BatchingError
from actors.trainer.hooks import probe
from actors.trainer.objective import MissingInputError, ObjectiveConfigError
from actors.trainer.objective_hooks import HookError
from actors.trainer.torch_backend.core import Core, settle_objective
from actors.trainer.torch_backend.ranks import Ranks
from actors.trainer.training.offload import NoRoom
from actors.trainer.training.state import TrainingState, WeightFiles
from actors.trainer.training.step import examine, train_batch
from actors.trainer.training.wire import Command, Do, Restore, Setup, Step, decode, encode, pack_step, unpack_step

log = logging.getLogger(__name__)
_SHARD = "shard over more GPUs with --actor-num-gpus-per-node"
STOP = Do("stop")
REFUSALS = (BatchingError, HookError, MissingInputError, ObjectiveConfigError)
"""Raised from the batch alone, before anything changed, so on every rank or on none."""
CONTENT = (ValueError, IndexError, KeyError, TypeError, ArithmeticError)
"""What numbers that fit nothing raise, wherever they are met. Of several ranks the others would wait: there it ends the process."""


class TorchBackend:
    """Implements `TrainBackend` with a transformers model; one process, or FSDP2 over several."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._core: Core | None = None

    @property
    def core(self) -> Core:
        """The parts, after `setup` and while their memory is here; asked for before other ranks are told anything."""
        if self._core is None:
            raise RuntimeError("the torch backend is used before setup(); call setup(config) first.")
        if self._core.asleep:
            raise RuntimeError("the torch backend is used while its memory is away; call wake() first.")
        return self._core

    def setup(self, config: BackendConfig) -> None:
        """Load everything; may be called again, which starts anew. Waits for all ranks. Raises Refused for what cannot be
        trained: hooks are tried and settings checked before any model loads."""
        hf_logging.disable_progress_bar()
        try:
            probe(config.objective)
            settle_objective(config)
        except (HookError, ObjectiveConfigError) as error:
            raise Refused(" ".join(str(error).split())) from error
        if not self._ranks.connected:
            self._ranks = Ranks.from_environment()
            self._ranks.connect()
        self._tell(Setup(config))
        self._core = _load(config, self._ranks)

    def train_step(self, batch: StepBatch) -> StepResult:
        """All optimizer steps of one rollout batch. Raises BatchRefused, StaleTokenError (a bug; nothing changed) and NoRoom (a
        step may be half done: the process is over)."""
        core = self.core
        if not self._ranks.alone:
            self._tell(pack_step(batch))
        made = core.updates
        try:
            return _train(core, batch)
        except REFUSALS as error:
            raise BatchRefused(_line(error)) from error
        except CONTENT as error:
            if not self._ranks.alone:
                raise
            raise BatchRefused(f"{type(error).__name__}: {_line(error)}", half_done=core.updates != made) from error

    def refuses(self, batch: StepBatch) -> str:
        """Why a batch cannot be trained; of several ranks the first looks alone, and runs no model."""
        try:
            examine(self.core, batch, forward=self._ranks.alone)
        except (*REFUSALS, *CONTENT) as error:
            return f"{type(error).__name__}: {_line(error)}"
        return ""

    def copy_weights(self, *, live: bool = False) -> WeightFiles:
        """The weights as engines load them: the type the model computes in, tied tensors once."""
        core = self.core
        self._tell(Do("copy_weights", live))
        copied = core.copy_weights(live=live)
        assert copied is not None
        return copied

    def snapshot(self) -> TrainingState:
        """All training state, in host memory."""
        core = self.core
        self._tell(Do("snapshot"))
        state = core.snapshot()
        assert state is not None
        return state

    def load(self, directory: Path) -> None:
        """Restore a snapshot; CheckpointRefused, before anything changes, when it does not fit or is damaged."""
        state = self.core.read(directory)
        self._tell(Restore(state.scalars))
        self.core.restore(state, state.scalars)

    def sleep(self) -> None:
        """Training state of all ranks off their devices."""
        core = self.core
        self._tell(Do("sleep"))
        core.sleep()

    def wake(self) -> None:
        """Training state of all ranks back. Raises NoRoom."""
        assert self._core is not None
        self._tell(Do("wake"))
        self._core.wake()

    def weights_hash(self) -> str:
        """XXH3-128 over the float32 weights, names, types and shapes."""
        core = self.core
        self._tell(Do("weights_hash"))
        return core.weights_hash()

    def close(self) -> None:
        """Send the followers home and part. Not needed with one process; harmless twice."""
        if self._core is not None and not self._ranks.alone:
            self._tell(STOP)
        self._core = None
        self._ranks.close()

    def _tell(self, command: Command) -> None:
        if not self._ranks.alone:
            self._ranks.broadcast(encode(command))


def follow(ranks: Ranks) -> None:
    """The life of a rank other than 0: obey until Stop.

    What a batch itself is refused for is refused on every rank alike, and rank 0 reports it. Anything else that fails
    here ends the process, and with it the step on every rank; the supervisor starts all of them again.
    """
    core: Core | None = None
    hf_logging.disable_progress_bar()
    while True:
        command = decode(ranks.broadcast(None))
        if command == STOP:
            return
        if isinstance(command, Setup):
            core = _load(command.config, ranks)
            continue
        if core is None:
            raise RuntimeError(f"rank 0 sent {type(command).__name__} before Setup; start all ranks together.")
        try:
            _obey(core, command)
        except REFUSALS as error:
            log.warning("rank %d: %s", ranks.rank, error)


def _load(config: BackendConfig, ranks: Ranks) -> Core:
    try:
        return Core(config, ranks)
    except torch.OutOfMemoryError as error:
        raise NoRoom(f"the models and their masters do not fit: {_said(error)} {_either(_SHARD)}") from None


def _train(core: Core, batch: StepBatch) -> StepResult:
    try:
        return train_batch(core, batch)
    except torch.OutOfMemoryError as error:
        c = core.config
        dynamic = c.use_dynamic_batch_size
        cap = f"max-tokens-per-gpu (now {c.max_tokens_per_gpu})" if dynamic else f"micro-batch-size (now {c.micro_batch_size})"
        ways = [] if c.gradient_checkpointing else ["set --gradient-checkpointing"]
        raise NoRoom(
            f"step {batch.step + 1} does not fit into {core.device}, where {core.resident_bytes() / 2**30:.1f} GiB are weights and "
            f"optimizer state: {_said(error)} {_either(*ways, f'lower --{cap}', _SHARD)}"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _said(error: torch.OutOfMemoryError) -> str:
    """Without the processes and hints that torch lists."""
    return str(error).split(" Process ")[0].split(" Including ")[0]


def _either(*ways: str) -> str:
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _obey(core: Core, command: Command) -> None:
    match command:
        case Step():
            _train(core, unpack_step(command))
        case Restore(scalars=scalars):
            core.restore(None, scalars)
        case Do(verb="copy_weights", live=live):
            core.copy_weights(live=live)
        case Do(verb=verb):
            getattr(core, verb)()
