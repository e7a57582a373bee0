"""LoRA's settings: what cannot take effect is refused in one line before anything starts, and what is trained is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_async.cli.app import main
from miles_async.launcher.lora import adapted, check_lora
from miles_async.launcher.memory import Sizes, Trainer
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from miles_async.settings.run import RunSettings

MODULES = {"self_attn.q_proj": (16, 8), "self_attn.o_proj": (8, 16), "mlp.down_proj": (8, 24)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of two layers, which nobody loads."""
    made = tmp_path / "model"
    made.mkdir()
    weights = {f"model.layers.{n}.{name}.weight": torch.ones(shape) for n in range(2) for name, shape in MODULES.items()}
    save_file(weights | {"model.embed_tokens.weight": torch.ones(40, 8)}, made / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (made / name).write_text("{}")
    return made


def settings(model: Path | str, **fields: object) -> RunSettings:
    given = {"hf_checkpoint": str(model), "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math", "lora_rank": 4}
    return settings_from(**(given | {"target_modules": "all-linear"} | fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": None}, "target_modules names no matrix"),
        ({"target_modules": " , "}, "target_modules names no matrix"),
        ({"lora_rank": 0, "target_modules": None, "lora_publish": "adapters"}, "there are no adapters"),
        ({"lora_publish": "adapters", "use_router": True}, "may not have their adapter yet"),
        ({"lora_rank": 0}, "lora_rank is 0"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"optimizer": "muon"}, "Muon is for whole matrices"),
        ({"train_backend": "megatron", "model_dtype": "bfloat16"}, "LoRA is of the torch backend"),
        ({"ref_update_interval": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}, "LoRA's reference is the frozen base"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as error:
        settings("builtin:arithmetic", **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": "q_proj,v_proj"}, "v_proj matches no matrix of the model's layers. It has: down_proj, o_proj, q_proj"),
        ({"exclude_modules": "*proj"}, "leaves none"),
        ({"lora_adapter_path": "none"}, "adapter_config.json cannot be read"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_starts(fields: dict[str, object], said: str, model: Path) -> None:
    with pytest.raises(SettingsError, match=said) as error:
        check_lora(settings(model, **fields))
    assert "\n" not in str(error.value)
    check_lora(settings(model))


def test_experts_are_named_where_they_get_no_adapters(model: Path) -> None:
    weights = load_file(model / "model.safetensors") | {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(4, 4)}
    save_file(weights, model / "model.safetensors")
    with pytest.raises(SettingsError, match="experts get no adapters here"):
        check_lora(settings(model))
    check_lora(settings(model, target_modules="q_proj"))


def test_memory_is_counted_for_what_is_trained(model: Path) -> None:
    """Of a frozen parameter its two bytes, of an adapter's weight, master, gradient and moments."""
    s = settings(model, model_dtype="bfloat16", use_kl_loss=True, kl_loss_coef=0.1)
    trained = adapted(s.flat, model)
    assert trained == 2 * 4 * sum(rows + columns for rows, columns in MODULES.values())
    assert Trainer(s, Sizes(10**6, adapters=trained), {}).bytes() == 2 * 10**6 + 18 * trained


def test_convert_merges(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    name, (rows, columns) = "base_model.model.model.layers.1.self_attn.q_proj", MODULES["self_attn.q_proj"]
    a, b = torch.randn(2, columns), torch.randn(rows, 2)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    assert main(["convert", "merge", str(model), str(adapter), str(tmp_path / "out")]) == 0
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    moved = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(after.pop(moved), before.pop(moved) + 3 * b @ a)
    assert all(torch.equal(after[n], t) for n, t in before.items()) and (tmp_path / "out" / "tokenizer.json").is_file()
    for words, said in (
        (["merge", str(model), str(tmp_path / "two")], "merge takes BASE ADAPTER MODEL"),
        (["merge", str(model), str(model), str(tmp_path / "two")], "adapter_config.json cannot be read"),
        (["merge", str(model), str(adapter), str(model)], "it exists and is no earlier export"),
    ):
        assert main(["convert", *words]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert said in line
