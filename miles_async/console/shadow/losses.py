"""Another objective on the batches that the run trained, on the CPU: what each step would have reported under it.

Where neither objective asks a model anything (one optimizer step a rollout, no correction, no KL, no entropy term), the ratio is 1
whatever the weights are, and the recorded batch alone gives loss, advantages and masks. Else the model runs: the run's own steps
are done again from its checkpoints (as `miles-async replay` does), and before each of them a copy of its state does the same step
under the shadow's objective. The copy's update is thrown away: each step compares two objectives at the run's own weights.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import msgspec

from actors.trainer.backend import BackendConfig, StepBatch, TrainBackend
from actors.trainer.backends import open_backend
from actors.trainer.checkpoint import iter_dir
from actors.trainer.hooks import install
from actors.trainer.objective import finish, policy_loss, prepare_batch
from actors.trainer.objective_config import ObjectiveConfig
from actors.trainer.record import RecordedBatch
from actors.trainer.replay import batch_of
from actors.trainer.training.step import settle_objective
from miles_async.console.shadow.compare import Row
from miles_async.console.shadow.paired import Paired
from miles_async.console.shadow.recorded import RecordedFiles
from miles_async.console.shadow.units import step_back
from miles_async.settings.errors import SettingsError

LOSS = "train/loss"
SHOWN = tuple(
    f"train/{name}" for name in ("pg_clipfrac", "ppo_kl", "kl_loss", "entropy_loss", "grad_norm", "trained_tokens", "tis_clipfrac")
)
MOST_BYTES = 2 << 30  # of a model's files; what is larger would take a CPU minutes a step, and eight times the memory


class RecordedBatches(RecordedFiles):
    """The recorded batches themselves."""

    async def units(self) -> AsyncGenerator[Any]:
        for record in self.records():
            yield record


class Losses:
    """`run` and `shadow`: the two configurations. `saves`: folder of the run's checkpoints. `own`: settings of the
    shadow's, which the run's live values do not replace. SettingsError when it would take a GPU."""

    at_once = 1

    def __init__(
        self, run: BackendConfig, shadow: BackendConfig, *, ranks: int, library: str, saves: Path, own: frozenset[str]
    ) -> None:
        self._configs = tuple(msgspec.structs.replace(config, device="cpu") for config in (run, shadow))
        self._library, self._saves, self._own = library, saves, own
        self._cfgs = tuple(settle_objective(config) for config in self._configs)
        self._asks = any(map(_asks, self._cfgs)) or any(config.num_steps_per_rollout > 1 for config in self._configs)
        size = sum(file.stat().st_size for file in Path(run.hf_checkpoint).glob("*.safetensors"))
        if self._asks and (library == "megatron" or ranks > 1 or size > MOST_BYTES):
            why = f"it asks the model itself, and {size / 1e9:.1f} GB on {ranks} ranks of {library} need a GPU"
            rule = f"this loss cannot be compared here: {why}"
            raise SettingsError(rule, remedy="Without correction, KL and entropy it needs none.")
        self._backends: tuple[TrainBackend, ...] = ()
        self._thread = ThreadPoolExecutor(1, initializer=step_back)  # backends want one, and signals are heard meanwhile
        self._at = 0  # updates inside the weights of the first backend
        self._folder = TemporaryDirectory(prefix="miles-async-shadow-")
        self.paired, self.metrics = Paired(), {name: Paired() for name in SHOWN}
        self.left_out: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        return self

    def _open(self) -> None:
        for config in self._configs if self._asks else ():
            backend = open_backend(self._library)
            backend.setup(config)
            self._backends += (backend,)
        for cfg in self._cfgs:
            install(cfg)

    async def __aexit__(self, *exc: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        for backend in self._backends:
            backend.close()
        self._folder.cleanup()

    async def compare(self, unit: RecordedBatch) -> list[Row]:
        """One step's metrics under both."""
        batches = [batch_of(unit), batch_of(unit)]
        batches[1].knobs = {name: value for name, value in unit.knobs.items() if name not in self._own}
        found = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._by_model if self._asks else self._alone, batches
        )
        if found is None:
            self.left_out["no checkpoint leads to it"] += 1
            return []
        both = {name: (found[0][name], found[1][name]) for name in (LOSS, *SHOWN) if name in found[0] and name in found[1]}
        self.paired.add([both[LOSS]])
        for name, pair in both.items():
            if name != LOSS:
                self.metrics[name].add([pair])
        run, shadow = ({name: pair[side] for name, pair in both.items()} for side in (0, 1))
        return [{"step": unit.done.step, "run": run, "shadow": shadow}]

    def _by_model(self, batches: list[StepBatch]) -> list[dict[str, float]] | None:
        """The step at the run's weights; None when they cannot be had."""
        own, other = self._backends
        before = batches[0].step
        if (kept := iter_dir(self._saves, before)).is_dir():
            own.load(kept)
        elif self._at != before:
            return None
        copy = iter_dir(Path(self._folder.name), before)
        copy.mkdir()
        saved = own.save(copy)
        saved.write()
        saved.finish()
        other.load(copy)
        shutil.rmtree(copy)
        results = [backend.train_step(batch) for backend, batch in zip(self._backends, batches, strict=True)]
        self._at = before + 1
        return [result.metrics for result in results]

    def _alone(self, batches: list[StepBatch]) -> list[dict[str, float]]:
        return [_without_model(cfg, batch) for cfg, batch in zip(self._cfgs, batches, strict=True)]

    def more(self) -> dict[str, Any]:
        """Beside the loss: of each metric its means, and half the width of the difference's interval."""
        told = {name: pair for name, pair in self.metrics.items() if pair.groups > 1}
        return {"metrics": {name: (pair.run, pair.shadow, pair.half) for name, pair in told.items()}}


def _asks(cfg: ObjectiveConfig) -> bool:
    """Whether an objective looks at numbers that only a model gives."""
    passes = cfg.needs_old_logp or cfg.needs_rollout_logp or cfg.needs_ref_logp or cfg.estimator.critic
    return passes or cfg.entropy_coef != 0 or bool(cfg.custom_loss_function_path)


def _without_model(cfg: ObjectiveConfig, batch: StepBatch) -> dict[str, float]:
    """The step's metrics without a model: new log-probs are the engine's, and the ratio is 1."""
    changes = {name: batch.knobs[name] for name in ObjectiveConfig.__struct_fields__ if name in batch.knobs}
    cfg = msgspec.structs.replace(cfg, **changes, max_staleness=batch.knobs.get("max_weight_staleness", cfg.max_staleness))
    samples = [sample.train for sample in batch.samples]
    prepared = prepare_batch(cfg, samples, current_step=batch.step)
    norm = prepared.norm()
    _, sums = policy_loss(cfg, prepared.micro_batch(range(len(samples)), prepared.fields["rollout_logp"]), norm)
    found = {**prepared.metrics, **finish(sums, norm, per_token=cfg.reduction == "per_token")}
    return {f"train/{name}": value for name, value in found.items()}
