"""Engines on the trainer's GPUs: what follows from --colocate, what is refused, and whether both have room."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from miles_async.launcher.plan import Place, room_specs
from miles_async.settings import SettingsError
from miles_async.settings.colocate import GIB, check_memory, fits, parameters
from tests.miles_async.test_settings_serving import made, refusal

H200 = 140 * GIB
BILLION = 10**9
PLACE = Place(
    run_dir="/r", model_dir="/m", weights_dir="/w", blob_dir="/b", stop_token_ids=(), num_rollout=3, fingerprint="f"
)


def rooms(tmp_path: Path, flags: str) -> dict[str, dict[str, object]]:
    """Actor -> its start-up settings."""
    found = {name: spec for name, _, spec in room_specs(made(tmp_path, flags=flags).settings, PLACE)}
    values: dict[str, dict[str, object]] = json.loads(msgspec.json.encode(found))
    return values


def test_engines_get_the_trainers_gpus_and_everything_follows(tmp_path: Path) -> None:
    flags = "--colocate --engine sglang --actor-num-gpus-per-node 2"
    s = made(tmp_path, flags=flags).settings.sglang
    assert (s.num_generation_workers, s.rollout_num_gpus, s.rollout_gpu_ids) == (2, 2, (0, 1))
    assert s.offload_train and s.offload_rollout and s.update_weight_transport == "ipc"
    specs = rooms(tmp_path, flags)
    workers = ["generation-0", "generation-1"]
    assert specs["trainer"]["turns"] == {"workers": workers, "offload": True, "deadline_s": 720.0}
    for i, name in enumerate(workers):
        assert specs[name]["gpus"] == [i]
        assert specs[name]["gives_back"] == ["kv_cache", "cuda_graph", "weights"]
        args = specs[name]["server_args"]
        assert args == {"mem-fraction-static": 0.7, "enable-memory-saver": True, "enable-weights-cpu-backup": True}


@pytest.mark.parametrize(
    ("flags", "turns", "offload", "tags", "args"),
    [
        ("--no-offload", False, False, [], {"mem-fraction-static": 0.7}),
        ("--no-offload-rollout", False, True, [], {"mem-fraction-static": 0.7}),
        (
            "--offload-rollout-level kv_cache --no-offload-train --sglang-mem-fraction-static 0.5",
            True,
            False,
            ["kv_cache", "cuda_graph"],
            {"mem-fraction-static": "0.5", "enable-memory-saver": True},
        ),
    ],
)
def test_what_is_kept_on_the_gpu(
    tmp_path: Path, flags: str, turns: bool, offload: bool, tags: list[str], args: dict[str, object]
) -> None:
    specs = rooms(tmp_path, f"--colocate --engine sglang {flags}")
    assert specs["trainer"]["turns"]["workers"] == (["generation-0"] if turns else [])  # type: ignore[index]
    assert specs["trainer"]["turns"]["offload"] is offload  # type: ignore[index]
    assert specs["generation-0"]["gives_back"] == tags
    assert specs["generation-0"]["server_args"] == args


@pytest.mark.parametrize("alone", ["--debug-rollout-only", "--load-debug-rollout-data x/{rollout_id}"])
def test_nobody_takes_turns_alone(tmp_path: Path, alone: str) -> None:
    assert rooms(tmp_path, f"--colocate --engine sglang {alone}")["trainer"]["turns"]["workers"] == []  # type: ignore[index]


def test_without_it_engines_and_trainer_know_nothing_of_each_other(tmp_path: Path) -> None:
    specs = rooms(tmp_path, "--engine sglang")
    assert specs["trainer"]["turns"]["workers"] == []  # type: ignore[index]
    assert specs["generation-0"]["server_args"] == {} and specs["generation-0"]["gives_back"] == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--offload-rollout", "offload_rollout = true: trainer and engines have GPUs of their own"),
        ("--offload", "Add --colocate, or leave it out"),
        ("--colocate --offload-rollout-level", "would give nothing back"),
        ("--colocate --engine external --rollout-external-engine-addrs a:1", "whose memory is not ours to give"),
        ("--colocate --update-weight-transport nccl", "NCCL joins no two processes on one GPU"),
        ("--colocate --engine sglang --rollout-num-gpus 4 --num-generation-workers 4", "actor_num_gpus_per_node = 1"),
        ("--colocate --engine sglang --rollout-gpu-ids 3", "the trainer has GPUs 0 to 0"),
        ("--colocate --engine sglang --sglang-mem-fraction-static 1.2", "not a part of the GPU's memory"),
        ("--colocate --engine sglang --sglang-mem-fraction-static most", "not a part of the GPU's memory"),
        ("--colocate --engine sglang --sglang-enable-memory-saver", "--colocate and --offload-rollout"),
    ],
)
def test_what_cannot_be(tmp_path: Path, flags: str, says: str) -> None:
    assert says in refusal(tmp_path, flags=flags)


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
        check_memory(s)
    program.unlink()
    check_memory(s)
