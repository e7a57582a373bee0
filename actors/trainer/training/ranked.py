"""`RankedBackend`: the training backend of rank 0, the one the trainer's actor calls, over any library's `Core`.

With several ranks each verb is first sent to the followers (`python -m actors.trainer.follower`), then run here too; the ranks
meet in the collectives inside. Always true: what rank 0 can refuse alone it refuses before the others are told anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import cast

import torch

from actors.runtime.hooks import load_hook
from actors.runtime.run import Refused
from actors.trainer.backend import BackendConfig, BatchRefused, StepBatch, StepResult, TrainBackend
from actors.trainer.hooks import install, probe
from actors.trainer.objective import ObjectiveConfigError
from actors.trainer.objective_config import HookError
from actors.trainer.training.export import gathered
from actors.trainer.training.offload import NoRoom
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.saving import RankedCheckpoint, write_apart
from actors.trainer.training.step import CONTENT, REFUSALS, BatchFault, as_line, examine, settle_objective, train_batch
from actors.trainer.training.verbs import Core, Saving
from actors.trainer.training.wire import Command, Do, Export, LoadOrder, Save, Setup, StepOrder, decode, encode
from actors.trainer.transports.flat import NamedTensors

log = logging.getLogger(__name__)
LIBRARIES = {
    "torch": "actors.trainer.torch_backend.core.Core",
    "fsdp": "actors.trainer.torch_backend.core.Core",
    "megatron": "actors.trainer.megatron_backend.core.MegatronCore",
}
_SHARD = "shard over more GPUs with --actor-num-gpus-per-node"
STOP = Do("stop")


def core_of(library: str) -> Callable[[BackendConfig, Ranks], Core]:
    """What makes one rank's `Core` of a config and connected ranks. `library`: torch (fsdp is the same), megatron, or a dotted path
    of the user's. Raises Refused."""
    try:
        return cast("Callable[[BackendConfig, Ranks], Core]", load_hook(LIBRARIES.get(library, library)))
    except Refused as error:
        if library not in LIBRARIES:
            raise
        remedy = f"Install it with pip install 'miles-async[{library}]', or choose another --train-backend"
        raise Refused(f"train backend {library} cannot be loaded: {error.__cause__}. {remedy}.") from error


