"""Functions of the user's: what they change, and how wrong ones are refused before a model loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.runtime.run import Refused
from actors.trainer.backend import BatchRefused, StepBatch
from actors.trainer.hooks import install, probe, synthetic_samples
from actors.trainer.objective import ObjectiveConfig, check, policy_loss, prepare_batch
from actors.trainer.objective.custom import HOOKS
from actors.trainer.objective.loss import token_terms
from actors.trainer.objective.reductions import reduce_sum
from actors.trainer.objective_config import SIGNATURES, HookError
from actors.trainer.torch_backend import TorchBackend
from tests.declared import objective_of
from tests.trainer import hook_samples
from tests.warm.launched import warmed

HERE = "tests.trainer.hook_samples."
LOSS, ADVANTAGE, TIS, REDUCER, REWARDS = SIGNATURES
GOOD = {LOSS: "reinforce", ADVANTAGE: "twice_the_mean", TIS: "halved", REDUCER: "dr_grpo", REWARDS: "plus_one"}
BAD = [
    (LOSS, "three_arguments", "takes 3 positional arguments but 4 were given"),
    (LOSS, "not_scalar", r"the loss is torch.float32 \[21\], expected a float tensor \[\]"),
    (LOSS, "detached", "carries no gradient"),
    (LOSS, "unmasked", "the mask leaves out"),
    (LOSS, "mean_of_micro_batch", "depend on packing"),
    (LOSS, "not_a_number", "not finite"),
    (ADVANTAGE, "per_sample_advantages", r"advantages is torch.float64 \[6\], expected a float tensor \[21\]"),
    (ADVANTAGE, "on_another_device", "advantages lies on meta, what it was given on cpu"),
    (TIS, "detached_tis", "carries no gradient"),
    (REWARDS, "too_few_rewards", "raw rewards are not 6 numbers"),
    (TIS, "no_metrics", r"expected a tuple \(pg_loss, loss_masks, metrics\)"),
    (TIS, "integer_masks_lost", "not a list of 6 tensors"),
    (REDUCER, "mean_reducer", "depend on packing"),
    (REDUCER, "NOT_CALLABLE", "cannot be loaded: .*is a int, not a function"),
    (REDUCER, "nowhere", "cannot be loaded: module 'tests.trainer.hook_samples' has no attribute 'nowhere'"),
]


def config(field: str, name: str, **more: Any) -> ObjectiveConfig:
    """Settings with one hook, the correction on where it is the hook's."""
    return objective_of(**{"proximal": "current", "correction": "tis" if field == TIS else "none", field: HERE + name, **more})


