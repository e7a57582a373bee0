"""Adapters beside frozen weights: their gradients, what engines get, checkpoints, and the package peft in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from actors.runtime.lora import PREFIX
from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.lora.merge import merge
from actors.trainer.lora.peft import ADAPTER, ADAPTER_CONFIG
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.layout import PackedBatch
from actors.trainer.training.state import OPTIMIZER
from bus.errors import CheckpointRefused
from tests.trainer.conftest import alone, saved, served, state_of

Batch = Callable[..., StepBatch]
Backend = Callable[..., TorchBackend]
Config = Callable[..., Any]
pytestmark = pytest.mark.timeout(120)
RANK = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "weight_decay": 0.0}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def trained(make_backend: Backend, make_batch: Batch, steps: int = 2, **settings: Any) -> TorchBackend:
    backend = alone(make_backend, **(RANK | {"lr": 0.02} | settings))
    for step in range(steps):
        backend.train_step(make_batch(step, step=step))
    return backend


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=tokens).logits.double(), -1)


TOKENS = torch.arange(1, 25)[None]


@pytest.mark.parametrize("model", ["qwen3", "llama"], ids=["tied", "own head"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_gradients_of_adapters_are_those_of_the_formula_in_float64(
    model: str, again: bool, models: dict[str, Path], make_backend: Backend, make_batch: Batch
) -> None:
    """Of one sample, d log-probs / d A and d B, where B is no longer zero: against weights W + scale B A of the model of
    transformers."""
    backend = trained(make_backend, make_batch, model=model, gradient_checkpointing=again)
    policy, [sample] = backend.core.policy, make_batch(7, groups=1, siblings=1).samples
    logp, _ = policy(PackedBatch([sample]).micro_batch([0], torch.device("cpu")))
    names, params = zip(*policy.named_weights().items(), strict=True)
    found = torch.autograd.grad(logp.sum(), params)

    plain = AutoModelForCausalLM.from_pretrained(models[model], dtype=torch.float64)
    wide = {name: p.detach().double().requires_grad_() for name, p in zip(names, params, strict=True)}
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    for name in [n for n in weights if f"{PREFIX}{n.removesuffix('.weight')}.lora_A.weight" in wide]:
        a, b = (wide[f"{PREFIX}{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
        weights[name] = weights[name] + 2.0 * b @ a
    ids = torch.tensor([*sample.prompt_tokens.tolist(), *sample.response_tokens.tolist()])[None]
    every = torch.log_softmax(functional_call(plain, weights, kwargs={"input_ids": ids}).logits[0, :-1], -1)
    picked = every.gather(1, ids[0, 1:, None])[len(sample.prompt_tokens) - 1 :]
    want = torch.autograd.grad(picked.sum(), [wide[name] for name in names])
    for name, mine, theirs in zip(names, found, want, strict=True):
        assert theirs.abs().max() > 0, name
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()), msg=name)


def test_adapters_alone_are_trained_and_engines_get_them_merged(
    models: dict[str, Path], make_backend: Backend, make_batch: Batch
) -> None:
    backend = trained(make_backend, make_batch, steps=0)
    base = load_file(models["qwen3"] / "model.safetensors")
    assert all(torch.equal(t, base[name]) for name, t in served(backend).items()), "before the first step nothing is added"
    for step in range(2):
        backend.train_step(make_batch(step, step=step))
    got, adapters = served(backend), state_of(backend)[ADAPTER]
    assert got.keys() == base.keys()
    for name, t in got.items():
        a, b = (adapters.get(f"{PREFIX}{name.removesuffix('.weight')}.lora_{part}.weight") for part in "AB")
        assert (a is not None) == any(f".{last}." in name for last in LINEAR)
        want = base[name] if a is None or b is None else base[name] + 2.0 * (b @ a)
        torch.testing.assert_close(t, want, rtol=0, atol=1e-6)
        assert torch.equal(t, base[name]) == (a is None), name
    assert set(state_of(backend)[OPTIMIZER]) == {f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in adapters}


def test_merged_weights_have_the_trainers_log_probs(models: dict[str, Path], make_backend: Backend, make_batch: Batch) -> None:
    backend = trained(make_backend, make_batch)
    plain = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    plain.load_state_dict(served(backend), strict=False)  # a tied head is named once
    [sample] = make_batch(7, groups=1, siblings=1).samples
    with torch.no_grad():
        mine, _ = backend.core.policy(PackedBatch([sample]).micro_batch([0], torch.device("cpu")))
    ids = torch.tensor([*sample.prompt_tokens.tolist(), *sample.response_tokens.tolist()])[None]
    theirs = logits(plain, ids)[0, :-1].gather(1, ids[0, 1:, None])[len(sample.prompt_tokens) - 1 :, 0]
    torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=1e-5)


def test_the_base_gets_no_gradient(make_backend: Backend, make_batch: Batch) -> None:
    """It is not trained in any case: what it would cost is the time and memory of a full run."""
    backend = trained(make_backend, make_batch, steps=1)
    base = {n: p for n, p in backend.core.policy.hf.named_parameters() if ".lora_" not in n}
    assert base and not any(p.requires_grad or p.grad is not None for p in base.values())


def test_masters_are_float32_where_the_base_is_bfloat16(make_backend: Backend, make_batch: Batch) -> None:
    backend = trained(make_backend, make_batch, model_dtype="bfloat16")
    core = backend.core
    assert all(p.dtype == torch.bfloat16 for p in core.policy.parameters())
    assert all(p.dtype == torch.float32 for p in core.weights.params.values())
    assert {t.dtype for t in served(backend).values()} == {torch.bfloat16}


def test_the_reference_is_the_base_and_no_second_model(make_backend: Backend, make_batch: Batch) -> None:
    kl = {"objective": {"use_kl_loss": True, "kl_loss_coef": 0.1}, "lr": 0.02}
    backend = alone(make_backend, **RANK, **kl)
    own = {p.data_ptr() for p in backend.core.policy.parameters()}
    assert {p.data_ptr() for p in backend.core.reference.parameters()} == own
    first, second = (backend.train_step(make_batch(step, step=step)).metrics["train/kl_loss"] for step in range(2))
    assert first == 0 and second > 0
    apart = alone(make_backend, **(RANK | {"target_modules": "q_proj"}), **kl)
    assert all(m.bare is False for m in apart.core.policy._adapted.values())


def test_adapters_begin_as_the_seed_says_whatever_else_has_one(make_backend: Backend) -> None:
    def begun(**settings: Any) -> dict[str, Tensor]:
        return state_of(alone(make_backend, **(RANK | settings)))[ADAPTER]

    one, other, fewer = begun(), begun(seed=8), begun(target_modules="layers.1.mlp.*,q_proj", exclude_modules="*.0.*")
    assert len(fewer) == 8 and all(torch.equal(one[name], t) for name, t in fewer.items())
    for name, t in one.items():
        assert bool(t.any()) == ("lora_A" in name) and torch.equal(t, other[name]) == ("lora_B" in name)


@pytest.mark.parametrize("settings", [{}, {"objective": {"advantage_estimator": "ppo"}}], ids=["adapters", "with a critic"])
def test_a_checkpoint_gives_back_every_bit(
    settings: dict[str, Any], tmp_path: Path, make_backend: Backend, make_batch: Batch
) -> None:
    backend = trained(make_backend, make_batch, **settings)
    saved(backend, tmp_path / "c")
    again = trained(make_backend, make_batch, steps=0, seed=9, **settings)
    again.load(tmp_path / "c")
    for one in (backend, again):
        one.train_step(make_batch(5, step=2))
    mine, theirs = state_of(backend), state_of(again)
    for file, tensors in mine.items():
        assert all(torch.equal(theirs[file][name], t) for name, t in tensors.items()), file
    assert backend.weights_hash() == again.weights_hash()
    for changed, said in (({"lora_rank": 8}, "layers differ"), ({"lora_alpha": 4}, "rank and alpha are 4 and 8")):
        with pytest.raises(CheckpointRefused, match=said):
            trained(make_backend, make_batch, steps=0, **settings, **changed).load(tmp_path / "c")


@pytest.mark.parametrize("fsdp_shard", ["all", "optimizer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_learn_what_one_does(
    fsdp_shard: str, dtype: str, pair: TorchBackend, make_config: Config, make_backend: Backend, make_batch: Batch
) -> None:
    kl = {"objective": {"use_kl_loss": True, "kl_loss_coef": 0.1}, "max_tokens_per_gpu": 48}
    sent = "adapters" if fsdp_shard == "all" else "merged"
    settings = RANK | kl | {"lr": 0.02, "gradient_checkpointing": True, "model_dtype": dtype, "lora_publish": sent}
    one = alone(make_backend, **settings)
    pair.setup(make_config(**settings, fsdp_shard=fsdp_shard))
    near = 1e-4 if dtype == "float32" else 0.1
    for step in range(2):
        got, want = (backend.train_step(make_batch(step, step=step)).metrics for backend in (pair, one))
        for name in ("train/loss", "train/grad_norm", "train/kl_loss"):
            assert got[name] == pytest.approx(want[name], rel=near, abs=near / 10), (step, name)
    mine, theirs = served(pair), served(one)
    for name, t in theirs.items():
        torch.testing.assert_close(mine[name], t, rtol=near, atol=near)


@pytest.mark.parametrize("targets", ["all-linear", "layers.1.self_attn.q_proj,v_proj"])
def test_peft_loads_a_checkpoint_and_a_merged_model_is_the_same(
    targets: str, tmp_path: Path, models: dict[str, Path], make_backend: Backend, make_batch: Batch
) -> None:
    backend = trained(make_backend, make_batch, target_modules=targets)
    checkpoint = saved(backend, tmp_path / "c")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models["qwen3"]), tmp_path / "c")
    assert {n.replace(".default", "") for n, _ in loaded.named_parameters() if "lora_" in n} == set(
        load_file(tmp_path / "c" / ADAPTER)
    )
    checkpoint.write_hf(tmp_path / "hf")
    merge(models["qwen3"], tmp_path / "c", tmp_path / "merged")
    theirs, plain = logits(loaded, TOKENS), logits(AutoModelForCausalLM.from_pretrained(models["qwen3"]), TOKENS)
    assert (theirs - plain).abs().max() > 1e-3
    for directory in ("hf", "merged"):
        whole = logits(AutoModelForCausalLM.from_pretrained(tmp_path / directory), TOKENS)
        torch.testing.assert_close(whole, theirs, rtol=0, atol=1e-5)
    for name, t in served(backend).items():
        assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")[name], t)


def adapter_of_peft(base: Path, directory: Path, **changes: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(3)
    config = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    get_peft_model(model, LoraConfig(**(config | changes))).save_pretrained(directory)
    return directory


def test_training_starts_from_what_peft_wrote(tmp_path: Path, models: dict[str, Path], make_backend: Backend) -> None:
    directory = adapter_of_peft(models["qwen3"], tmp_path / "a")
    backend = alone(make_backend, **RANK, lora_adapter_path=str(directory))
    mine = state_of(backend)[ADAPTER]
    assert mine.keys() == load_file(directory / ADAPTER).keys()
    assert all(torch.equal(mine[name], t) for name, t in load_file(directory / ADAPTER).items())
    plain = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    theirs = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(models["qwen3"]), directory), TOKENS)
    plain.load_state_dict(served(backend), strict=False)
    torch.testing.assert_close(logits(plain, TOKENS), theirs, rtol=0, atol=1e-5)


def damaged(directory: Path, **config: Any) -> Path:
    found = json.loads((directory / ADAPTER_CONFIG).read_text())
    (directory / ADAPTER_CONFIG).write_text(json.dumps(found | config))
    return directory


@pytest.mark.parametrize(
    ("settings", "adapter", "said"),
    [
        ({"target_modules": "w_proj"}, None, "w_proj matches no matrix"),
        ({"target_modules": "q_proj,lm_head"}, None, "lm_head matches no matrix"),
        ({"exclude_modules": "all-linear"}, None, "leaves none"),
        ({"model": "qwen3_wide"}, {}, "has shape .* this model wants"),
        ({"model": "qwen3"}, {"target_modules": ["q_proj"]}, "it has no base_model"),
        ({"target_modules": "q_proj"}, {}, "has no place in this model"),
        ({}, {"r": 2}, "lora_rank=4: the adapter in .* has 2"),
        ({}, {"lora_alpha": 4}, "lora_alpha=8: the adapter in .* has 4"),
        ({}, {"use_dora": True}, "use_dora = True is not carried"),
        ({}, {"use_rslora": True}, "use_rslora = True is not carried"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    settings: dict[str, Any],
    adapter: dict[str, Any] | None,
    said: str,
    tmp_path: Path,
    models: dict[str, Path],
    make_backend: Backend,
) -> None:
    path = None if adapter is None else str(adapter_of_peft(models["qwen3"], tmp_path / "a", **adapter))
    with pytest.raises(Refused, match=said) as error:
        alone(make_backend, **(RANK | settings), lora_adapter_path=path)
    assert "\n" not in str(error.value)


def test_a_directory_of_other_files_is_refused(tmp_path: Path, models: dict[str, Path], make_backend: Backend) -> None:
    def refused(said: str, path: Path) -> None:
        with pytest.raises(Refused, match=said):
            alone(make_backend, **RANK, lora_adapter_path=str(path))

    refused("cannot be read", tmp_path / "none")
    for n, (changed, said) in enumerate(
        (({"r": "x"}, "not two numbers"), ({"r": 0}, "not two numbers"), ({"bias": "all"}, "bias"))
    ):
        refused(said, damaged(adapter_of_peft(models["qwen3"], tmp_path / str(n)), **changed))
    cut = adapter_of_peft(models["qwen3"], tmp_path / "cut")
    (cut / ADAPTER).write_bytes((cut / ADAPTER).read_bytes()[:-100])
    refused("cannot be read", cut)
    (cut / ADAPTER).write_bytes(b"garbage" * 9)
    refused("is no safetensors file", cut)
    (cut / ADAPTER_CONFIG).write_text("[]")
    refused("not a config of LoRA", cut)


def test_merge_refuses_another_base_and_writes_nothing(tmp_path: Path, models: dict[str, Path]) -> None:
    adapter = adapter_of_peft(models["qwen3"], tmp_path / "a")
    with pytest.raises(Refused, match="has shape"):
        merge(models["qwen3_wide"], adapter, tmp_path / "out")
    tensors = load_file(adapter / ADAPTER)
    save_file({name: t for name, t in tensors.items() if "layers.0.self_attn.q_proj.lora_B" not in name}, adapter / ADAPTER)
    with pytest.raises(Refused, match="it has no base_model"):
        merge(models["qwen3"], adapter, tmp_path / "out")
    with pytest.raises(Refused, match=r"no config.json"):
        merge(tmp_path, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
