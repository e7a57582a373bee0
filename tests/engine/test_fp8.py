"""An FP8 directory in the embedded engine: it computes with the values that the bytes and scales stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.generation.engines.embedded.cache import KvCache
from actors.generation.engines.embedded.config import ModelRefused, read_config
from actors.generation.engines.embedded.model import Decoder
from actors.generation.engines.embedded.weights import load_tensors, load_weights
from tests.engine.models import VOCAB, load_model, make_model

BLOCK = [24, 40]  # divides none of the shapes
NAME = "model.layers.1.mlp.down_proj.weight"
Tensors = dict[str, torch.Tensor]


def narrowed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(FP8 bytes, scales, the float32 values they stand for), block by block."""
    rows, cols = weight.shape
    narrow = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK[0]), -(-cols // BLOCK[1]))
    value = torch.empty(rows, cols)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[part].abs().max() / 400
            narrow[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            value[part] = narrow[part].float() * scales[i, j]
    return narrow, scales, value


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Any]:
    """An FP8 directory, and transformers' model with the values it stands for."""
    torch.set_num_threads(1)
    make_model("qwen3", tmp_path, seed=5)
    tensors, model = load_file(tmp_path / "model.safetensors"), load_model(tmp_path)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name], tensors[name + "_scale_inv"], value = narrowed(tensors[name])
        model.get_parameter(name).data.copy_(value)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": BLOCK}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, model


@torch.inference_mode()
def test_logits_are_those_of_the_widened_weights(pair: tuple[Path, Any]) -> None:
    directory, model = pair
    decoder = Decoder(read_config(directory))
    load_weights(decoder, directory)
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = KvCache(decoder.config, max_rows=2, max_total_tokens=64)
    cache.reserve(2, 12, live=0)
    logits = decoder.prefill(tokens, torch.tensor([12, 12]), torch.arange(2), cache, first_row=0)
    torch.testing.assert_close(logits, model(tokens).logits[:, -1], atol=1e-5, rtol=0)


def _no_scale(tensors: Tensors) -> None:
    del tensors[NAME + "_scale_inv"]


def _other_blocks(tensors: Tensors) -> None:
    tensors[NAME + "_scale_inv"] = torch.ones(1, 1)


def _scale_of_nothing(tensors: Tensors) -> None:
    tensors["model.layers.7.mlp.down_proj.weight_scale_inv"] = torch.ones(1, 1)


def _wide_with_scale(tensors: Tensors) -> None:
    tensors[NAME] = tensors[NAME].float()


def _norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_no_scale, f"{NAME} is F8_E4M3 and {NAME}_scale_inv is missing"),
        (_other_blocks, f"{NAME}_scale_inv has shape \\(1, 1\\), its blocks make \\(3, 3\\)"),
        (_scale_of_nothing, "unknown to this model, first model.layers.7"),
        (_wide_with_scale, f"{NAME} has scales but is F32"),
        (_norm, "model.norm.weight is F8_E4M3, only matrices"),
    ],
)
def test_what_does_not_fit_together_is_named_and_changes_nothing(
    pair: tuple[Path, Any], harm: Callable[[Tensors], None], says: str
) -> None:
    directory, _ = pair
    decoder = Decoder(read_config(directory))
    load_weights(decoder, directory)
    before = {name: slot.view.clone() for name, slot in decoder.slots.items()}
    tensors = load_file(directory / "model.safetensors")
    harm(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelRefused, match=says):
        load_weights(decoder, directory)
    assert all(torch.equal(before[name], slot.view) for name, slot in decoder.slots.items())


def test_an_engine_of_plain_weights_refuses_fp8_and_another_quantisation_is_named(pair: tuple[Path, Any]) -> None:
    directory, _ = pair
    file = directory / "config.json"
    config = json.loads(file.read_text())
    found = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match=r"this engine.s config\.json had no quantization_config"):
        load_weights(Decoder(read_config(directory)), directory)
    file.write_text(json.dumps(config | {"quantization_config": found | {"quant_method": "gptq"}}))
    with pytest.raises(ModelRefused, match=r"quant_method 'gptq'.*use SGLang"):
        read_config(directory)


@pytest.mark.parametrize("first", ["weight", "scales"])
def test_weights_and_scales_may_come_in_different_buckets_and_versions(pair: tuple[Path, Any], first: str) -> None:
    directory, _ = pair
    decoder = Decoder(read_config(directory))
    load_weights(decoder, directory)
    held = load_file(directory / "model.safetensors")[NAME + "_scale_inv"]
    narrow, scales, value = narrowed(torch.randn(decoder.slots[NAME].shape))
    order = [{NAME: narrow}, {NAME + "_scale_inv": scales}]
    for bucket in order if first == "weight" else reversed(order):
        load_tensors(decoder, bucket)
    view = decoder.slots[NAME].view
    assert torch.equal(view.reshape(value.shape), value)
    load_tensors(decoder, {NAME + "_scale_inv": held})  # a version that changed the scales alone
    assert not torch.equal(view.reshape(value.shape), value)
    load_tensors(decoder, {NAME: value})  # and one that is plain
    assert torch.equal(view.reshape(value.shape), value) and NAME not in decoder.fp8_parts
    with pytest.raises(ModelRefused, match=r"_scale_inv is torch.float32 \(1, 1\), the model has floats \(3, 3\)"):
        load_tensors(decoder, {NAME + "_scale_inv": torch.ones(1, 1)})
