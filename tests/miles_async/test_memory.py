"""Whether models fit the GPUs, before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from miles_async.launcher.memory import GIB, Sizes, Trainer, check_memory, fits, parameters
from miles_async.settings.errors import SettingsError
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
        fits(s, H200, Trainer(s, Sizes(int(billions * BILLION)), {}))
        return
    with pytest.raises(SettingsError) as caught:
        fits(s, H200, Trainer(s, Sizes(int(billions * BILLION)), {}))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_are_read_from_the_headers_of_the_shards(tmp_path: Path) -> None:
    first = {"model.embed_tokens.weight": torch.zeros(3, 5), "model.layers.0.self_attn.o_proj.weight": torch.zeros(7)}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    second = {"lm_head.weight": torch.zeros(3, 4), "model.layers.0.mlp.experts.1.up_proj.weight": torch.zeros(2, 2)}
    save_file(second, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    assert parameters(tmp_path) == Sizes(7, 4, ends=27, end=15) and parameters(tmp_path).total == 38
    (tmp_path / "model-00003.safetensors").write_bytes(b"no header")
    assert parameters(tmp_path).total == 0


def test_the_check_reads_the_model_and_asks_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


SHAPES = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary; billions of parameters, of the embedding
    "0.6b": (1024, 3072, 28, 16, 8, 151_936, 0.596, 0.156),
    "4b": (2560, 9728, 36, 32, 8, 151_936, 4.022, 0.389),
    "30b": (5120, 25_600, 64, 64, 8, 151_936, 32.8, 1.556),
}
ON_GPU = "--engine sglang --model-dtype bfloat16 --rollout-max-response-len 8192"


def config_of(shape: str) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return {"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 128, **dict(zip(names, SHAPES[shape], strict=False))}


def sizes_of(shape: str) -> Sizes:
    whole, end = (int(n * BILLION) for n in SHAPES[shape][-2:])
    return Sizes(whole - end, ends=end, end=end)


def trainer_of(folder: Path, shape: str, flags: str) -> Trainer:
    return Trainer(made(folder, flags=f"{ON_GPU} {flags}").settings, sizes_of(shape), config_of(shape), H200)


@pytest.mark.parametrize(
    ("shape", "flags", "gib"),
    [
        ("0.6b", "--compile off --max-tokens-per-gpu 16384", 45.8),
        ("0.6b", "--max-tokens-per-gpu 16384", 34.5),
        ("4b", "--max-tokens-per-gpu 16384 --gradient-checkpointing --gradient-checkpointing-layers 6", 122.2),
        ("0.6b", "--train-backend megatron --max-tokens-per-gpu 8192", 21.9),
        ("4b", "--train-backend megatron --max-tokens-per-gpu 8192", 100.8),
    ],
)
def test_peaks_are_estimated_as_they_were_measured(shape: str, flags: str, gib: float, tmp_path: Path) -> None:
    """docs/results.md: peaks on H200s."""
    trainer = trainer_of(tmp_path, shape, flags)
    tokens = trainer.s.perf.max_tokens_per_gpu
    assert (trainer.bytes() + trainer.activations(tokens)) / GIB == pytest.approx(gib, rel=0.04)


def test_layers_of_a_model_that_auto_does_not_compile_keep_what_plain_ones_do(tmp_path: Path) -> None:
    def kept(flags: str, millions: int) -> int:
        settings = made(tmp_path, flags=f"{ON_GPU} {flags}").settings
        return Trainer(settings, Sizes(millions * 1_000_000), config_of("0.6b"), H200).activations(1024)

    assert kept("", 99) == kept("--compile off", 99) > kept("--compile on", 99)
    assert kept("", 100) == kept("--compile on", 100)


def test_two_ranks_of_fsdp_are_estimated_by_what_they_share(tmp_path: Path) -> None:
    """28.0 GiB were measured when gradients were held whole and weights gathered layer by layer, between the two."""
    found = []
    for shared in ("all", "optimizer"):
        flags = f"--max-tokens-per-gpu 16384 --actor-num-gpus-per-node 2 --fsdp-shard {shared}"
        trainer = trainer_of(tmp_path, "0.6b", flags)
        found.append((trainer.bytes() + trainer.activations(16_384)) / GIB)
    assert found[0] == pytest.approx(28.0, rel=0.04)
    assert found[1] - found[0] == pytest.approx(0.596 * BILLION / GIB * (6 + 12 / 2 - 16 / 2), rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "flags", "says"),
    [
        ("4b", "--compile off --max-tokens-per-gpu 19456", ""),
        ("30b", "--fsdp-shard optimizer --actor-num-gpus-per-node 8 --global-batch-size 32",
         r"need 229\.1 GiB .* Set --fsdp-shard all\.$"),
        ("30b", "--actor-num-gpus-per-node 8 --global-batch-size 32 --max-tokens-per-gpu 64", ""),
    ],
)  # fmt: skip
def test_what_ranks_hold_whole_is_counted(shape: str, flags: str, says: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, shape, f"--actor-num-gpus-per-node 2 {flags}")
    if not says:
        trainer.check(H200)
        return
    with pytest.raises(SettingsError, match=says):
        trainer.check(H200)


def test_a_turn_of_the_trainer_counts_what_its_ranks_hold_whole(tmp_path: Path) -> None:
    flags = "--colocate --engine sglang --model-dtype bfloat16 --actor-num-gpus-per-node 2 --global-batch-size 32"
    for shared, says in (("optimizer", r"the trainer's turn .* Set --fsdp-shard all"), ("auto", "")):
        s = made(tmp_path, flags=f"{flags} --fsdp-shard {shared}").settings
        trainer = Trainer(s, Sizes(11 * BILLION), {}, H200)
        if says:
            with pytest.raises(SettingsError, match=says):
                fits(s, H200, trainer)
        else:
            fits(s, H200, trainer)


MEGATRON = "--train-backend megatron --actor-num-gpus-per-node 8"


@pytest.mark.parametrize(
    ("flags", "gib"),
    [
        ("", 32.8 * (6 + 12 / 8)),
        ("--no-use-distributed-optimizer", 32.8 * 18),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 32.8 / 2 * (6 + 12 / 4)),
        ("--tensor-model-parallel-size 8 --sequence-parallel", 32.8 / 8 * (6 + 12)),
        ("--pipeline-model-parallel-size 4", ((32.8 - 1.556) / 4 + 1.556) * (6 + 12 / 2)),
        ("--context-parallel-size 2", 32.8 * (6 + 12 / 8)),
        ("--optimizer-cpu-offload", 32.8 * 6),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", 32.8 * (6 + 6 / 8)),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 32.8 * (6 + 8 / 8)),
        ("--actor-num-nodes 2 --train-master h:1", 32.8 * (6 + 12 / 16)),
    ],
)
def test_a_layout_of_megatron_is_counted_rank_by_rank(flags: str, gib: float, tmp_path: Path) -> None:
    assert trainer_of(tmp_path, "30b", f"{MEGATRON} {flags}").bytes() == pytest.approx(gib * BILLION, rel=1e-3)


def test_experts_are_cut_by_their_own_ranks(tmp_path: Path) -> None:
    """30B-A3B: 29 of its 30.5 billion are experts'."""
    config = {**config_of("4b"), "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
              "moe_intermediate_size": 768, "num_key_value_heads": 4, "intermediate_size": 6144}  # fmt: skip
    sizes = Sizes(BILLION, 29 * BILLION, ends=BILLION // 2, end=BILLION // 4)
    flags = "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 4 --sequence-parallel"
    s = made(tmp_path, flags=f"{ON_GPU} {MEGATRON} {flags}").settings
    assert Trainer(s, sizes, config).bytes() == pytest.approx(1.5 * BILLION / 4 * (6 + 12 / 2) + 29 * BILLION / 8 * 18, rel=1e-6)
    alone = made(tmp_path, flags=f"{ON_GPU} {MEGATRON}").settings
    with pytest.raises(SettingsError, match=r"need 213\.\d GiB .* Nearest: --expert-model-parallel-size 2 on 8 GPUs\."):
        Trainer(alone, sizes, config).check(H200)


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("--tensor-model-parallel-size 2", (8 * 5120 + (6 * 25_600 + 7 * 10_240) / 2) / (8 * 5120 + 6 * 25_600 + 7 * 10_240)),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 0.5),
        ("--pipeline-model-parallel-size 4", 1.0),
        ("--pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2", 1 + 3 / 8),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8 --pipeline-model-parallel-size 4",
         (32 + 32 * 10_240 / 266_240) / 64),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 10_240 / 266_240 + 1 / 64),
        ("--gradient-checkpointing", 10_240 / 266_240 + 1 / 64),
    ],
)  # fmt: skip
def test_activations_are_cut_and_made_again(flags: str, share: float, tmp_path: Path) -> None:
    whole = trainer_of(tmp_path, "30b", MEGATRON).activations(8192)
    assert whole == 8192 * 64 * 266_240
    assert trainer_of(tmp_path, "30b", f"{MEGATRON} {flags}").activations(8192) / whole == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "shape", "says"),
    [
        ("", "0.6b", None),
        ("", "4b", None),  # compiled layers keep less
        ("--max-tokens-per-gpu 19456", "4b",
         "79.5 GiB of activations beside 67.4 GiB of weights and optimizer state, of 140.4 GiB: lower --max-tokens-per-gpu to 17664"
         ", or set --gradient-checkpointing --gradient-checkpointing-layers 4"),
        ("--gradient-checkpointing --compile off", "4b", None),
        ("--no-use-dynamic-batch-size --compile off", "4b", None),
        ("--actor-num-gpus-per-node 2 --compile off", "4b", None),
        ("--actor-num-gpus-per-node 2 --compile off --fsdp-shard optimizer", "4b",
         "99.0 GiB of activations beside 44.9 GiB of weights and optimizer state, of 140.4 GiB: set --fsdp-shard all, or lower"),
        ("--debug-rollout-only --compile off", "4b", None),
        ("--train-backend megatron --max-tokens-per-gpu 18432", "4b", "or set --recompute-granularity full"),
    ],
)  # fmt: skip
def test_a_full_micro_batch_that_may_not_fit_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, shape: str, says: str | None
) -> None:
    monkeypatch.setattr("miles_async.launcher.memory.gpu_bytes", lambda: 143_771 << 20)
    monkeypatch.setattr("miles_async.launcher.memory.host_bytes", lambda: 1 << 50)
    monkeypatch.setattr("miles_async.launcher.memory.parameters", lambda _: sizes_of(shape))
    flags = f"{ON_GPU} --max-tokens-per-gpu 16384 --hf-checkpoint m {flags}"
    notes = check_memory(made(tmp_path, flags=flags).settings, config_of(shape))
    assert [bool(says and says in note) for note in notes] == [True] * bool(says)


