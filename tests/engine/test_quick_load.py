"""Our loader inside SGLang: a bucket's second load makes the copies that the engine's own loader made the first time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from actors.generation.engines.sglang.quick_load import Layout, QuickLoad
from actors.runtime.flat import views
from actors.trainer.transports.flat import FlatBuffers, bucketed

FUSED = {"q": ("qkv", 0, 4), "k": ("qkv", 4, 2), "v": ("qkv", 6, 2)}


class Model(nn.Module):
    """Fuses three tensors into one parameter and slices nothing else, as SGLang's models do; counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(8, 3), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.scaled = False
        self.asked = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.asked += 1
        for name, tensor in weights:
            if name not in FUSED:
                rows = tensor.narrow(0, 0, 3)
                self.norm[:3].data.copy_(rows * 2 if self.scaled else rows)
                self.norm[3:].data.fill_(7)  # SGLang fills what pads a vocabulary, be it nothing
                continue
            _, start, size = FUSED[name]
            self.qkv.data.narrow(0, start, size).copy_(tensor.view(size, 3))


def tensors(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {"q": (4, 3), "k": (2, 3), "v": (2, 3), "norm": (3,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.fixture
def sender() -> tuple[FlatBuffers, str]:
    buffers = FlatBuffers()
    buffers.fill(bucketed(tensors(0).items()))
    text = msgspec.json.encode([0, buffers.buckets[0].tensors]).decode()
    return buffers, text


def holds(model: Model, wanted: dict[str, Tensor]) -> bool:
    fused = torch.cat([wanted["q"], wanted["k"], wanted["v"]])
    return torch.equal(model.qkv, fused) and model.norm.tolist() == [*wanted["norm"].tolist(), 7, 7]


@pytest.mark.parametrize("inference", [False, True])
def test_the_second_load_asks_the_model_nothing_and_loads_all(sender: tuple[FlatBuffers, str], inference: bool) -> None:
    buffers, text = sender
    model, quick = Model(), QuickLoad()
    with torch.inference_mode(inference):
        assert not quick.bucket(model, text, buffers.flat[0], mapped=True) and holds(model, tensors(0))
        for seed in (1, 2):
            buffers.fill(bucketed(tensors(seed).items()))
            model.norm.fill_(0)
            assert quick.bucket(model, text, buffers.flat[0], mapped=True) and holds(model, tensors(seed))
    assert model.asked == 1


def test_the_model_is_asked_again_after_anything_moved(sender: tuple[FlatBuffers, str]) -> None:
    buffers, text = sender
    model, quick = Model(), QuickLoad()
    quick.bucket(model, text, buffers.flat[0], mapped=True)
    model.norm = nn.Parameter(torch.zeros(5), requires_grad=False)
    assert not quick.bucket(model, text, buffers.flat[0], mapped=True) and holds(model, tensors(0))
    other = buffers.flat[0].clone()
    assert not quick.bucket(model, text, other, mapped=False) and holds(model, tensors(0))
    assert not quick.bucket(model, text, other, mapped=False), "a copy is gone the next time"
    assert model.asked == 4


def test_a_loader_that_computes_is_never_cut_short(sender: tuple[FlatBuffers, str]) -> None:
    buffers, text = sender
    model, quick = Model(), QuickLoad()
    model.scaled = True
    for seed in (1, 2):
        buffers.fill(bucketed(tensors(seed).items()))
        assert not quick.bucket(model, text, buffers.flat[0], mapped=True)
        assert torch.equal(model.norm[:3], tensors(seed)["norm"] * 2)


def test_a_layout_is_that_of_the_plan(sender: tuple[FlatBuffers, str]) -> None:
    buffers, text = sender
    found: dict[str, Any] = dict(views(buffers.flat[0], msgspec.json.decode(text, type=Layout).tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(0).items())
