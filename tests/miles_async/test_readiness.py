"""`miles-async doctor --preflight CONFIG`: what a host lacks of what a run needs, on a machine without GPUs."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from collections import namedtuple
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import zeros

from actors.generation.engines.sglang.host import CACHES
from actors.generation.engines.sglang.inside import TESTED
from miles_async.cli.app import main
from miles_async.launcher import readiness
from miles_async.launcher.readiness import Finding, look
from miles_async.settings.load import settings_from
from scripts.bench.launch_scripts import CONFIGS
from tests.floors.tree import ROOT

Usage = namedtuple("Usage", "total used free")
H200S = ["NVIDIA H200"] * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Qwen3 0.6B's shape, with a thousand weights."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({**CONFIGS["qwen3-0.6b-fsdp"], "max_position_embeddings": 4096}))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"model.norm.weight": zeros(1000)}, directory / "model.safetensors")
    (directory / "p.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 8)
    return directory


def findings(model: Path, **fields: Any) -> dict[str, list[Finding]]:
    """By what they are about."""
    base = {"hf_checkpoint": str(model), "prompt_data": str(model / "p.jsonl"), "input_key": "prompt", "label_key": "label",
            "num_rollout": 3, "rm_type": "math", "rollout_batch_size": 8, "save": str(model / "save")}  # fmt: skip
    found: dict[str, list[Finding]] = {}
    for one in look(settings_from(**base | fields)):
        assert "\n" not in one.text
        found.setdefault(one.what, []).append(one)
    return found


def test_the_quickstart_is_ready_here(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "quickstart.toml")
    data = str(ROOT / "configs" / "data" / "arithmetic_train.jsonl")
    held_out = ["--eval-prompt-data", "held_out", str(ROOT / "configs" / "data" / "arithmetic_held_out.jsonl")]
    assert main(["doctor", "--preflight", config, "--prompt-data", data, *held_out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "nothing is wrong" and any(line.startswith("ok     settings    2400 prompts") for line in lines)
    assert main(["doctor", "--json", "--preflight", config, "--prompt-data", "nowhere.jsonl", *held_out]) == 1
    said = json.loads(capsys.readouterr().out)
    [wrong] = [one for one in said["findings"] if one["level"] == "wrong"]
    assert not said["well"] and wrong["what"] == "settings" and "nowhere.jsonl" in wrong["text"]


def test_a_run_for_gpus_is_told_what_this_host_lacks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert readiness.gpu_names() == ["NVIDIA H200"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = findings(model, engine="sglang", rollout_num_gpus=2, actor_num_gpus_per_node=2)
    [gpus] = found["gpus"]
    assert gpus == Finding("wrong", "gpus", gpus.text) and "0 here, 4 needed" in gpus.text and "--engine embedded" in gpus.text
    [sglang] = found["sglang"]
    assert sglang.level == "wrong" and "install miles-async[sglang]" in sglang.text


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """As if on a node with four GPUs, with these packages alone."""
    monkeypatch.setattr(readiness, "gpu_names", lambda: H200S)
    monkeypatch.setattr(readiness, "version", lambda name: versions.get(name.replace("-", "_"), ""))
    monkeypatch.setattr(readiness, "_cuda_of_torch", lambda: "13.0" if "cpu" not in versions.get("torch", "") else "")


def test_versions_that_fit_each_other_and_what_their_absence_costs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = {"train_backend": "megatron", "actor_num_gpus_per_node": 4, "model_dtype": "bfloat16"}
    installed(monkeypatch, torch="2.11.0+cu130", megatron_core="0.16.1", transformer_engine_torch="2.12.0", nvidia_nccl_cu13="2.28")
    found = findings(model, **megatron)
    assert [found[name][0].level for name in ("gpus", "torch", "megatron-core", "transformer-engine", "nccl")] == ["ok"] * 5
    installed(monkeypatch, torch="2.11.0+cu130", megatron_core="0.16.1", transformer_engine_torch="2.16.0")
    [engine] = findings(model, **megatron)["transformer-engine"]
    assert engine.level == "note" and "2.12.0 was tried" in engine.text
    installed(monkeypatch, torch="2.13.0+cpu", megatron_core="0.15.0")
    found = findings(model, **megatron, context_parallel_size=2)
    assert [one.level for name in ("torch", "megatron-core", "transformer-engine") for one in found[name]] == ["wrong"] * 3
    assert "pip install 'megatron-core==0.16.1'" in found["megatron-core"][0].text

    installed(monkeypatch, torch="2.11.0+cu130", sglang="0.5.11")
    found = findings(model, engine="sglang", rollout_num_gpus=3, use_router=True)
    assert found["sglang"][0].level == "note" and "older than 0.5.12" in found["sglang"][0].text
    assert found["sglang-router"][0].level == "wrong" and found["attention"][0].level == "note"
    assert "8 % longer" in found["attention"][0].text and len(found["kernel cache"]) == 1


@pytest.mark.parametrize(
    ("release", "level", "said"),
    [
        (TESTED[0], "ok", TESTED[0]),
        ("0.5.17", "note", "counting in place"),
        ("0.5.21", "note", "from outside it was tried. Install"),
        ("0.5.20", "note", "it was not tried from outside either"),
        (
            "0.5.23",
            "note",
            f"none of the releases that were tried from inside ({TESTED[0]})",
        ),
    ],
)
def test_a_release_of_sglang_that_was_not_tried_is_named_with_what_is_lost(
    model: Path, monkeypatch: pytest.MonkeyPatch, release: str, level: str, said: str
) -> None:
    installed(monkeypatch, torch="2.11.0+cu130", sglang=release)
    [found] = findings(model, engine="sglang", rollout_num_gpus=1)["sglang"]
    assert found.level == level and found.text.startswith(release) and said in found.text


def test_flash_attention_that_is_not_installed_is_told_before_a_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine itself says so in the first step only."""

    def told() -> list[str]:
        notes = findings(model, train_backend="megatron", megatron={"attention-backend": "flash"})["settings"]
        return [one.text for one in notes if "flash-attn is not installed" in one.text and one.level == "note"]

    assert told() == [], "without Transformer Engine nobody would call it"
    monkeypatch.syspath_prepend(tmp_path)
    for package, said in (("transformer_engine", 1), ("flash_attn", 0)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        invalidate_caches()
        assert len(told()) == said, package


def test_caches_stand_in_for_a_compiler(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, torch="2.11.0+cu130", sglang="0.5.12")
    (tmp_path / "k.so").write_bytes(bytes(3_000_000))
    for name in CACHES:
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    [cache] = findings(model, engine="sglang")["kernel cache"]
    assert cache.level == "note" and "no nvcc" in cache.text and "cached: triton 3 MB." in cache.text


def test_room_is_told_for_weights_checkpoints_and_bus(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"keep_last": 3, "no_save_optim": False}
    for free, levels in ((10**9, ["ok", "ok"]), (30_000, ["ok", "note"]), (7_000, ["note", "wrong"])):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free, 0, free))
        found = findings(model, **sizes)
        assert [found[name][0].level for name in ("shared memory", "disk")] == levels, found
    assert "--shm-size" in found["shared memory"][0].text and "--no-save-optim" in found["disk"][0].text
    assert "disk" not in findings(model, no_save=True)
    small, large = (findings(model, max_weight_staleness=n, use_tis=True)["bus memory"][0].text for n in (1, 8))
    assert small != large


