"""On-policy distillation from a second model in the trainer, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from actors.runtime.run import Refused
from actors.trainer.backend import BatchRefused, BatchSample, StepBatch
from actors.trainer.convert import to_trajectories
from actors.trainer.objective import TrainSample
from actors.trainer.torch_backend import TorchBackend
from bus.messages.base import pack_floats
from bus.messages.samples import Scored
from tests.actors.house import rollout
from tests.trainer.conftest import SHAPE, saved, served

Backend = Callable[..., TorchBackend]
Batch = Callable[..., StepBatch]
OPD = {"advantage_estimator": "on_policy_distillation", "correction": "none"}


def logps(model: Any, s: BatchSample) -> torch.Tensor:
    """Log-probs of the response's tokens, one sample at a time, at its temperature."""
    tokens = torch.from_numpy(np.concatenate([s.prompt_tokens, s.response_tokens])).long()[None]
    rows = slice(len(s.prompt_tokens) - 1, tokens.shape[1] - 1)
    logp = torch.log_softmax(model(input_ids=tokens).logits[0, rows] / s.temperature, -1)
    return logp.gather(1, tokens[0, len(s.prompt_tokens) :, None])[:, 0]


@pytest.mark.parametrize("penalty", [None, 0.7], ids=["estimator", "penalty"])
def test_loss_and_gradient_are_those_of_a_computation_sample_by_sample(
    penalty: float | None, models: dict[str, Path], make_backend: Backend, make_batch: Batch
) -> None:
    settings = OPD if penalty is None else {"correction": "none", "use_opd": True, "opd_kl_coef": penalty}
    backend = make_backend(objective=settings, opd_teacher_load=str(models["qwen3_wide"]), clip_grad=0.0, lr=0.0)
    batch = make_batch(3, temperatures=(1.0, 0.7))
    metrics = backend.train_step(batch).metrics

    student, teacher = (AutoModelForCausalLM.from_pretrained(models[name]) for name in ("qwen3", "qwen3_wide"))
    loss, gaps = torch.zeros(()), []
    for s in batch.samples:
        trained = torch.from_numpy(s.train.loss_mask) > 0
        if not trained.any():
            continue
        new, wise = logps(student, s)[trained], logps(teacher, s)[trained].detach()
        siblings = np.array([t.train.reward for t in batch.samples if t.train.group == s.train.group])
        reward = (s.train.reward - siblings.mean()) / (siblings.std(ddof=1) + 1e-6)
        gap = new.detach() - wise
        advantage = -gap if penalty is None else reward - penalty * gap
        loss = loss - ((new - new.detach()).exp() * advantage).mean() / len(batch.samples)
        gaps += gap.tolist()
    loss.backward()

    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert metrics["train/opd_reverse_kl"] == pytest.approx(np.mean(gaps), rel=1e-4, abs=1e-6)
    for name, p in backend.core.weights.params.items():
        torch.testing.assert_close(p.grad, student.get_parameter(name).grad, rtol=1e-4, atol=2e-6)


def test_the_student_comes_nearer_to_its_teacher(models: dict[str, Path], make_backend: Backend) -> None:
    """One-token answers sampled by the student; the exact reverse KL over the vocabulary falls."""
    backend = make_backend(objective=OPD, opd_teacher_load=str(models["qwen3_wide"]), lr=3e-3, clip_grad=1.0)
    teacher = AutoModelForCausalLM.from_pretrained(models["qwen3_wide"])
    prompts = [np.arange(k, k + 4, dtype=np.int32) for k in range(4)]

    @torch.no_grad()
    def distributions(model: Any) -> torch.Tensor:
        tokens = torch.from_numpy(np.stack(prompts)).long()
        return torch.log_softmax(model(input_ids=tokens).logits[:, -1], -1)

    wise, distances, rng = distributions(teacher), [], np.random.default_rng(1)
    for step in range(30):
        student = AutoModelForCausalLM.from_pretrained(models["qwen3"])
        student.load_state_dict(served(backend), strict=False)
        own = distributions(student)
        distances.append(float((own.exp() * (own - wise)).sum(-1).mean()))
        samples = []
        for g, prompt in enumerate(prompts):
            p = own[g].exp().double().numpy()
            for i, token in enumerate(rng.choice(len(p), 32, p=p / p.sum())):
                train = TrainSample(sample_id=f"g{g}/{i}", group=f"g{g}", response_length=1, reward=0.0, spans=[(step, 1)])
                samples.append(BatchSample(prompt, np.array([token], np.int32), 1.0, train))
        backend.train_step(StepBatch(samples, step=step, seed=step))
    assert distances[-1] < 0.5 * distances[0], distances


