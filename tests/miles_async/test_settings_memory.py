"""Whether models fit the GPUs, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles_async.settings.errors import SettingsError
from miles_async.settings.memory import GIB, activation_bytes, check_memory, fits, parameters, trainer_fits
from tests.miles_async.test_settings_serving import made

H200 = 140 * GIB
BILLION = 10**9


@pytest.mark.parametrize(
    ("flags", "billions", "says"),
    [
        ("", 4.0, ""),
        ("--sglang-mem-fraction-static 0.95", 4.0, "the engine's turn on a shared GPU needs 144.5 GiB of 140.0 GiB"),
        ("--sglang-mem-fraction-static 0.95", 4.0, "Lower --sglang-mem-fraction-static to 0.92"),
        ("--no-offload", 4.0, "engine 98.0 GiB, trainer 67.1 GiB"),
        ("--no-offload --sglang-mem-fraction-static 0.4", 4.0, ""),
        ("--no-offload-train", 4.0, "Lower --sglang-mem-fraction-static to 0.44"),
        ("", 8.0, "the trainer's turn on a shared GPU needs 153.0 GiB"),
        ("--offload-rollout-level kv_cache", 7.0, "engine 13.0 GiB, trainer 117.3 GiB"),
        ("--actor-num-gpus-per-node 2 --global-batch-size 32", 8.0, ""),
    ],
)
def test_both_have_room_or_the_run_does_not_start(tmp_path: Path, flags: str, billions: float, says: str) -> None:
    s = made(tmp_path, flags=f"--colocate --engine sglang --model-dtype bfloat16 {flags}").settings
    if not says:
        fits(s, H200, int(billions * BILLION))
        return
    with pytest.raises(SettingsError) as caught:
        fits(s, H200, int(billions * BILLION))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_are_read_from_the_headers_of_the_shards(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(2, 2)}, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    assert parameters(tmp_path) == 26
    (tmp_path / "model-00003.safetensors").write_bytes(b"no header")
    assert parameters(tmp_path) == 0


def test_the_check_reads_the_model_and_asks_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program of its own in place of nvidia-smi; the header alone claims 100 billion parameters."""
    model = tmp_path / "model"
    model.mkdir()
    header = json.dumps({"w": {"dtype": "BF16", "shape": [100_000, 1_000_000], "data_offsets": [0, 0]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 143771\n")
    program.chmod(0o755)
    s = made(tmp_path, flags=f"--colocate --engine sglang --hf-checkpoint {model}").settings
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"of 140\.4 GiB"):
        check_memory(s, {})
    program.unlink()
    assert check_memory(s, {}) == ()


SHAPES = {  # hidden, intermediate, layers, heads, key/value heads; billions of parameters
    "0.6b": (1024, 3072, 28, 16, 8, 0.596),
    "4b": (2560, 9728, 36, 32, 8, 4.022),
}


def config_of(shape: str) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {"head_dim": 128, **dict(zip(names, SHAPES[shape], strict=False))}


def test_activations_are_estimated_as_they_were_measured() -> None:
    """docs/results.md: 45 GiB at the peak, 10 of them weights and optimizer state."""
    assert activation_bytes(config_of("0.6b"), 16_384) / GIB == pytest.approx(35, abs=2)


@pytest.mark.parametrize(
    ("flags", "shape", "says"),
    [
        ("", "0.6b", None),
        ("", "4b", "may take 99.0 GiB of activations beside 67.4 GiB of weights and optimizer state, of 140.4 GiB: --gradient-ch"),
        ("--gradient-checkpointing", "4b", None),
        ("--max-tokens-per-gpu 8192", "4b", None),
        ("--no-use-dynamic-batch-size", "4b", None),
        ("--actor-num-gpus-per-node 2", "4b", None),
        ("--debug-rollout-only", "4b", None),
    ],
)
def test_a_full_micro_batch_that_may_not_fit_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, shape: str, says: str | None
) -> None:
    monkeypatch.setattr("miles_async.settings.memory.gpu_bytes", lambda: 143_771 << 20)
    monkeypatch.setattr("miles_async.settings.memory.parameters", lambda _: int(SHAPES[shape][-1] * BILLION))
    flags = f"--engine sglang --model-dtype bfloat16 --max-tokens-per-gpu 16384 --hf-checkpoint m {flags}"
    notes = check_memory(made(tmp_path, flags=flags).settings, config_of(shape))
    assert [bool(says and says in note) for note in notes] == [True] * bool(says)


def test_a_trainer_that_cannot_fit_alone_is_refused_with_the_gpus_it_needs(tmp_path: Path) -> None:
    flags = "--engine sglang --model-dtype bfloat16"
    s = made(tmp_path, flags=flags).settings
    with pytest.raises(SettingsError, match=r"need 234\.7 GiB of 140\.0 GiB on each .* Set it to at least 2\."):
        trainer_fits(s, H200, 14 * BILLION)
    trainer_fits(made(tmp_path, flags=f"{flags} --actor-num-gpus-per-node 2").settings, H200, 14 * BILLION)
