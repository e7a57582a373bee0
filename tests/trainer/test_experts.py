"""Mixture of experts on the torch backend, and experts that are chosen again (R3), on a tiny Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.training.wire import StepOrder, decode, encode
from tests.trainer.conftest import SHAPE, backend_config, files_of, published

LAYERS, TOP_K, EXPERTS = 3, 2, 8
CPU = torch.device("cpu")
Batch = Callable[..., StepBatch]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, the second without experts."""
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp("moe")
    own = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 24,
           "norm_topk_prob": True, "mlp_only_layers": [1]}  # fmt: skip
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE | own)).save_pretrained(directory)
    return directory


def backend_on(path: Path, **settings: Any) -> TorchBackend:
    backend = TorchBackend()
    backend.setup(backend_config(path, **settings))
    return backend


def with_experts(batch: StepBatch, seed: int = 0) -> StepBatch:
    """Experts drawn at random: not what any router would choose."""
    rng = np.random.default_rng(seed)
    for s in batch.samples:
        tokens = len(s.prompt_tokens) + len(s.response_tokens) - 1
        drawn = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        s.experts = drawn.reshape(tokens, -1).astype(np.uint8)
    return batch


def chosen(backend: TorchBackend) -> dict[int, list[torch.Tensor]]:
    """Experts that each layer's experts are called with from now on."""
    seen: dict[int, list[torch.Tensor]] = {}
    for n, block in enumerate(backend.core.policy.blocks):
        mlp: Any = block.mlp
        if hasattr(mlp, "experts"):
            seen[n] = []
            mlp.experts.register_forward_pre_hook(lambda _, args, n=n: seen[n].append(args[1].detach().clone()))
    return seen