def loss_of(cfg: ObjectiveConfig) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, gradient and metrics of the synthetic batch."""
    prepared = prepare_batch(cfg, synthetic_samples(), current_step=0)
    new = prepared.fields["old_logp"].clone().requires_grad_()
    loss, sums = policy_loss(cfg, prepared.micro_batch(range(6), new), prepared.norm())
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad, sums


@pytest.mark.parametrize(("field", "name"), [*GOOD.items(), (REWARDS, "plus_one_of_numpy")])
def test_a_sound_function_passes_and_settings_with_it_are_sound(field: str, name: str) -> None:
    cfg = config(field, name)
    probe(cfg)
    assert check(cfg) is cfg


@pytest.mark.parametrize(("field", "name", "said"), BAD, ids=[name for _, name, _ in BAD])
def test_a_wrong_function_is_refused_with_setting_problem_and_signature(field: str, name: str, said: str) -> None:
    with pytest.raises(HookError, match=said) as caught:
        probe(config(field, name))
    text = str(caught.value)
    assert text.startswith(f"{field} = '{HERE}{name}': ") and SIGNATURES[field] in text and "\n" not in text


def test_only_the_wrong_one_of_several_is_blamed() -> None:
    cfg = msgspec.structs.replace(config(ADVANTAGE, GOOD[ADVANTAGE]), **{REDUCER: HERE + "mean_reducer"})
    with pytest.raises(HookError) as caught:
        probe(cfg)
    assert caught.value.field == REDUCER


def test_settings_with_a_hook_that_nobody_loaded_are_refused() -> None:
    cfg = config(REWARDS, "plus_one")
    HOOKS.pop(HERE + "plus_one", None)
    with pytest.raises(ValueError, match="is not loaded"):
        check(cfg)
    install(cfg)
    assert check(cfg) is cfg


def test_each_function_changes_the_loss_as_written() -> None:
    plain = objective_of(proximal="current")
    samples = synthetic_samples()
    prepared = prepare_batch(plain, samples, current_step=0)
    _, grad, _ = loss_of(plain)
    for field, name in GOOD.items():
        install(config(field, name))

    _, own, sums = loss_of(config(LOSS, "reinforce"))
    torch.testing.assert_close(own, grad)  # at ratio 1 the gradient of PPO is that of REINFORCE
    assert "advantage_sum" in sums and "pg_clipfrac" not in sums and "train_rollout_logprob_abs_diff" in sums

    _, tis, sums = loss_of(config(TIS, "halved"))
    starts = prepared.offsets.tolist()
    want = 0.5 * grad
    want[starts] = 0.0
    torch.testing.assert_close(tis, want)
    assert "halved" in sums

    _, reduced, _ = loss_of(config(REDUCER, "dr_grpo"))
    torch.testing.assert_close(reduced, -prepared.advantages * prepared.mask / 1000 / 6)

    twice = prepare_batch(config(ADVANTAGE, "twice_the_mean"), samples, current_step=0)
    torch.testing.assert_close(twice.advantages, 2 * prepared.advantages * prepared.mask)

    plus = prepare_batch(config(REWARDS, "plus_one"), samples, current_step=0)
    assert plus.rewards == (1.0, 2.0) * 3 and plus.metrics["reward_mean"] == 0.5


def test_samples_without_a_reward_are_not_shown_and_stay_masked() -> None:
    cfg = config(REWARDS, "plus_one")
    install(cfg)
    samples = synthetic_samples()
    samples[2].reward = None
    samples[3].reward = float("inf")
    prepared = prepare_batch(cfg, samples, current_step=0)
    assert prepared.rewards == (1.0, 2.0, 0.0, 0.0, 1.0, 2.0)
    assert prepared.flags["missing_reward"] == ["probe1/0", "probe1/1"]
    assert prepared.counts.tolist()[2:4] == [0, 0]


def test_the_backend_trains_with_hooks_and_refuses_bad_ones_before_the_model(
    make_config: Callable[..., Any], make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    result = make_backend(objective={"correction": "none", LOSS: HERE + "reinforce"}).train_step(make_batch(1))
    assert result.metrics["train/updates"] == 1 and "train/advantage_sum" in result.metrics
    bad = make_config(objective={"correction": "none", LOSS: HERE + "not_scalar"})
    missing_model = msgspec.structs.replace(bad, hf_checkpoint="/nowhere")
    with pytest.raises(Refused, match=LOSS):
        TorchBackend().setup(missing_model)


class Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def mute(*args: object) -> None:
    raise Mute


def test_a_function_that_fails_at_work_refuses_the_batch_and_changes_nothing(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(objective={"correction": "none", ADVANTAGE: HERE + "twice_the_mean"})
    monkeypatch.setitem(HOOKS, HERE + "twice_the_mean", lambda args, inputs: 1 / 0)
    before = backend.weights_hash()
    with pytest.raises(BatchRefused, match=r"custom_advantage_function_path.*raised ZeroDivisionError"):
        backend.train_step(make_batch(1))
    monkeypatch.setitem(HOOKS, HERE + "twice_the_mean", lambda args, inputs: sys.exit())
    with pytest.raises(BatchRefused, match=r"custom_advantage_function_path.*raised SystemExit"):
        backend.train_step(make_batch(1))
    monkeypatch.setitem(HOOKS, HERE + "twice_the_mean", mute)
    with pytest.raises(BatchRefused, match=r"custom_advantage_function_path.*raised Mute: its text cannot be made"):
        backend.train_step(make_batch(1))
    assert backend.weights_hash() == before


@pytest.mark.parametrize(
    ("name", "said"),
    [("detached", "carries no gradient"), ("walks_itself", "gradient raised Runtime"), ("breaks_later", "gradient raised Zero")],
)
def test_a_loss_that_cannot_be_gone_back_through_at_work_is_named(
    name: str, said: str, make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    backend = make_backend(objective={"correction": "none", LOSS: HERE + "reinforce"})
    before = backend.weights_hash()
    monkeypatch.setitem(HOOKS, HERE + "reinforce", getattr(hook_samples, name))
    with pytest.raises(BatchRefused, match=f"custom_loss_function_path.*{said}"):
        backend.train_step(make_batch(1))
    assert backend.weights_hash() == before and said in backend.refuses(make_batch(1))


def test_weights_that_cannot_be_gone_back_through_at_work_are_named(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(objective={"correction": "tis", TIS: HERE + "halved"})
    before = backend.weights_hash()
    monkeypatch.setitem(HOOKS, HERE + "halved", hook_samples.breaks_later_tis)
    with pytest.raises(BatchRefused, match=r"custom_tis_function_path.*its gradient raised ZeroDivisionError"):
        backend.train_step(make_batch(1))
    assert backend.weights_hash() == before and "its gradient raised Zero" in backend.refuses(make_batch(1))


def test_weights_of_the_users_give_the_gradient_that_autograd_finds() -> None:
    """Of a correction that is no plain factor, and of two functions of the user's, one after the other."""
    cfg = config(TIS, "squared_tis")
    install(cfg)
    value, grad, _ = loss_of(cfg)
    prepared = prepare_batch(cfg, synthetic_samples(), current_step=0)
    new = prepared.fields["old_logp"].clone().requires_grad_()
    mb = prepared.micro_batch(range(6), new)
    norm = prepared.norm()
    plain = token_terms(objective_of(proximal="current", correction="none"), mb, norm).loss
    expected = reduce_sum(plain.square(), mb.mask, mb.weights) * norm.scale / norm.divisor
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, new.grad)
    assert grad.any()
    install(two := config(TIS, "squared_tis", **{REDUCER: HERE + "dr_grpo"}))
    both = loss_of(two)[1]
    assert both.any() and not both[~mb.mask].any()


