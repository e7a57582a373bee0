"""FP8 on publish: what a block loses, what stays as it is, and a directory that boots a server and comes back as masters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from actors.runtime.flat import views
from actors.runtime.fp8 import Fp8Scheme, read_scheme
from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.fp8 import MAX, dequantized, quantize, quantized, scheme_of
from actors.trainer.transports.flat import FlatBuffers, bucketed
from bus.errors import InvariantBroken
from tests.trainer.conftest import files_of, published, saved

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 24],
    "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"],
}
Backend = Callable[..., TorchBackend]


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    magnitude=st.integers(-30, 30),
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_an_element_comes_back_within_its_bound_whatever_the_shape(
    shape: tuple[int, int], block: tuple[int, int], magnitude: int, seed: int, dtype: torch.dtype
) -> None:
    scheme = Fp8Scheme(block)
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 3, shape, generator=draw).float()  # small elements beside large ones
    weight = (torch.randn(shape, generator=draw) * 2.0 ** (spread + magnitude)).to(dtype)
    weight[torch.rand(shape, generator=draw) < 0.2] = 0.0
    narrow, scale = quantize(weight, scheme)
    assert narrow.dtype == torch.float8_e4m3fn and narrow.shape == weight.shape
    assert scale.dtype == torch.float32 and tuple(scale.shape) == scheme.scales(shape)
    back = scheme.dequantize(narrow, scale)
    wide = weight.float()
    each = scheme.dequantize(torch.ones_like(narrow, dtype=torch.float32), scale)  # the scale of every element
    assert (((back - wide).abs() <= torch.maximum(wide.abs() / 16, each / 1024) * (1 + 1e-5)) | (wide == back)).all()
    for row in range(scale.shape[0]):
        for col in range(scale.shape[1]):
            part = wide[row * block[0] :][: block[0], col * block[1] :][:, : block[1]]
            largest = part.abs().max()
            assert scale[row, col] == (largest / MAX if largest > 0 else 1.0)


def test_numbers_that_fp8_has_come_back_exactly_signs_of_zeros_too() -> None:
    scheme = Fp8Scheme((2, 2))
    weight = torch.tensor([[MAX, -0.0, 0.0], [-240.0, 0.015625, -0.0]]) * 0.5
    narrow, scale = quantize(weight, scheme)
    back = scheme.dequantize(narrow, scale)
    assert torch.equal(scale, torch.tensor([[0.5, 1.0]])) and torch.equal(back, weight)
    assert torch.equal(back.signbit(), weight.signbit())
    again, same = quantize(back, scheme)
    assert torch.equal(again.view(torch.uint8), narrow.view(torch.uint8)) and torch.equal(same, scale)


@pytest.mark.parametrize("value", [1e-44, 3e38])
def test_the_ends_of_float32_neither_vanish_nor_overflow(value: float) -> None:
    narrow, scale = quantize(torch.full((3, 3), value), Fp8Scheme((2, 2)))
    assert narrow.float().isfinite().all() and scale.isfinite().all() and (scale > 0).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_not_published(bad: float) -> None:
    weight = torch.ones(5, 5)
    weight[4, 4] = bad
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(InvariantBroken, match=f"{name} is not published as FP8"):
        quantized({name: weight}, Fp8Scheme((2, 2)))


def test_only_linear_layers_that_are_not_left_out_are_converted() -> None:
    scheme = Fp8Scheme((128, 128), ("lm_head", "model.layers.3.mlp.gate", "visual", "down_proj"))
    matrix, vector = (4, 4), (4,)
    at = "model.layers.3."
    assert scheme.converts(f"{at}mlp.gate_proj.weight", matrix)  # `gate` is a part of another name
    assert scheme.converts(f"{at}self_attn.q_proj.weight", matrix)
    for name, shape in (
        (f"{at}self_attn.q_proj.bias", vector),
        (f"{at}self_attn.q_norm.weight", vector),
        (f"{at}mlp.gate.weight", matrix),
        (f"{at}mlp.down_proj.weight", matrix),
        ("visual.blocks.0.qkv.weight", matrix),
        ("model.embed_tokens.weight", matrix),
        ("lm_head.weight", matrix),
    ):
        assert not scheme.converts(name, shape), name
    assert not Fp8Scheme((128, 128)).converts("lm_head.weight", matrix)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
    ],
)
def test_another_quantisation_is_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = {"quantization_config": QUANTIZATION | change}
    with pytest.raises(ValueError, match=named):
        read_scheme(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=f"{named}.*Give hf_checkpoint a plain"):
        scheme_of(tmp_path)


# -- with a model ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fp8_dir(models: dict[str, Path], tmp_path: Path) -> Path:
    """The llama of the other tests as an FP8 directory."""
    return as_fp8(models["llama"], tmp_path / "fp8")


def as_fp8(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    scheme = scheme_of(target)
    assert scheme is not None and scheme_of(source) is None
    save_file(quantized(load_file(source / "model.safetensors"), scheme), target / "model.safetensors")
    return target


def test_what_is_published_is_the_fp8_of_the_trained_weights(
    fp8_dir: Path, models: dict[str, Path], tmp_path: Path, make_backend: Backend, make_batch: Callable[..., StepBatch]
) -> None:
    backend = make_backend("llama", published_as=str(fp8_dir), model_dtype="bfloat16")
    backend.train_step(make_batch(0))
    manifest = published(backend, tmp_path / "v1")
    tensors = files_of(tmp_path / "v1")
    assert manifest.n_tensors == len(tensors)
    params = {name: p.detach().to(torch.bfloat16) for name, p in backend.core.policy.named_weights().items()}
    scheme = scheme_of(tmp_path / "v1")  # a server reads there how to boot
    assert scheme == scheme_of(fp8_dir) and scheme is not None
    kept = {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"}
    for name, p in params.items():
        if p.dim() == 2 and name not in kept:
            narrow, scale = quantize(p, scheme)
            assert torch.equal(tensors[name].view(torch.uint8), narrow.view(torch.uint8)), name
            assert torch.equal(tensors[name + "_scale_inv"], scale)
        else:
            assert torch.equal(tensors[name], p) and name + "_scale_inv" not in tensors, name
    assert sum(t.dtype == torch.float8_e4m3fn for t in tensors.values()) == 2 * 7 - 1
    snapshot = tmp_path / "c"
    saved(backend, snapshot)
    assert "quantization_config" not in json.loads((snapshot / "config.json").read_text() or "{}")


def test_an_fp8_directory_gives_the_masters_its_values(
    fp8_dir: Path, make_config: Callable[..., Any], tmp_path: Path, models: dict[str, Path]
) -> None:
    backend = TorchBackend()
    models["fp8"] = fp8_dir
    try:
        backend.setup(make_config("fp8"))
    finally:
        del models["fp8"]
    scheme = scheme_of(fp8_dir)
    assert scheme is not None
    wanted = dequantized(fp8_dir, scheme)
    for name, p in backend.core.weights.params.items():
        assert torch.equal(p.detach(), wanted[name]), name
    published(backend, tmp_path / "v0")  # untrained: what came in goes out
    before, after = files_of(fp8_dir), files_of(tmp_path / "v0")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if name.endswith("_scale_inv"):  # x / 448 * 448 / 448 may be off by one rounding
            torch.testing.assert_close(after[name], tensor, rtol=2**-22, atol=0.0)
        else:
            assert torch.equal(tensor.contiguous().view(torch.uint8), after[name].view(torch.uint8)), name


def test_scales_that_are_missing_or_misshapen_are_named(fp8_dir: Path) -> None:
    scheme = scheme_of(fp8_dir)
    assert scheme is not None
    name = "model.layers.0.mlp.up_proj.weight"
    whole = load_file(fp8_dir / "model.safetensors")
    for harm in ({name + "_scale_inv": torch.ones(1, 1)}, {}):
        kept = {n: t for n, t in whole.items() if n != name + "_scale_inv"}
        save_file(kept | harm, fp8_dir / "model.safetensors")
        with pytest.raises(Refused, match=f"{name} is FP8 and its scales have shape"):
            dequantized(fp8_dir, scheme)


def test_fp8_travels_in_few_buckets_and_arrives_as_it_was() -> None:
    draw = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.mlp.{kind}_proj.weight" for i in range(5) for kind in ("up", "down")]
    plain = {name: torch.randn(30, 20, generator=draw).bfloat16() for name in names}
    plain |= {f"model.layers.{i}.input_layernorm.weight": torch.randn(20, generator=draw).bfloat16() for i in range(5)}
    sent = quantized(plain, Fp8Scheme((16, 16)))
    buffers = FlatBuffers()
    for _ in range(2):  # the second fill goes into buffers that exist
        buffers.fill(bucketed(sent.items()))
    assert [len(bucket.tensors) for bucket in buffers.buckets] == [10, 10, 5]  # FP8, scales, the rest
    arrived: dict[str, torch.Tensor] = {}
    for flat, bucket in zip(buffers.flat, buffers.buckets, strict=True):
        arrived |= dict(views(flat, bucket.tensors))
    assert arrived.keys() == sent.keys()
    for name, tensor in sent.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
