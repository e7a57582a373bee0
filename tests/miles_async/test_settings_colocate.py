"""Engines on the trainer's GPUs: what follows from --colocate, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_async.launcher.place import Place
from miles_async.launcher.plan import room_specs
from tests.miles_async.test_settings_serving import made, refusal

PLACE = Place(run_dir="/r", model_dir="/m", weights_dir="/w", blob_dir="/b", stop_token_ids=(), num_rollout=3, fingerprint="f")


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
    turns: Any = specs["trainer"]["turns"]
    assert (turns["workers"], turns["offload"], turns["deadline_s"], turns["lends"]) == (workers, True, 720.0, False)
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


def test_engines_see_the_gpu_whose_memory_they_map(tmp_path: Path) -> None:
    specs: Any = rooms(tmp_path, "--colocate --engine sglang --actor-num-gpus-per-node 2 --rollout-num-gpus 2")
    assert [(specs[name]["gpus"], specs[name]["maps"]) for name in ("generation-0", "generation-1")] == [([0], [0]), ([1], [0])]
    specs = rooms(tmp_path, "--engine sglang --update-weight-transport nccl")
    assert specs["generation-0"]["maps"] == []


@pytest.mark.parametrize(("offload", "fraction"), [("", 0.4), ("--offload-train", 0.7)])
def test_lent_gpus_have_engines_beside_those_of_the_run(tmp_path: Path, offload: str, fraction: float) -> None:
    flags = "--lend-trainer-gpus --engine sglang --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --sglang-mem-fraction-static 0.8"
    specs: Any = rooms(tmp_path, f"{flags} --lend-return-s 8 {offload}")
    lent = ["lent-0", "lent-1"]
    turns = specs["trainer"]["turns"]
    assert (turns["workers"], turns["offload"], turns["lends"], turns["return_s"]) == (lent, True, True, 8.0)
    assert specs["trainer"]["backend"]["offload_train_target"] == ("cpu" if offload else "stay")
    assert specs["publisher"]["lent"] == lent and specs["trainer"]["courier"]["keep_copy"] is bool(offload)
    assert [specs[name]["gpus"] for name in (*lent, "generation-0", "generation-1")] == [[0], [1], [2], [3]]
    for name in lent:
        assert (specs[name]["lent_s"], specs[name]["router_url"]) == (8.0, "")
        assert specs[name]["gives_back"] == ["kv_cache", "cuda_graph", "weights"]
        saves = {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
        assert specs[name]["server_args"] == {"mem-fraction-static": fraction} | saves
    assert specs["generation-0"]["gives_back"] == [] and specs["generation-0"]["lent_s"] == 0.0
    assert specs["generation-0"]["server_args"] == {"mem-fraction-static": "0.8"}


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
        ("--lend-trainer-gpus --colocate", "on the trainer's GPUs in any case (colocate is set)"),
        ("--lend-trainer-gpus --debug-rollout-only", "there is no trainer"),
        ("--lend-trainer-gpus --load-debug-rollout-data x/{rollout_id}", "there is no rollout"),
        ("--lend-trainer-gpus --launcher ray --bus-url redis://a:1", "Set --launcher local"),
        ("--lend-trainer-gpus --num-generation-workers 0", "whose only engines are lent would wait for ever"),
        ("--lend-trainer-gpus --engine sglang --rollout-num-gpus-per-engine 2", "with GPUs for at least one engine"),
        ("--lend-trainer-gpus --offload-rollout", "offload_rollout = true: trainer and engines have GPUs of their own"),
        (
            "--lend-trainer-gpus --offload-train --update-weight-transport nccl --no-update-weight-copy",
            "may still take a version from the weights themselves",
        ),
    ],
)
def test_what_cannot_be(tmp_path: Path, flags: str, says: str) -> None:
    assert says in refusal(tmp_path, flags=flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--rollout-num-gpus-per-engine 12", "an engine has GPUs of one node of the trainer"),
        ("--rollout-num-gpus-per-engine 24", "over 3 nodes has whole ones, and the trainer has 4 of 8 GPUs. Set it to 8 times"),
        ("--rollout-num-gpus-per-engine 8 --sglang-nnodes 2", "over 2 nodes has whole ones"),
    ],
)
def test_engines_over_the_trainers_nodes_have_equal_parts_of_them(tmp_path: Path, flags: str, says: str) -> None:
    nodes = "--colocate --engine sglang --launcher ray --actor-num-nodes 4 --actor-num-gpus-per-node 8"
    said = refusal(tmp_path, flags=f"{nodes} {flags}")
    assert says in said and "\n" not in said
