"""The critic of advantage_estimator=ppo on tiny models: its numbers against a computation sample by sample, its state, its
place among the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.training.files import hash_tensors
from actors.trainer.training.state import CRITIC, CRITIC_OPTIMIZER, MODEL, OPTIMIZER
from bus.errors import CheckpointRefused
from tests.trainer.conftest import saved, state_of

Backend = Callable[..., TorchBackend]
Batch = Callable[..., StepBatch]
PPO = {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.8, "correction": "none", "value_clip": 0.05}


def gae_by_hand(rewards: list[float], values: list[float], gamma: float, lambd: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of the trained tokens of one sample, written out from the end."""
    advantages, running, after = [0.0] * len(values), 0.0, 0.0
    for k in reversed(range(len(values))):
        running = rewards[k] + gamma * after - values[k] + gamma * lambd * running
        advantages[k], after = running, values[k]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_losses_values_and_both_gradients_are_those_of_a_computation_sample_by_sample(
    critic_dir: Path, models: dict[str, Path], make_backend: Backend, make_batch: Batch
) -> None:
    backend = make_backend(objective=PPO, critic_load=str(critic_dir), clip_grad=0.0, lr=0.0, critic_lr=0.0)
    batch = make_batch(3)
    metrics = backend.train_step(batch).metrics

    policy = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    backbone = AutoModel.from_pretrained(critic_dir)
    head = torch.nn.Parameter(load_file(critic_dir / "model.safetensors")["score.weight"])
    policy_loss, value_loss, count = torch.zeros(()), torch.zeros(()), len(batch.samples)
    all_values, all_returns = [], []
    for s in batch.samples:
        tokens = torch.from_numpy(np.concatenate([s.prompt_tokens, s.response_tokens])).long()[None]
        rows = slice(len(s.prompt_tokens) - 1, tokens.shape[1] - 1)
        trained = torch.from_numpy(s.train.loss_mask) > 0
        values = (backbone(input_ids=tokens).last_hidden_state[0, rows] @ head[0])[trained]
        logp = torch.log_softmax(policy(input_ids=tokens).logits[0, rows], -1)
        logp = logp.gather(1, tokens[0, len(s.prompt_tokens) :, None])[:, 0][trained]
        if not len(values):
            continue
        rewards = [0.0] * (len(values) - 1) + [s.train.reward or 0.0]
        advantages, returns = gae_by_hand(rewards, values.tolist(), 0.9, 0.8)
        ratio = (logp - logp.detach()).exp()
        policy_loss = policy_loss - (ratio * torch.tensor(advantages)).mean() / count
        value_loss = value_loss + (values - torch.tensor(returns)).square().mean() / count
        all_values += values.tolist()
        all_returns += returns
    policy_loss.backward()
    value_loss.backward()

    assert metrics["train/loss"] == pytest.approx(policy_loss.item(), rel=1e-5, abs=1e-6)
    assert metrics["train/value_loss"] == pytest.approx(value_loss.item(), rel=1e-5)
    assert metrics["train/value_clipfrac"] == 0.0
    assert metrics["train/values_mean"] == pytest.approx(np.mean(all_values), rel=1e-4, abs=1e-6)
    missed = np.var(np.array(all_returns) - np.array(all_values)) / np.var(all_returns)
    assert metrics["train/explained_variance"] == pytest.approx(1 - missed, abs=1e-4)
    for name, p in backend.core.weights.params.items():
        torch.testing.assert_close(p.grad, policy.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    critic = backend.core.critic
    assert critic is not None
    torch.testing.assert_close(critic.weights.params["score.weight"].grad, head.grad, rtol=1e-4, atol=1e-5)
    for name, p in backbone.named_parameters():
        torch.testing.assert_close(critic.weights.params[f"model.{name}"].grad, p.grad, rtol=1e-4, atol=1e-5)


def test_values_begin_at_zero_and_come_nearer_to_the_returns(make_backend: Backend, make_batch: Batch) -> None:
    backend, batch = make_backend(objective=PPO, lr=0.0, critic_lr=1e-2, lr_decay_style="constant"), make_batch(4)
    reports = []
    for step in range(12):
        batch.step = step
        reports.append(backend.train_step(batch).metrics)
    assert reports[0]["train/values_mean"] == 0.0 and reports[0]["train/explained_variance"] == 0.0
    assert reports[0]["train/lr"] == 0.0 and reports[0]["train/critic_lr"] == 1e-2
    assert reports[-1]["train/value_loss"] < 0.5 * reports[0]["train/value_loss"]


def test_values_that_move_too_far_in_one_batch_are_clipped(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(objective=PPO | {"proximal": "recompute"}, num_steps_per_rollout=4, critic_lr=0.1)
    assert backend.train_step(make_batch(4)).metrics["train/value_clipfrac"] > 0


def test_the_first_rollouts_may_be_the_critics_alone(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(objective=PPO, num_critic_only_steps=2)
    assert backend.core.critic is not None

    def weights() -> tuple[str, str]:
        snapshot = state_of(backend)
        return hash_tensors(snapshot[MODEL]), hash_tensors(snapshot[CRITIC])

    policy, critic = weights()
    for step in range(2):
        metrics = backend.train_step(make_batch(step, step=step)).metrics
        assert metrics["train/updates"] == 1 and "train/grad_norm" not in metrics and "train/loss" in metrics
    assert weights()[0] == policy and weights()[1] != critic and backend.core.optimizer.steps == 0
    assert "train/grad_norm" in backend.train_step(make_batch(2, step=2)).metrics
    assert weights()[0] != policy


@pytest.mark.parametrize("broken", ["critic", "policy"])
def test_a_gradient_of_either_that_is_not_finite_moves_neither(broken: str, make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(objective=PPO)
    critic = backend.core.critic
    assert critic is not None
    backend.train_step(make_batch(0))
    before = backend.weights_hash()
    params = critic.weights.params if broken == "critic" else backend.core.weights.params
    hook = next(p for n, p in params.items() if n.endswith("layers.0.mlp.up_proj.weight")).register_hook(
        lambda grad: grad * torch.inf
    )
    result = backend.train_step(make_batch(1, step=1))
    hook.remove()
    assert result.skipped and backend.weights_hash() == before
    assert critic.optimizer.steps == backend.core.optimizer.steps == 1


@pytest.mark.parametrize("extra", [{}, {"model_dtype": "bfloat16"}, {"optimizer": "muon", "num_critic_only_steps": 4}])
def test_restored_training_is_the_same_to_the_last_bit(
    extra: dict[str, object], tmp_path: Path, make_backend: Backend, make_batch: Batch
) -> None:
    backend = make_backend(objective=PPO, **extra)
    for k in range(3):
        backend.train_step(make_batch(k, step=k))
    saved(backend, tmp_path / "c")
    for k in (3, 4):
        backend.train_step(make_batch(k, step=k))
    other = make_backend(objective=PPO, **{**extra, "seed": 9})
    other.train_step(make_batch(77))
    other.load(tmp_path / "c")
    for k in (3, 4):
        other.train_step(make_batch(k, step=k))
    assert other.weights_hash() == backend.weights_hash()
    got, want = state_of(other), state_of(backend)
    assert hash_tensors(got[CRITIC_OPTIMIZER]) == hash_tensors(want[CRITIC_OPTIMIZER])
    assert hash_tensors(got[OPTIMIZER]) == hash_tensors(want[OPTIMIZER])


def test_the_weights_hash_sees_the_critic(make_backend: Backend) -> None:
    backend = make_backend(objective=PPO)
    before = backend.weights_hash()
    assert backend.core.critic is not None
    with torch.no_grad():
        backend.core.critic.weights.params["score.weight"][0, 0] += 1
    assert backend.weights_hash() != before


def test_a_checkpoint_without_a_critic_or_with_a_damaged_one_is_refused(
    tmp_path: Path, make_backend: Backend, make_batch: Batch
) -> None:
    saved(make_backend(), tmp_path / "none")
    backend = make_backend(objective=PPO)
    backend.train_step(make_batch(0))
    saved(backend, tmp_path / "c")
    before = backend.weights_hash()
    with pytest.raises(CheckpointRefused, match=r"no critic\.safetensors.*advantage_estimator"):
        backend.load(tmp_path / "none")
    (tmp_path / "c" / "critic_optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointRefused, match="critic_optimizer"):
        backend.load(tmp_path / "c")
    assert backend.weights_hash() == before


def test_a_head_of_another_shape_is_refused(tmp_path: Path, critic_dir: Path, make_backend: Backend) -> None:
    tensors = load_file(critic_dir / "model.safetensors") | {"score.weight": torch.zeros(2, 32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((critic_dir / "config.json").read_bytes())
    with pytest.raises(Refused, match=r"score\.weight has shape \[2, 32\]"):
        make_backend(objective=PPO, critic_load=str(tmp_path))
    with pytest.raises(Refused, match="no such directory on this host"):
        make_backend(objective=PPO, critic_load=str(tmp_path / "nowhere"))


def test_a_checkpoint_is_a_model_directory(tmp_path: Path, make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend("llama", objective=PPO)
    backend.train_step(make_batch(0))
    saved(backend, tmp_path / "c")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    for name, p in backend.core.weights.params.items():
        assert torch.equal(loaded.state_dict()[name], p.detach())