@pytest.mark.parametrize(
    ("shape", "flags", "says"),
    [
        ("30b", "", r"need 549\.\d GiB of 140\.0 GiB on each .* Set it to at least 4\."),
        ("4b", "--compile off --max-tokens-per-gpu 16384",
         r"max_tokens_per_gpu = 16384: its activations need about 99\.0 GiB beside 67\.4 GiB .* Lower --max-tokens-per-gpu to 11776"
         ", or set --gradient-checkpointing --gradient-checkpointing-layers 10"),
        ("30b", "--train-backend megatron --actor-num-gpus-per-node 4",
         r"tensor_model_parallel_size = 1: .* need 274\.\d GiB of 140\.0 GiB .* "
         r"Nearest: --tensor-model-parallel-size 4 --sequence-parallel on 4 GPUs\."),
        ("30b", "--train-backend megatron --actor-num-gpus-per-node 1",
         r"Nearest: --tensor-model-parallel-size 4 --sequence-parallel on 4 GPUs\."),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_the_nearest_that_does(shape: str, flags: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        trainer_of(tmp_path, shape, flags).check(H200)
    assert "\n" not in str(caught.value)


OFFLOADED = "--train-backend megatron --optimizer-cpu-offload --colocate --max-tokens-per-gpu 8192"


@pytest.mark.parametrize(
    ("flags", "free", "says"),
    [  # masters, moments and gradients 16 bytes a parameter; weights and gradients that leave the GPU 6; engines' weights 2
        (OFFLOADED, 101, ""),
        (OFFLOADED, 94, r"^optimizer_cpu_offload = true: the host needs 89\.9 GiB of memory and has 87\.5 GiB free"),
        (OFFLOADED, 94, r"\. Lower --optimizer-offload-fraction to 0\.8, or set --offload-train-target disk\.$"),
        (f"{OFFLOADED} --use-kl-loss --kl-loss-coef 0.1", 70, r"needs 104\.9 GiB .* 65\.2 GiB free \(the optimizer 59\.9 GiB, "
         r"other models 15\.0 GiB, what --offload-train moves 22\.5 GiB, the engines' weights 7\.5 GiB\)\. Train on more hosts"),
        (f"{OFFLOADED} --actor-num-gpus-per-node 2 --global-batch-size 32", 101, r"the optimizer 59\.9 GiB, what .* 44\.9 GiB"),
        (f"{OFFLOADED} --no-offload-train", 60, r"\. Lower --optimizer-offload-fraction to 0\.8\.$"),
        (f"{OFFLOADED} --no-offload-train", 80, ""),
        ("--colocate --max-tokens-per-gpu 8192", 70, r"^offload_train = true: .* Set --offload-train-target disk\.$"),
        ("--colocate --max-tokens-per-gpu 8192 --offload-train-target disk", 70, ""),
        ("--max-tokens-per-gpu 8192", 1, ""),
    ],
)  # fmt: skip
def test_what_leaves_the_gpu_has_room_on_the_host(flags: str, free: int, says: str, tmp_path: Path) -> None:
    """4B parameters; `free` in 10^9 bytes. A launch script of Miles was ended by the kernel in its first step for want of this."""
    trainer = trainer_of(tmp_path, "4b", flags)
    if not says:
        trainer.check_host(free * BILLION, H200)
        return
    with pytest.raises(SettingsError, match=says) as caught:
        trainer.check_host(free * BILLION, H200)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "free", "says"),
    [  # 4B parameters: weights 2 bytes, once; masters and moments 12, each rank its part, or the first ranks all
        ("", 57, ""),
        ("", 56, r"needs 52\.4 GiB of memory, 52\.4 GiB for it, and has 52\.2 GiB free\. .* \(--no-save-optim\)\.$"),
        ("--no-save-optim", 9, ""),
        ("--no-save", 1, ""),
        ("--actor-num-gpus-per-node 4 --global-batch-size 32", 57, ""),
        ("--actor-num-gpus-per-node 2 --actor-num-nodes 2 --train-master h:1 --global-batch-size 32", 33, ""),
        ("--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 32", 57, ""),
        ("--optimizer-cpu-offload", 120, "needs 112.4 GiB of memory, 52.4 GiB for it"),
    ],
)
def test_a_checkpoint_on_its_way_has_room_on_the_host(flags: str, free: int, says: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "4b", f"--train-backend megatron --max-tokens-per-gpu 8192 {flags}")
    told = "; ".join(trainer.notes_of_host(free * BILLION))
    assert re.search(says, told) if says else not told


def test_more_ranks_of_fsdp_have_room_wherever_they_are(tmp_path: Path) -> None:
    flags = "--actor-num-gpus-per-node 2 --actor-num-nodes 2 --train-master h:1 --max-tokens-per-gpu 64"
    trainer_of(tmp_path, "30b", flags).check(H200)