class RankedBackend(TrainBackend):
    """Of a library: see `core_of`."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._ranks = Ranks()
        self._core: Core | None = None

    @property
    def core(self) -> Core:
        """The parts, after `setup` and while their memory is here; asked for before other ranks are told anything."""
        if self._core is None:
            raise RuntimeError(f"the {self._library} backend is used before setup(); call setup(config) first.")
        if self._core.asleep:
            raise RuntimeError(f"the {self._library} backend is used while its memory is away; call wake() first.")
        return self._core

    def setup(self, config: BackendConfig) -> None:
        """Waits for all ranks. Hooks are tried and settings checked before any model loads."""
        try:
            probe(config.objective)
            settle_objective(config)
        except (HookError, ObjectiveConfigError) as error:
            raise Refused(" ".join(str(error).split())) from error
        core_of(self._library)
        if not self._ranks.connected:
            self._ranks = Ranks.from_environment()
            self._ranks.connect()
        self.others = self._ranks.others
        self._tell(Setup(self._library, config))
        if self._core is not None:
            self._core.close()
            self._core = None
        self._core = _load(self._library, config, self._ranks)

    def train_step(self, batch: StepBatch) -> StepResult:
        """Raises BatchRefused, StaleTokenError (a bug; nothing changed) and NoRoom (a step may be half done: the process is
        over)."""
        core = self.core
        if not self._ranks.alone:
            self._tell(StepOrder.of(batch))
        made = core.updates
        try:
            return _train(core, batch)
        except (*REFUSALS, BatchFault) as error:
            raise BatchRefused(as_line(error), half_done=core.updates != made) from error
        except CONTENT as error:
            if not self._ranks.alone:  # met between two meetings of the ranks: the others wait, and only its end tells them
                raise
            raise BatchRefused(as_line(error), half_done=core.updates != made) from error

    def refuses(self, batch: StepBatch) -> str:
        """Of several ranks the first looks alone, and runs no model."""
        try:
            examine(self.core, batch, forward=self._ranks.alone)
        except (*REFUSALS, *CONTENT) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return ""

    def export(self, limit_bytes: int) -> Generator[NamedTensors]:
        core = self.core
        self._tell(Export(limit_bytes))
        return gathered(core, self._ranks, limit_bytes)

    def beside(self) -> dict[str, bytes]:
        return self.core.beside()

    def save(self, directory: Path) -> RankedCheckpoint:
        core = self.core
        self._tell(Save(str(directory)))
        return RankedCheckpoint(core, core.save(directory), self._ranks, directory, finish=lambda: self._tell(Do("finish")))

    def load(self, directory: Path, drops: tuple[str, ...] = ()) -> None:
        read = self.core.read(directory, drops)
        self._tell(LoadOrder(str(directory), drops))
        self.core.load(directory, read, drops)

    def sleep(self) -> None:
        core = self.core
        self._tell(Do("sleep"))
        core.sleep()

    def wake(self) -> None:
        assert self._core is not None
        self._tell(Do("wake"))
        self._core.wake()

    def weights_hash(self) -> str:
        core = self.core
        self._tell(Do("weights_hash"))
        return core.weights_hash()

    def close(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            self._tell(STOP)
            core.close()
        self._ranks.close()

    def _tell(self, command: Command) -> None:
        if not self._ranks.alone:
            self._ranks.broadcast(encode(command))


class FollowingRank:
    """A rank other than 0: it obeys until Stop.

    What a batch itself is refused for is refused on every rank alike, and rank 0 reports it. Anything else that fails
    here ends the process, and with it the step on every rank; whoever started them starts all of them again.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._core: Core | None = None
        self._saving: Saving | None = None

    def follow(self) -> None:
        """Until Stop, which ends the wait for the next command too; else COMMAND_DEADLINE does."""
        while (command := decode(self._ranks.broadcast(None))) != STOP:
            if isinstance(command, Setup):
                if self._core is not None:
                    self._core.close()
                    self._core = None
                try:
                    self._core = _load(command.library, command.config, self._ranks)
                except Refused as error:  # rank 0 says so too, and ends all of us
                    log.error("rank %d: %s", self._ranks.rank, error)
                continue
            if self._core is None:
                raise RuntimeError(f"rank 0 sent {type(command).__name__} before Setup; start all ranks together.")
            try:
                self._obey(self._core, command)
            except (*REFUSALS, BatchFault) as error:
                log.warning("rank %d: %s", self._ranks.rank, error)
        if self._core is not None:
            self._core.close()

    def _obey(self, core: Core, command: Command) -> None:
        match command:
            case StepOrder():
                _train(core, command.arrived())
            case LoadOrder(directory=directory, drops=drops):
                core.load(Path(directory), None, drops)
            case Export(limit_bytes=limit_bytes):
                for _ in gathered(core, self._ranks, limit_bytes):
                    pass
            case Save(directory=directory):
                saving = core.save(Path(directory))
                self._saving = saving if saving.meets else None  # else it is the writing thread's alone, and goes with it
                write_apart(saving, self._ranks)
            case Do(verb="finish"):
                assert self._saving is not None
                self._saving.finish()
                self._saving = None
            case Do(verb=verb):
                getattr(core, verb)()


def _load(library: str, config: BackendConfig, ranks: Ranks) -> Core:
    """What one rank can refuse alone it says before the ranks meet, and all of them refuse it."""
    fault = ""
    try:
        make = core_of(library)
        _look(config)
        if (look := getattr(make, "look", None)) is not None:
            look(config, ranks)
    except (Refused, HookError) as error:
        fault = as_line(error) if isinstance(error, HookError) else str(error)
    if said := ranks.first_said(fault):
        raise Refused(said)
    torch.use_deterministic_algorithms(config.deterministic_mode)
    try:
        return make(config, ranks)
    except torch.OutOfMemoryError as error:
        raise NoRoom(f"the models and their masters do not fit: {_said(error)} {_either(_SHARD)}") from None


def _look(config: BackendConfig) -> None:
    """Refused, HookError: this host lacks a directory or a function of the user's."""
    for name in ("hf_checkpoint", "published_as", "ref_load", "critic_load", "opd_teacher_load"):
        if (path := getattr(config, name)) and not Path(path).is_dir():
            raise Refused(f"{name}={path}: no such directory on this host. Each host of the trainer needs it at the same place.")
    install(config.objective)


def _train(core: Core, batch: StepBatch) -> StepResult:
    try:
        return train_batch(core, batch)
    except torch.OutOfMemoryError as error:
        c = core.config
        dynamic = c.use_dynamic_batch_size
        cap = f"max-tokens-per-gpu (now {c.max_tokens_per_gpu})" if dynamic else f"micro-batch-size (now {c.micro_batch_size})"
        raise NoRoom(
            f"step {batch.step + 1} does not fit into {core.device}, where {core.resident_bytes() / 2**30:.1f} GiB are weights and "
            f"optimizer state: {_said(error)} {_either(*core.less_memory, f'lower --{cap}', _SHARD)}"
        ) from None


def _said(error: torch.OutOfMemoryError) -> str:
    """Without the processes and hints that torch lists."""
    return str(error).split(" Process ")[0].split(" Including ")[0]


def _either(*ways: str) -> str:
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."