def test_files_ports_and_addresses(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = findings(model, train_master=f"127.0.0.1:{port}", engine="external",
                         rollout_external_engine_addrs=[f"127.0.0.1:{port}", "127.0.0.1:1"])  # fmt: skip
    assert found["open files"][0].level == "wrong" and "ulimit -n 4096" in found["open files"][0].text
    assert found["port"][0].level == "wrong" and f"train_master 127.0.0.1:{port} cannot be bound" in found["port"][0].text
    assert [one.level for one in found["address"]] == ["ok", "wrong"] and "127.0.0.1:1 does not answer" in found["address"][1].text


def test_the_bus_is_asked_and_its_memory_compared(model: Path, redis_url: str) -> None:
    import redis

    assert findings(model, bus_url=redis_url)["bus"][-1].level == "ok"
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", 200 << 20)
        try:
            long = {"rollout_max_response_len": 4000, "rollout_batch_size": 64, "num_rollout": 8}
            [memory] = findings(model, bus_url=redis_url, **long)["bus memory"]
        finally:
            client.config_set("maxmemory", 0)
    assert memory.level == "note" and "raise its maxmemory" in memory.text
    [bus] = findings(model, bus_url="redis://127.0.0.1:1/0")["bus"]
    assert bus.level == "wrong" and "Start a Redis there" in bus.text