def test_a_teacher_equal_to_the_student_teaches_nothing(models: dict[str, Path], make_backend: Backend, make_batch: Batch) -> None:
    same = make_backend(objective=OPD, opd_teacher_load=str(models["qwen3"]))
    result = same.train_step(make_batch(4)).metrics
    assert result["train/opd_reverse_kl"] == 0.0 and result["train/loss"] == 0.0 and result["train/grad_norm"] == 0.0


def test_rewards_play_no_part_in_pure_distillation(models: dict[str, Path], make_backend: Backend, make_batch: Batch) -> None:
    hashes = set()
    for reward in (0.0, 1.0, None):
        backend, batch = make_backend(objective=OPD, opd_teacher_load=str(models["qwen3_wide"])), make_batch(4)
        for s in batch.samples:
            s.train.reward = reward
        assert sum(backend.train_step(batch).trained_tokens) > 0
        hashes.add(backend.weights_hash())
    assert len(hashes) == 1


def test_teachers_log_probs_may_come_with_the_samples(models: dict[str, Path], make_backend: Backend, make_batch: Batch) -> None:
    given = make_batch(5)
    teacher = AutoModelForCausalLM.from_pretrained(models["qwen3_wide"])
    for s in given.samples:
        s.train.teacher_logp = logps(teacher, s).detach().numpy()
    brought, loaded = make_backend(objective=OPD), make_backend(objective=OPD, opd_teacher_load=str(models["qwen3_wide"]))
    a, b = brought.train_step(given).metrics, loaded.train_step(make_batch(5)).metrics
    assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
    assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)


def test_a_served_teachers_log_probs_reach_the_sample() -> None:
    done = rollout(1, 0)
    [plain] = to_trajectories(Scored(rollout=done, reward=0.0))
    numbers = [-0.5] * done.response.n_tokens
    [taught] = to_trajectories(Scored(rollout=done, reward=0.0, teacher_logprobs=pack_floats(numbers)))
    assert plain.train.teacher_logp is None and list(taught.train.teacher_logp) == numbers


@pytest.mark.parametrize("objective", [OPD, {"use_opd": True}], ids=["estimator", "penalty"])
def test_no_teacher_at_all_is_an_error_and_changes_nothing(
    objective: dict[str, object], make_backend: Backend, make_batch: Batch
) -> None:
    backend = make_backend(objective=objective)
    before = backend.weights_hash()
    with pytest.raises(BatchRefused, match="teacher"):
        backend.train_step(make_batch(0))
    assert backend.weights_hash() == before


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path, make_backend: Backend) -> None:
    AutoModelForCausalLM.from_config(Qwen3Config(**{**SHAPE, "vocab_size": 48})).save_pretrained(tmp_path)
    with pytest.raises(Refused, match="48 tokens in its vocabulary, the policy has 40") as refusal:
        make_backend(objective=OPD, opd_teacher_load=str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_restored_distillation_is_the_same_to_the_last_bit(
    tmp_path: Path, models: dict[str, Path], make_backend: Backend, make_batch: Batch
) -> None:
    settings = {"objective": OPD, "opd_teacher_load": str(models["qwen3_wide"])}
    backend = make_backend(**settings)
    backend.train_step(make_batch(0))
    saved(backend, tmp_path / "c")
    backend.train_step(make_batch(1, step=1))
    other = make_backend(**settings)
    other.load(tmp_path / "c")
    other.train_step(make_batch(1, step=1))
    assert other.weights_hash() == backend.weights_hash()
