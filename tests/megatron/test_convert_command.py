"""`miles-async convert`: there and back, bit by bit; what can't be converted is one line and writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles_async.cli.app import main
from tests.megatron.models import MODELS, OTHERS, make, tensors


@pytest.mark.parametrize("family", [*MODELS, *OTHERS])
def test_a_model_comes_back_bit_by_bit(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, megatron, back = tmp_path / "made", tmp_path / "megatron", tmp_path / "back"
    make(family, made, torch.bfloat16)
    if family == "qwen3_moe":  # as some keep their routers
        widened(made, "mlp.gate.weight")
    (made / "tokenizer.json").write_text("{}")
    assert main(["convert", "hf-to-megatron", str(made), str(megatron)]) == 0
    assert (megatron / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert {"common.pt", "metadata.json", ".metadata"} < {path.name for path in (megatron / "release").iterdir()}
    assert main(["convert", "megatron-to-hf", str(megatron), str(back)]) == 0
    assert capsys.readouterr().out.count("complete: ") == 2
    want, got = tensors(made), tensors(back)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name]) or got[name].dtype != want[name].dtype] == []
    for name in ("config.json", "tokenizer.json"):
        assert (back / name).read_bytes() == (made / name).read_bytes()


def widened(directory: Path, what: str) -> None:
    """These tensors as float32, with bits that bfloat16 has not."""
    held = tensors(directory)
    wide = {name: t.float() * 1.0001 if what in name else t for name, t in held.items()}
    assert any(t.dtype == torch.float32 for t in wide.values())
    save_file(wide, directory / "model.safetensors", metadata={"format": "pt"})


def test_what_can_not_be_converted_is_one_line_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, target = tmp_path / "made", tmp_path / "target"
    make("qwen2", made)
    capsys.readouterr()
    cases = {
        (str(tmp_path / "none"), str(target)): "none: no such directory",
        (str(made), str(made)): "exists and isn't empty",
        (str(made), str(target), "--ckpt-step", "1"): "--ckpt-step and --hf-checkpoint are of megatron-to-hf",
    }
    for words, said in cases.items():
        assert main(["convert", "hf-to-megatron", *words]) == 2
        assert said in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert main(["convert", "megatron-to-hf", str(made), str(target)]) == 2
    assert "latest_checkpointed_iteration.txt can't be read" in capsys.readouterr().err
    shutil.move(made / "config.json", tmp_path / "config.json")
    assert main(["convert", "hf-to-megatron", str(made), str(target)]) == 2
    assert not target.exists()
