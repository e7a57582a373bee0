"""Families: what config.json says becomes Megatron's model, equal to transformers' forward and, bit by bit, in weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actors.runtime.run import Refused
from actors.trainer.megatron_backend import convert, model, weights
from actors.trainer.megatron_backend.directory import index, read
from actors.trainer.megatron_backend.families import FAMILIES, REFUSED, describe
from actors.trainer.megatron_backend.layout import RankLayout
from tests.megatron.models import DENSE, MODELS, OTHERS, VOCAB, make, tensors

TOKENS = 40  # more than what scaled positions were first made for


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only rank."""
    with convert.alone():
        yield


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_model_is_transformers_model_and_its_weights_come_back_bit_by_bit(family: str, tmp_path: Path, alone: None) -> None:
    theirs = make(family, tmp_path)
    arch = read(tmp_path)
    [ours] = model.build(arch, RankLayout(), dtype=torch.float32)
    for weight in ours.parameters():
        torch.nn.init.constant_(weight, float("nan"))  # so that what isn't loaded shows
    weights.load_hf([ours], arch, tmp_path)
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    later = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    with torch.no_grad():
        want = theirs(ids).logits
        here = next(ours.parameters()).device
        got = ours.eval()(ids.to(here), torch.arange(TOKENS, device=here).expand(2, -1), later.to(here)).cpu()
    got = (got / arch.logit_cap).tanh() * arch.logit_cap if arch.logit_cap else got  # a training's head does it
    assert want.std() > 0.1
    torch.testing.assert_close(got[..., :VOCAB], want, rtol=0, atol=1e-4)
    saved, back = tensors(tmp_path), {name: t.cpu() for name, t in weights.export_hf([ours], arch)}
    assert back.keys() == saved.keys() == set(arch.hf_names())
    assert [name for name, tensor in saved.items() if not torch.equal(back[name], tensor)] == []


CONFIG = {**DENSE, "model_type": "llama", "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2"}, "knows llama, qwen2"),
        ({"model_type": "gemma3"}, "tower for pictures is not mapped; give a directory of the text model"),
        ({**CONFIG, "hidden_act": "gelu"}, "hidden_act='gelu' can't be trained on Megatron: only silu"),
        ({**CONFIG, "mlp_bias": True}, "mlp_bias=True"),
        ({**CONFIG, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "kinds of rope scaling"),
        ({**CONFIG, "model_type": "qwen2", "use_sliding_window": True}, "windows are not mapped"),
        ({k: v for k, v in CONFIG.items() if k != "rms_norm_eps"}, "rms_norm_eps is missing"),
        ({**CONFIG, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}, "by their maximum"),
    ],
)
def test_what_megatron_can_not_compute_as_the_model_does_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        describe(config, where="models/m")
    assert str(caught.value).startswith("models/m: ") and "\n" not in str(caught.value)
    assert set(MODELS) == set(FAMILIES) and not set(FAMILIES) & set(REFUSED)


def test_a_config_of_older_transformers_says_the_same() -> None:
    new = describe({**CONFIG, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}})
    old = describe({**CONFIG, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert {**new.rotary} == {**old.rotary} and new.transformer == old.transformer
    frequencies = model.inverse_frequencies(old.rotary, 16)
    torch.testing.assert_close(frequencies, 0.5 / 5e5 ** (torch.arange(0, 16, 2) / 16))


def test_a_directory_of_other_weights_than_its_config_is_refused_before_any_is_read(tmp_path: Path) -> None:
    make("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    arch = describe({**config, "num_hidden_layers": 5})
    with pytest.raises(Refused, match=r"5 layers, but the directory lacks 12 tensors of it \(model.layers.4.*different models"):
        index(tmp_path, arch)
    with pytest.raises(Refused, match=r"has 12 others \(lm_head.weight|has 12 others \(model.layers.3"):
        index(tmp_path, describe({**config, "num_hidden_layers": 3}))
    with pytest.raises(Refused, match=r"quantised weights .*; give the directory in bfloat16"):
        index(tmp_path, describe({**config, "quantization_config": {"quant_method": "fp8"}}))
    listed = {"weight_map": dict.fromkeys(describe(config).hf_names(), "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(listed))
    with pytest.raises(Refused, match=r"not whole: its index names model-00001-of-00002.safetensors, not there"):
        read_and_index(tmp_path)
    for path in tmp_path.glob("model*.safetensors*"):
        path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Refused, match=r"pytorch_model.bin is a pickle, which could run code"):
        read_and_index(tmp_path)


def test_a_tensor_of_another_width_is_refused(tmp_path: Path, alone: None) -> None:
    make("qwen2", tmp_path)
    wrong = tensors(tmp_path)
    wrong["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 100)
    save_file(wrong, tmp_path / "model.safetensors")
    arch = read(tmp_path)
    with pytest.raises(Refused, match=r"model.layers.2.mlp.down_proj.weight make a part of shape \[64, 100\].*has \[64, 112\]"):
        weights.load_hf(model.build(arch, RankLayout(), dtype=torch.float32), arch, tmp_path)


def read_and_index(directory: Path) -> None:
    index(directory, read(directory))