def test_the_packed_model_is_the_one_of_transformers_and_is_served_expert_by_expert(
    moe: Path, make_batch: Batch, tmp_path: Path
) -> None:
    backend, batch = backend_on(moe), make_batch(1, groups=2)
    packed = backend.core.pack(batch.samples)
    logp, _ = backend.core.policy(packed.micro_batch(range(8), CPU))
    plain = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32)
    wanted = []
    for s in batch.samples:
        tokens = torch.from_numpy(np.concatenate([s.prompt_tokens, s.response_tokens])).long()[None]
        rows = torch.log_softmax(plain(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
        wanted.append(rows[len(s.prompt_tokens) - 1 :])
    assert torch.allclose(logp, torch.cat(wanted), atol=1e-5)
    published(backend, tmp_path / "v")
    ours, theirs = files_of(tmp_path / "v"), files_of(moe)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_all_tokens_take_the_engines_experts_forward_and_when_computed_again(moe: Path, make_batch: Batch) -> None:
    batch = with_experts(make_batch(2))
    seen, numbers = {}, {}
    for again in (False, True):
        backend = backend_on(moe, gradient_checkpointing=again, use_rollout_routing_replay=True)
        seen[again] = chosen(backend)
        numbers[again] = backend.train_step(batch).metrics
    given = np.concatenate([s.experts for s in batch.samples]).reshape(-1, LAYERS, TOP_K)
    n = len(given)
    for again, times in ((False, 1), (True, 2)):  # one forward; with checkpointing one more in the backward
        for layer, calls in seen[again].items():
            found, counts = np.unique(torch.cat(calls).numpy(), axis=0, return_counts=True)
            wanted, expected = np.unique(given[:, layer], axis=0, return_counts=True)
            assert np.array_equal(found, wanted) and np.array_equal(counts, times * expected)
    assert numbers[False]["train/routing_tokens"] == n and numbers[False]["train/routing_fallback_tokens"] == 0
    assert 0.5 < numbers[False]["train/routing_mismatch"] <= 1
    for name in ("train/loss", "train/grad_norm"):
        assert numbers[True][name] == pytest.approx(numbers[False][name], rel=1e-5)


def test_log_probs_are_the_engines_again_with_its_experts(moe: Path, make_batch: Batch) -> None:
    """An engine whose routers are a little off, as by other kernels: its experts bring its log-probs back."""
    engine, batch = backend_on(moe, use_routing_replay=True), make_batch(3)
    with torch.no_grad():
        for name, p in engine.core.policy.named_weights().items():
            if "gate.weight" in name:
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        packed = engine.core.pack(batch.samples)
        work = [[(tuple(range(16)), packed.micro_batch(range(16), CPU))]]
        theirs = engine.core.score("old_logp", packed, work)
    table, at = work[0][0][1].routing.table.numpy(), 0
    for s in batch.samples:
        tokens = len(s.prompt_tokens) + len(s.response_tokens) - 1
        s.experts, at = table[at : at + tokens].reshape(tokens, -1).copy(), at + tokens
        s.experts[s.experts == 255] = 0  # engines write zeros where a layer has no experts
    away = {}
    for replays in (False, True):
        trainer = backend_on(moe, use_rollout_routing_replay=replays)
        packed = trainer.core.pack(batch.samples)
        ours = trainer.core.score("old_logp", packed, [[(tuple(range(16)), packed.micro_batch(range(16), CPU))]])
        away[replays] = float((ours - theirs).abs().mean())
    assert away[True] < 0.5 * away[False]


def test_damaged_experts_cost_their_sample_the_replay_and_nothing_else(moe: Path, make_batch: Batch) -> None:
    batch = with_experts(make_batch(4, groups=1))
    first, second, third, fourth = batch.samples
    first.experts = None
    assert second.experts is not None and third.experts is not None and fourth.experts is not None
    second.experts = second.experts[:, :-1]
    third.experts[0, 0] = EXPERTS
    fourth.experts = fourth.experts[:1]  # the others are not known
    logp = []
    for replays in (False, True):
        backend = backend_on(moe, use_rollout_routing_replay=replays)
        packed = backend.core.pack(batch.samples)
        logp.append(backend.core.score("old_logp", packed, [[((0, 1, 2, 3), packed.micro_batch((0, 1, 2, 3), CPU))]]))
    first = packed.first_response[3]
    assert torch.allclose(logp[0][:first], logp[1][:first], atol=1e-5)
    assert not torch.allclose(logp[0][first:], logp[1][first:], atol=1e-3)
    result = backend.train_step(batch)
    ids = [s.train.sample_id for s in batch.samples]
    assert {k: v for k, v in result.flags.items() if k.startswith("routing")} == {
        "routing_missing": [ids[0]], "routing_wrong_shape": [ids[1]], "routing_out_of_range": [ids[2]],
    }  # fmt: skip
    tokens = sum(len(s.prompt_tokens) + len(s.response_tokens) - 1 for s in batch.samples)
    assert result.metrics["train/routing_fallback_tokens"] == tokens - 1
    assert all(result.trained_tokens)
    sent = decode(encode(StepOrder.of(batch)))
    assert isinstance(sent, StepOrder)
    again = sent.arrived()
    for here, there in zip(batch.samples, again.samples, strict=True):
        assert (here.experts is None and there.experts is None) or np.array_equal(here.experts, there.experts)


def test_the_steps_of_a_rollout_take_the_experts_of_the_pass_before_them(moe: Path, make_batch: Batch) -> None:
    settings = {"num_steps_per_rollout": 2, "lr": 0.3, "objective": {"correction": "none"}}
    found = {}
    for replays in (False, True):
        backend = backend_on(moe, use_routing_replay=replays, **settings)
        seen = chosen(backend)
        metrics = backend.train_step(make_batch(5)).metrics
        calls = torch.cat(seen[2])
        half = len(calls) // 2
        found[replays] = bool(torch.equal(calls[:half], calls[half:])), metrics
    assert found[True][0] and not found[False][0]
    assert "train/routing_mismatch" in found[True][1]


def test_a_dense_model_has_no_experts_to_replay(models: dict[str, Path]) -> None:
    with pytest.raises(Refused, match="has no experts: leave out --use-rollout-routing-replay"):
        backend_on(models["qwen3"], use_rollout_routing_replay=True)
