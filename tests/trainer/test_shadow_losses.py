"""A shadow's loss: the run's steps done again to the bit, and beside each the same step under another objective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from actors.trainer.backend import BackendConfig
from actors.trainer.checkpoint import iter_dir
from actors.trainer.record import RecordedBatch
from actors.trainer.replay import batch_of
from bus.messages.base import pack_floats, pack_ints
from bus.messages.groups import GroupKept
from bus.messages.policy import StepDone
from bus.messages.samples import Response, RolloutDone, SampleTask, Scored
from bus.messages.versions import PolicyVersion, VersionSpan
from miles_async.console.shadow.losses import Losses
from miles_async.settings.errors import SettingsError
from tests.trainer.conftest import BackendMaker, saved

STEPS = (1, 2, 3, 5)


def recorded(step: int, **knobs: float) -> RecordedBatch:
    """Three groups of three, as the trainer records them before a step."""
    rng = np.random.default_rng(step)

    def one(group: str, index: int) -> Scored:
        n = int(rng.integers(2, 9))
        task = SampleTask(
            sample_id=f"{group}/{index}",
            group_id=group,
            index=index,
            n_samples=3,
            prompt_id="p",
            prompt_tokens=pack_ints([1, 2]),
        )
        response = Response(
            tokens=pack_ints(rng.integers(0, 40, n)),
            logprobs=pack_floats(-3.7 + 0.5 * rng.standard_normal(n)),
            loss_mask=memoryview(b"\1" * n),
            spans=(VersionSpan(step, step - 1, n),),
        )
        return Scored(rollout=RolloutDone(task=task, response=response, finish="stop"), reward=float(rng.random()))

    names = [f"g{step}-{k}" for k in range(3)]
    groups = tuple(GroupKept(group_id=g, prompt_id="p", samples=tuple(one(g, i) for i in range(3))) for g in names)
    done = StepDone(step=step, version=PolicyVersion(step + 1, step), trained_on=PolicyVersion(step, step - 1), groups=tuple(names))
    return RecordedBatch(done=done, groups=groups, knobs=knobs)


@pytest.fixture
def run(make_backend: BackendMaker, tmp_path: Path) -> list[RecordedBatch]:
    """Batches with the metrics that the run had of them, and a checkpoint behind step 2; step 4 is not on record."""
    backend, found = make_backend(), []
    for step in range(1, 6):
        batch = recorded(step, tis_clip=2.0, eps_clip=0.2)
        metrics = backend.train_step(batch_of(batch)).metrics
        found.append(msgspec.structs.replace(batch, done=msgspec.structs.replace(batch.done, metrics=metrics)))
        if step == 2:
            iter_dir(tmp_path, 2).parent.mkdir(exist_ok=True)
            saved(backend, iter_dir(tmp_path, 2))
    backend.close()
    return [batch for batch in found if batch.done.step in STEPS]


async def test_the_runs_side_is_what_the_run_had_and_the_shadows_update_changes_nothing(
    run: list[RecordedBatch], make_config: Callable[..., BackendConfig], tmp_path: Path
) -> None:
    config = make_config()
    other = make_config(objective={"correction": "none", "tis_clip": 1.01, "grpo_std_normalization": False})
    own = frozenset({"tis_clip"})
    async with Losses(config, other, ranks=1, library="torch", saves=tmp_path, own=own) as losses:
        rows = [row for batch in run for row in await losses.compare(batch)]
    assert [row["step"] for row in rows] == [1, 2, 3] and losses.left_out == {"no checkpoint leads to it": 1}
    for row, batch in zip(rows, run, strict=False):
        assert row["run"] == {name: batch.done.metrics[name] for name in row["run"]}, "bit for bit, three steps long"
        assert row["run"]["train/grad_norm"] != row["shadow"]["train/grad_norm"]
    async with Losses(config, other, ranks=1, library="torch", saves=tmp_path, own=own) as alone:
        assert await alone.compare(run[2]) == rows[2:], "steps before it do not matter: a step begins at the run's weights"
    assert losses.paired.groups == 3 and "train/grad_norm" in losses.more()["metrics"]


async def test_without_correction_and_kl_no_model_is_needed_and_the_loss_is_what_the_trainer_has(
    make_backend: BackendMaker, make_config: Callable[..., BackendConfig], tmp_path: Path
) -> None:
    plain = {"correction": "none"}
    backend, batch = make_backend(objective=plain), recorded(1)
    metrics = backend.train_step(batch_of(batch)).metrics
    backend.close()
    config, other = (
        msgspec.structs.replace(make_config(objective=plain | more), hf_checkpoint="nowhere")
        for more in ({}, {"reduction": "per_token"})
    )
    async with Losses(config, other, ranks=8, library="megatron", saves=tmp_path, own=frozenset()) as losses:
        [row] = await losses.compare(batch)
    assert row["run"]["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-5, abs=1e-7)
    assert row["run"]["train/loss"] != row["shadow"]["train/loss"]
    with pytest.raises(SettingsError, match="on 8 ranks of megatron need a GPU"):
        Losses(make_config(), other, ranks=8, library="megatron", saves=tmp_path, own=frozenset())