def test_what_a_loss_changes_stays_its_own(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def done() -> tuple[str, dict[str, float]]:
        backend = make_backend(objective={"correction": "none", LOSS: HERE + "reinforce"})
        monkeypatch.setitem(HOOKS, HERE + "reinforce", loss)
        metrics = [backend.train_step(make_batch(1, step=step)).metrics for step in (0, 1)][-1]
        return backend.weights_hash(), {k: v for k, v in metrics.items() if not k.endswith("_s")}

    loss: Any = hook_samples.reinforce
    plain = done()
    loss = hook_samples.meddling
    assert done() == plain


def test_the_dry_run_answers_in_json_whatever_the_hook_prints(warm: Path | None) -> None:
    def ask(cfg: ObjectiveConfig) -> tuple[int, dict[str, str]]:
        done = subprocess.run(
            [sys.executable, "-m", "actors.trainer.dry_run"],
            input=msgspec.json.encode(cfg),
            env=warmed(warm, os.environ) if warm is not None else None,
            capture_output=True,
            timeout=120,
            check=False,
        )
        return done.returncode, json.loads(done.stdout)

    assert ask(config(REDUCER, "dr_grpo")) == (0, {})
    status, said = ask(config(ADVANTAGE, "per_sample_advantages"))
    assert status == 2 and said["field"] == ADVANTAGE and said["path"] == HERE + "per_sample_advantages"
