"""All experts of a layer as one product: the numbers of one expert after the other, over Megatron's own buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from actors.trainer.megatron_backend import convert, host
from actors.trainer.megatron_backend.families import describe
from actors.trainer.megatron_backend.grouped import GroupedExperts, as_one, grouped, in_order_of_buffers
from actors.trainer.megatron_backend.layers import changes_of
from tests.megatron.models import MODELS

EXPERTS, WIDTH, INNER = 5, 16, 24
COUNTS = (3, 0, 6, 1, 2)  # tokens of each expert; one has none


class Experts(GroupedExperts):
    """Without Transformer Engine: its modules' weights alone, by its names."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.config, self.num_local_experts, self.activation_recompute = config, EXPERTS, False
        shapes = {"linear_fc1": (2 * INNER, WIDTH), "linear_fc2": (WIDTH, INNER)}
        for name, shape in shapes.items():
            linear = nn.Module()
            for e in range(EXPERTS):
                linear.register_parameter(f"weight{e}", nn.Parameter(0.3 * torch.randn(shape)))
            in_order_of_buffers(linear)
            setattr(self, name, linear)
        self._views, self._found = {}, (0, 0)


def by_hand(experts: Any, x: Tensor, probs: Tensor, weights: dict[str, Tensor]) -> Tensor:
    made = []
    for e, (rows, scale) in enumerate(zip(x.split(COUNTS), probs.split(COUNTS), strict=True)):
        gate, up = (rows @ weights[f"linear_fc1.weight{e}"].T).chunk(2, -1)
        made.append((nn.functional.silu(gate) * up * scale[:, None]) @ weights[f"linear_fc2.weight{e}"].T)
    return torch.cat(made)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.timeout(120)
def test_all_experts_at_once_give_the_numbers_of_one_after_the_other(distributed: bool) -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(gated_linear_unit=True, activation_func=nn.functional.silu, bias_activation_fusion=False)
    with convert.alone():
        host.prepare()
        experts = Experts(config)
        start = {name: p.detach().clone() for name, p in experts.named_parameters()}
        transformer = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        with host.on_device():
            wrapped: Any = DistributedDataParallel(transformer, ddp, experts)
        x, probs = torch.randn(sum(COUNTS), WIDTH, requires_grad=True), torch.rand(sum(COUNTS), requires_grad=True)
        back = torch.randn(sum(COUNTS), WIDTH)
        if not distributed:  # weights lie apart then, and Transformer Engine would compute
            assert not experts._look()
            return
        with torch.no_grad():
            alone, _ = experts(x, torch.tensor(COUNTS), probs)
        out = None
        for _ in range(2):  # gradients of two micro-batches add up
            out, bias = experts(x, torch.tensor(COUNTS), probs)
            assert bias is None
            out.backward(back)
        assert out is not None and torch.equal(alone, out)
        totals = {name: p.main_grad.clone() for name, p in experts.named_parameters()}
        del wrapped
    weights = {name: w.requires_grad_() for name, w in start.items()}
    again, scale = x.detach().requires_grad_(), probs.detach().requires_grad_()
    want = by_hand(experts, again, scale, weights)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    want.backward(back)
    assert again.grad is not None and scale.grad is not None
    torch.testing.assert_close(x.grad, 2 * again.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(probs.grad, 2 * scale.grad, rtol=1e-5, atol=1e-5)
    for name, weight in weights.items():
        wanted = torch.zeros_like(weight) if weight.grad is None else 2 * weight.grad
        torch.testing.assert_close(totals[name], wanted, rtol=1e-5, atol=1e-5, msg=name)


def test_the_setting_decides_whose_experts_are_built_and_dense_layers_stay() -> None:
    for family, kernel, wanted in (("qwen3_moe", "torch", True), ("minimax_m2", "torch", True), ("qwen3_moe", "te", False),
                                   ("qwen3", "torch", False)):  # fmt: skip
        arch = describe({**make_config(family), "model_type": family})
        assert (grouped in changes_of(arch, kernel)) == wanted, (family, kernel)
    blocks = [SimpleNamespace(), *(SimpleNamespace(experts=SimpleNamespace(module=m)) for m in (TEGroupedMLP, SequentialMLP))]
    layers = [SimpleNamespace(submodules=SimpleNamespace(mlp=SimpleNamespace(submodules=one))) for one in blocks]
    grouped(SimpleNamespace(layer_specs=layers))  # type: ignore[arg-type]
    assert [getattr(getattr(one, "experts", None), "module", None) for one in blocks] == [None, GroupedExperts, SequentialMLP]


def make_config(family: str) -> dict[str, Any]:
    kind, shape = MODELS[family]
    made: dict[str, Any] = getattr(transformers, kind)(**shape).to_dict()
    return made


def test_tensors_are_one_only_at_even_distances() -> None:
    flat = torch.arange(24.0)
    even = [flat[n : n + 4].view(2, 2) for n in (1, 7, 13)]
    one = as_one(even)
    assert one is not None and torch.equal(one, torch.stack(even)) and one.data_ptr() == even[0].data_ptr()
    assert as_one([]) is None
    assert as_one([even[0], even[1], flat[14:18].view(2, 2)]) is None, "uneven"
    assert as_one(list(reversed(even))) is None, "backwards"
    assert as_one([even[0], even[1].clone()]) is None, "of another storage"
    assert as_one([flat[0:4].view(2, 2), flat[2:6].view(2, 2)]) is None, "one over the other"
