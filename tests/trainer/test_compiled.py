"""Compiled layers compute what plain ones do, by few graphs. Traced and split as on a GPU; the code made from it is torch's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend, attention, core
from actors.trainer.torch_backend.compiled import UNGUARDED, compile_layers
from actors.trainer.torch_backend.layout import PackedBatch, PackedLayout
from scripts.bench.causal_classes import make_causal
from tests.trainer.conftest import backend_config

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it looks at activations


def scores(q: Tensor, k: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """float [H, T, T]: -inf where a token is of another sample, or later."""
    of = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    hidden = (of[:, None] != of) | torch.ones(len(q), len(q)).triu(1).bool()
    return torch.einsum("ihd,jhd->hij", q, k).masked_fill(hidden, float("-inf")) * scale


def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, kernel: str) -> tuple[Tensor, Tensor]:
    """What the operator is defined as."""
    groups = q.shape[1] // k.shape[1]
    s = scores(q, k.repeat_interleave(groups, 1), cu_seqlens, scale)
    out = torch.einsum("hij,jhd->ihd", s.softmax(-1), v.repeat_interleave(groups, 1)).contiguous()
    return out, s.logsumexp(-1)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    p = torch.exp(scores(q, keys, cu_seqlens, scale) - lse[:, :, None])
    d = p * (torch.einsum("ihd,jhd->hij", grad, values) - (grad * out).sum(-1).T[:, :, None]) * scale
    dk, dv = (torch.einsum("hij,ihd->jhd", a, b).view(*k.shape[:2], groups, -1).sum(2) for a, b in ((d, q), (p, grad)))
    return torch.einsum("hij,jhd->ihd", d, keys).contiguous(), dk, dv


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flash operator with formulas as its kernels, chosen for every model."""
    with torch.library._scoped_library("miles_async", "FRAGMENT") as library:
        library.impl("flash_attention", forward, "CPU")
        library.impl("flash_attention_backward", backward, "CPU")
        monkeypatch.setattr(attention, "kernel_of", lambda q: attention.FLASH_2)
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without a C++ compiler."""
    monkeypatch.setattr(core, "compile_layers", partial(compile_layers, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.timeout(180)  # torch.compile on a busy machine
@pytest.mark.usefixtures("flash_on_cpu", "traced")
def test_compiled_layers_give_the_plain_gradient_by_few_graphs_for_all_layers_and_lengths(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    settings: dict[str, Any] = {"num_steps_per_rollout": 2, "gradient_checkpointing": True, "gradient_checkpointing_layers": 1}
    plain, compiled = (make_backend(compile=mode, lr=0.0, **settings) for mode in ("off", "on"))
    for seed in range(3):
        batch = make_batch(seed, groups=1 + seed, temperatures=(1.0, 0.8))
        results = [backend.train_step(batch) for backend in (plain, compiled)]
        assert "train/compile_s" not in results[0].metrics
        assert ("train/compile_s" in results[1].metrics) == (seed == 0)  # other lengths need no other graph
        assert results[0].metrics["train/loss"] == pytest.approx(results[1].metrics["train/loss"], abs=1e-6)
        for name, p in compiled.core.weights.params.items():
            torch.testing.assert_close(p.grad, plain.core.weights.params[name].grad, rtol=1e-4, atol=1e-6)
    # With and without gradient, and what is computed again in the first of the two layers: not one a layer or length.
    assert counters["stats"]["unique_graphs"] <= 4
    assert not counters["graph_break"]


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("flash_on_cpu", "traced")
def test_adapters_are_compiled_with_their_layers_and_the_base_without_them(
    make_backend: Callable[..., TorchBackend], make_batch: Callable[..., StepBatch]
) -> None:
    """The reference is the same compiled layers with adapters off."""
    lora: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lr": 0.02, "weight_decay": 0.0}
    kl = {"objective": {"use_kl_loss": True, "kl_loss_coef": 0.1}}
    plain, compiled = (make_backend(compile=mode, **lora, **kl) for mode in ("off", "on"))
    for seed in range(2):
        batch = make_batch(seed, step=seed)
        found, want = (backend.train_step(batch).metrics for backend in (compiled, plain))
        assert found["train/kl_loss"] == pytest.approx(want["train/kl_loss"], rel=1e-4, abs=1e-6)
        assert (found["train/kl_loss"] > 0) == (seed == 1)
        assert found["train/loss"] == pytest.approx(want["train/loss"], rel=1e-4, abs=1e-6)


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("flash_on_cpu", "traced")
@pytest.mark.parametrize(
    ("family", "says"),
    [("phi3", "layers compiled"), ("mixtral", "layers"), ("qwen3_next", "run as written: samples are fed as padded rows")],
)
def test_a_class_of_transformers_is_compiled_where_that_is_proved(
    tmp_path: Path, make_batch: Callable[..., StepBatch], caplog: pytest.LogCaptureFixture, family: str, says: str
) -> None:
    """Dense; with experts, whose sizes follow from data; recurrent."""
    make_causal(family, tmp_path / "m")
    backends = []
    with caplog.at_level(logging.INFO):
        for mode in ("off", "on"):
            caplog.clear()
            backends.append(TorchBackend())
            backends[-1].setup(backend_config(tmp_path / "m", model_implementation="transformers", compile=mode, lr=0.0))
    assert says in caplog.text
    plain, compiled = backends
    assert not plain.core.compiles
    assert compiled.core.compiles is ("layers compiled" in caplog.text)
    for seed in range(2):
        for backend in backends:
            backend.train_step(make_batch(seed, groups=1 + seed))
        for name, p in compiled.core.weights.params.items():
            torch.testing.assert_close(p.grad, plain.core.weights.params[name].grad, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("flash_on_cpu", "traced")
def test_a_class_that_computes_otherwise_once_compiled_runs_as_written(
    make_backend: Callable[..., TorchBackend], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def miscompiled(graph: Any, _: Any) -> Callable[..., Any]:
        return lambda *args: tuple(x * 1.5 if isinstance(x, Tensor) and x.is_floating_point() else x for x in graph(*args))

    monkeypatch.setattr(core, "compile_layers", partial(compile_layers, backend=miscompiled))
    with caplog.at_level(logging.WARNING):
        assert not make_backend(compile="on", model_implementation="transformers").core.compiles
    assert "layers run uncompiled, which is slower: differ from single samples" in caplog.text


@pytest.mark.parametrize(("least", "compiles"), [(1, True), (1 << 40, False)])
def test_a_small_model_is_not_compiled_by_itself(
    make_backend: Callable[..., TorchBackend], monkeypatch: pytest.MonkeyPatch, least: int, compiles: bool
) -> None:
    monkeypatch.setattr(attention, "select", lambda *_: attention.FLASH_2)
    monkeypatch.setattr(core, "WORTH_COMPILING", least)
    assert make_backend(compile="auto").core.compiles is compiles
    assert make_backend(compile="on").core.compiles


def test_this_torch_knows_what_inductor_is_told(make_backend: Callable[..., TorchBackend]) -> None:
    blocks = make_backend().core.policy.blocks
    compile_layers(blocks)  # it refuses an option that it does not know before anything is compiled
    assert all(hasattr(torch._inductor.config.triton, UNGUARDED) and block.forward.__self__ is block for block in blocks)


def test_layers_that_cannot_be_compiled_run_plain_and_say_so_once(
    make_backend: Callable[..., TorchBackend],
    make_batch: Callable[..., StepBatch],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    policy = make_backend().core.policy
    micro = PackedBatch(make_batch(1).samples).micro_batch(range(4), CPU)
    want, _ = policy(micro)
    compile_layers(policy.blocks, backend=broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(policy(micro)[0], want)
    assert ["no compiler here" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("name", [attention.FLASH_2, attention.FLASH_3])
def test_a_kernel_that_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(Refused, match=f"attn_implementation={name} computes in bfloat16 on a GPU; this trainer has float32 on cpu"):
        attention.select(name, CPU, torch.float32)
    assert attention.select("auto", CPU, torch.float32) == attention.SDPA


@pytest.mark.usefixtures("flash_on_cpu")
def test_gradients_of_the_flash_operator_are_those_of_padded_attention() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, generator=g, requires_grad=True) for heads in (4, 2, 2))
    layout = PackedLayout(torch.tensor([0, 4, 9], dtype=torch.int32), 2, 5, torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9]))
    grad, found = torch.randn(9, 4, 8, generator=g), []
    for attend in (attention.attend, attention.padded_attention):
        out = attend(q, k, v, layout, 0.3)
        found.append((out, *torch.autograd.grad(out, (q, k, v), grad)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
