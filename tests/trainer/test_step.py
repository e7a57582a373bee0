"""Training steps of the torch backend on tiny models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.trainer.backend import BatchRefused, StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.layout import PackedBatch
from actors.trainer.training.offload import NoRoom

Backend = Callable[..., TorchBackend]
Batch = Callable[..., StepBatch]


def test_a_step_reports_what_happened(make_backend: Backend, make_batch: Batch) -> None:
    batch = make_batch(1)
    result = make_backend().train_step(batch)
    names = {
        "train_rollout_logprob_abs_diff", "forward_logp_max_diff", "loss", "pg_loss", "grad_norm", "lr", "entropy_loss",
        "pg_clipfrac", "tis_clipfrac", "tokens", "tokens_per_s", "step_s", "forward_s", "backward_s", "optimizer_s",
    }  # fmt: skip
    assert {f"train/{name}" for name in names} <= result.metrics.keys()
    assert all(name.startswith("train/") and math.isfinite(value) for name, value in result.metrics.items())
    assert sorted(i for ids in result.packing for i in ids) == list(range(len(batch.samples)))
    assert result.trained_tokens == [int(s.train.loss_mask.sum()) for s in batch.samples]
    assert not result.skipped


def test_metrics_of_several_steps_are_their_mean(make_backend: Backend, make_batch: Batch) -> None:
    """At a learning rate of 0 the ratio is 1 in each of them."""
    result = make_backend(num_steps_per_rollout=4, lr=0.0).train_step(make_batch(1))
    assert result.metrics["train/updates"] == 4
    assert result.metrics["train/ess_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


def test_training_raises_the_probability_of_rewarded_answers(make_backend: Backend, make_batch: Batch) -> None:
    backend, batch = make_backend(lr=3e-3, objective={"correction": "none"}), make_batch(2)
    for i, s in enumerate(batch.samples):
        s.train.reward = float(i % 2)
    packed, cpu = PackedBatch(batch.samples), torch.device("cpu")

    def gap() -> float:
        with torch.no_grad():
            right, wrong = (backend.core.policy(packed.micro_batch(range(k, 16, 2), cpu))[0].mean() for k in (1, 0))
        return float(right - wrong)

    before = gap()
    for step in range(5):
        batch.step = step
        backend.train_step(batch)
    assert gap() > before + 0.1


def test_a_field_that_the_objective_needs_and_nobody_has_is_an_error(make_backend: Backend, make_batch: Batch) -> None:
    backend, batch = make_backend(), make_batch(2)
    for s in batch.samples:
        s.train.rollout_logp = None
    before = backend.weights_hash()
    with pytest.raises(BatchRefused, match="rollout_logp"):
        backend.train_step(batch)
    assert backend.weights_hash() == before


@pytest.mark.parametrize("model", ["qwen3", "llama"])
def test_kl_to_the_frozen_reference_is_exactly_zero_at_step_one(model: str, make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(model, objective={"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"})
    first, second = (backend.train_step(make_batch(k, step=k)).metrics["train/kl_loss"] for k in (0, 1))
    assert first == 0.0 and second > 0.0


def test_the_reference_follows_the_policy_at_its_interval(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(objective={"use_kl_loss": True, "kl_loss_coef": 0.1}, ref_update_interval=2)
    kl = [backend.train_step(make_batch(k, step=k)).metrics["train/kl_loss"] for k in range(3)]
    assert kl[0] == 0.0 and kl[1] != 0.0 and kl[2] == 0.0


@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "decoupled"])
def test_leaving_out_the_old_pass_changes_nothing_with_one_step_per_batch(
    correction: str, make_backend: Backend, make_batch: Batch
) -> None:
    batch = make_batch(4)
    lean = make_backend(objective={"correction": correction})
    assert lean.core.objective.proximal == "current"
    full = make_backend(objective={"correction": correction})
    full.core.objective = full.core.config.objective
    assert full.core.objective.proximal == "recompute"
    a, b = lean.train_step(batch).metrics, full.train_step(batch).metrics
    timing = {name for name in a if name.endswith("_s")}
    assert a.keys() == b.keys() and {k: a[k] for k in a.keys() - timing} == {k: b[k] for k in b.keys() - timing}
    assert lean.weights_hash() == full.weights_hash()


def test_several_steps_per_rollout_train_every_trajectory_once(make_backend: Backend, make_batch: Batch) -> None:
    backend, batch = make_backend(num_steps_per_rollout=3), make_batch(5)
    for i, s in enumerate(batch.samples):
        s.train.rollout = f"r{i // 2}"  # two samples each, eight trajectories over three steps
        s.train.reward = batch.samples[i - i % 2].train.reward
    result = backend.train_step(batch)
    assert result.metrics["train/updates"] == 3 and backend.core.optimizer.steps == 3
    assert sorted(i for ids in result.packing for i in ids) == list(range(16))
    assert result.metrics["train/logprob_pass_s"] > 0  # the denominator is older than the second step's policy


def test_a_dynamic_global_batch_is_one_step_over_all_that_arrived(make_backend: Backend, make_batch: Batch) -> None:
    dynamic, static = make_backend(use_dynamic_global_batch_size=True), make_backend()
    results = [backend.train_step(make_batch(5, siblings=3)) for backend in (dynamic, static)]
    for result in results:
        assert result.metrics["train/global_batch_size"] == 12 and result.metrics["train/updates"] == 1
        assert "trimmed" not in result.flags and min(result.trained_tokens) > 0
    assert dynamic.weights_hash() == static.weights_hash()


def test_a_gradient_that_is_not_finite_changes_no_weight(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend()
    backend.train_step(make_batch(0))
    before, steps = backend.weights_hash(), backend.core.optimizer.steps
    weights = backend.core.weights.params["model.layers.0.mlp.up_proj.weight"]
    hook = weights.register_hook(lambda grad: grad * math.inf)
    result = backend.train_step(make_batch(1, step=1))
    hook.remove()
    assert result.skipped and len(result.flags["nonfinite_gradient"]) == 16 and not any(result.trained_tokens)
    assert backend.weights_hash() == before and backend.core.optimizer.steps == steps
    assert not backend.train_step(make_batch(1, step=1)).skipped
    assert backend.weights_hash() != before


def test_samples_with_broken_log_probs_are_named_and_left_out(make_backend: Backend, make_batch: Batch) -> None:
    batch = make_batch(6)
    batch.samples[3].train.rollout_logp = np.full(batch.samples[3].train.response_length, np.nan, np.float32)
    result = make_backend().train_step(batch)
    assert result.flags["nan_rollout_logp"] == ["g0/3"] and result.trained_tokens[3] == 0 and not result.skipped


def test_tokens_beyond_the_staleness_bound_have_no_gradient(make_backend: Backend, make_batch: Batch) -> None:
    batch = make_batch(7, step=5, max_weight_staleness=2)
    old = batch.samples[0].train
    old.loss_mask, old.spans = None, [(1, old.response_length)]
    result = make_backend(objective={"max_staleness": 4}).train_step(batch)
    assert result.trained_tokens[0] == 0 and result.flags["stale_sample"] == ["g0/0"]


def test_live_knobs_override_the_settings_of_one_step(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend(lr=1e-3, lr_decay_style="linear", num_rollout=10)
    assert backend.train_step(make_batch(1, step=5)).metrics["train/lr"] == pytest.approx(5e-4)
    before = backend.weights_hash()
    assert backend.train_step(make_batch(1, step=5, lr=0.0)).metrics["train/lr"] == 0.0
    assert backend.weights_hash() == before


def test_clipping_bounds_the_update_not_the_report(make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend()
    free = backend.train_step(make_batch(1, clip_grad=0.0, lr=0.0)).metrics["train/grad_norm"]
    held = backend.train_step(make_batch(1, clip_grad=free / 2, lr=0.0)).metrics["train/grad_norm"]
    grads = [p.grad for p in backend.core.weights.params.values() if p.grad is not None]
    assert held == pytest.approx(free) and float(torch.nn.utils.get_total_norm(grads)) == pytest.approx(free / 2, rel=1e-4)


def test_the_token_budget_does_not_change_the_step(make_backend: Backend, make_batch: Batch) -> None:
    small, large = (make_backend(max_tokens_per_gpu=cap, lr=0.0, clip_grad=0.0) for cap in (24, 4096))
    a, b = small.train_step(make_batch(9)), large.train_step(make_batch(9))
    assert a.metrics["train/micro_batches"] > 4 > b.metrics["train/micro_batches"]
    assert a.metrics["train/loss"] == pytest.approx(b.metrics["train/loss"], abs=1e-6)
    for name, p in small.core.weights.params.items():
        want = large.core.weights.params[name].grad
        assert p.grad is not None and want is not None
        torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-6)


def test_passes_without_gradient_have_a_budget_of_their_own(make_backend: Backend, make_batch: Batch) -> None:
    forwards, hashes = [], []
    for cap in (24, 4096):
        backend = make_backend(objective={"use_kl_loss": True}, num_steps_per_rollout=2, log_probs_max_tokens_per_gpu=cap)
        count = [0]
        reference = backend.core.reference
        assert reference is not None
        reference.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        result = backend.train_step(make_batch(9))
        forwards.append(count[0])
        hashes.append(result.metrics["train/loss"])
    assert forwards[0] > forwards[1] == 2 and hashes[0] == pytest.approx(hashes[1], abs=1e-6)


def test_a_sample_longer_than_the_budget_is_trained_alone_and_named(make_backend: Backend, make_batch: Batch) -> None:
    result = make_backend(max_tokens_per_gpu=12).train_step(make_batch(1))
    assert result.flags["over_token_cap"] and all(n >= 0 for n in result.trained_tokens) and not result.skipped


def test_a_batch_with_nothing_to_train_moves_nothing(make_backend: Backend, make_batch: Batch) -> None:
    backend, batch = make_backend(), make_batch(1)
    for s in batch.samples:
        s.train.remove = True
    before = backend.weights_hash()
    result = backend.train_step(batch)
    assert backend.weights_hash() == before and "all_masked" in result.flags and not result.skipped
    with pytest.raises(BatchRefused, match="no samples"):
        backend.train_step(StepBatch([], 0, 0))


def test_equal_seeds_and_batches_give_equal_weights(make_backend: Backend, make_batch: Batch) -> None:
    hashes = set()
    for _ in range(2):
        backend = make_backend()
        for k in range(2):
            backend.train_step(make_batch(k, step=k))
        hashes.add(backend.weights_hash())
    assert len(hashes) == 1


OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 302.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 99.50 MiB is free. "
    "Process 4512 has 610.00 MiB memory in use. Including non-PyTorch memory, this process has 139.09 GiB memory in use."
)


def _full(*_: object) -> None:
    raise OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ({}, "Set --gradient-checkpointing, or lower --max-tokens-per-gpu (now 96), or shard"),
        ({"gradient_checkpointing": True}, "is free. Lower --max-tokens-per-gpu (now 96), or shard"),
        ({"use_dynamic_batch_size": False, "micro_batch_size": 3}, "checkpointing, or lower --micro-batch-size (now 3), or shard"),
    ],
)
def test_a_step_that_does_not_fit_names_the_ways_out(
    make_backend: Backend, make_batch: Batch, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], ways: str
) -> None:
    backend = make_backend(**settings)
    weights = sum(p.nbytes for p in backend.core.policy.parameters())
    assert backend.core.resident_bytes() >= weights > 0
    backend.train_step(make_batch(2))
    assert backend.core.resident_bytes() >= 3 * weights, "moments"
    monkeypatch.setattr("actors.trainer.training.step._own_passes", _full)
    with pytest.raises(NoRoom, match=r"^step 1 does not fit into cpu, where 0\.0 GiB are weights and .*: CUDA") as refused:
        backend.train_step(make_batch(2))
    text = str(refused.value)
    assert ways in text and "4512" not in text and "\n" not in text


def test_a_model_that_does_not_fit_is_told_in_one_line(make_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.trainer.torch_backend.core.Optimizer", _full)
    with pytest.raises(NoRoom, match=r"^the models and their masters do not fit: CUDA .* is free\. Shard over more GPUs with"):
        make_backend()


def test_trained_tokens_are_told_by_version_wherever_the_mask_sits(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    backend = make_backend(objective={"max_staleness": 2, "correction": "tis"})
    batch = make_batch(1, step=3)
    wanted = []
    for k, sample in enumerate(batch.samples):
        train, n = sample.train, sample.train.response_length
        spans = [(v, m) for v, m in ((0, n // 4), (2, n // 3), (3, n - n // 4 - n // 3)) if m]
        train.spans = spans
        train.loss_mask = np.array([t % (2 + k % 3) != 0 for t in range(n)], dtype=np.uint8)
        at, counts = 0, []
        for version, m in spans:
            counts.append(int(train.loss_mask[at : at + m].sum()) if version >= 1 else 0)
            at += m
        wanted.append(tuple(counts))
    assert backend.train_step(batch).trained_spans == wanted


def spoken(batch: StepBatch, *, env_step: int, env_logp: float) -> StepBatch:
    """What the model made, what its environment said, what it made then: 3, 5 and 4 tokens of each response."""
    rng = np.random.default_rng(8)
    for sample in batch.samples:
        sample.response_tokens = rng.integers(0, 40, 12).astype(np.int32)
        sample.train.response_length = 12
        sample.train.loss_mask = np.array([1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1], dtype=np.uint8)
        sample.train.rollout_logp = np.where(sample.train.loss_mask, np.float32(-3.7), np.float32(env_logp)).astype(np.float32)
        sample.train.spans = [(batch.step - 1, 3), (env_step, 5), (batch.step, 4)]
    return batch


def test_what_the_environment_said_is_read_and_never_trained(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    """Neither its age nor the log-probs that somebody put there count."""
    objective = {"max_staleness": 1, "correction": "tis", "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
    hashes = set()
    for env_step, env_logp in ((7, 0.0), (0, -50.0)):
        backend = make_backend(objective=objective)
        result = backend.train_step(spoken(make_batch(1, step=7), env_step=env_step, env_logp=env_logp))
        assert result.trained_spans == [(3, 0, 4)] * 16 and result.flags == {}
        assert result.metrics["train/staleness_max"] == 1 and result.metrics["train/trained_tokens"] == 16 * 7
        hashes.add(backend.weights_hash())
    assert len(hashes) == 1


def test_the_gradient_is_that_of_what_the_model_made(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    """Of two siblings with opposite advantages: the difference of the log-probs of their own tokens."""
    backend = make_backend(objective={"correction": "none", "reduction": "per_token"}, clip_grad=0.0)
    batch = spoken(make_batch(1, groups=1, siblings=2), env_step=0, env_logp=0.0)
    for reward, sample in enumerate(batch.samples):
        sample.train.reward, sample.train.spans = float(reward), [(0, 12)]
    logp = backend.core.policy(PackedBatch(batch.samples).micro_batch((0, 1), torch.device("cpu")))[0].view(2, 12)
    params = dict(backend.core.policy.named_weights())

    def gradient(mask: torch.Tensor) -> torch.Tensor:
        loss = ((logp[0] - logp[1]) * mask).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(params.values()), retain_graph=True)])

    own = torch.as_tensor(batch.samples[0].train.loss_mask)
    want, wrong = gradient(own), gradient(torch.ones(12))
    backend.train_step(batch)
    state = backend.core.optimizer.state()
    got = torch.cat([state[f"exp_avg/{name}"].flatten() for name in params])
    assert torch.cosine_similarity(got, want, dim=0) > 0.999999
    assert torch.cosine_similarity(got, wrong, dim=0) < 0.99


def test_what_a_rank_trained_is_written_as_its_loss_saw_it(make_backend: Backend, make_batch: Batch, tmp_path: Path) -> None:
    backend = make_backend(num_steps_per_rollout=2, save_debug_train_data=str(tmp_path / "{rollout_id}_{rank}.pt"))
    batch = make_batch(1)
    batch.step = 3
    for sample in batch.samples:
        sample.train.loss_mask[0] = 0
    result = backend.train_step(batch)
    found = torch.load(tmp_path / "3_0.pt", weights_only=True)
    data = found["rollout_data"]
    assert (found["rollout_id"], found["rank"]) == (3, 0)
    assert sorted(data["sample_ids"]) == sorted(s.train.sample_id for s in batch.samples)
    order = {s.train.sample_id: i for i, s in enumerate(batch.samples)}
    for at, name in enumerate(data["sample_ids"]):
        sample = batch.samples[order[name]]
        assert data["tokens"][at].tolist() == [*sample.prompt_tokens, *sample.response_tokens]
        assert data["loss_masks"][at].tolist() == list(sample.train.loss_mask)
        assert int(data["loss_masks"][at].sum()) == result.trained_tokens[order[name]]
        assert np.array_equal(data["rollout_log_probs"][at], np.float32(sample.train.rollout_logp))
        assert (data["raw_reward"][at], data["response_lengths"][at]) == (sample.train.reward, len(sample.response_tokens))
        same = torch.allclose(data["log_probs"][at], data["new_log_probs"][at], atol=1e-6)
        assert same == (data["optimizer_steps"][at] == 0), "the second step's policy has moved"
    assert set(data["optimizer_steps"]) == {0, 1} and any(float(a.abs().sum()) for a in data["advantages"])
    assert not list(tmp_path.glob(".*"))


def test_a_step_whose_dump_cannot_be_written_is_done_all_the_same(
    make_backend: Backend, make_batch: Batch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    backend = make_backend(save_debug_train_data=str(tmp_path / "file" / "{rollout_id}_{rank}.pt"))
    result = backend.train_step(make_batch(1))
    assert sum(result.trained_tokens) > 0 and result.undumped == 1
    assert "0_0.pt not written: " in caplog.text
