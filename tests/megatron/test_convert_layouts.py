"""Weights on every layout: out of Hugging Face directories and torch_dist checkpoints, and back bit by bit. Four processes."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.runtime.run import Refused
from actors.trainer.megatron_backend import checkpoint, model, weights
from actors.trainer.megatron_backend.directory import read
from actors.trainer.megatron_backend.layout import RankLayout
from actors.trainer.megatron_backend.parallel import Groups
from actors.trainer.megatron_backend.torch_dist import TRACKER, check, check_whole, iteration
from actors.trainer.training.export import bucketed, gathered
from actors.trainer.training.ranks import Ranks
from miles_async.launcher.hooks import check_shards
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from tests.floors.tree import ROOT
from tests.megatron.models import DENSE, MODELS, make, tensors
from tests.megatron.pool import Pool

FAMILIES = ("qwen3", "glm4", "qwen3_moe", "deepseek_v3", "minimax_m2")
"""Tied; fused halves and norms; experts; latent attention; norms over all heads."""
CUT = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of all families; of those with experts too
    "tp2": (CUT, {"ep": 2, "etp": 1}),
    "tp2_pp2": ({**CUT, "pp": 2}, {"etp": 2}),
    "dp4": ({}, {"ep": 4}),
    "pp2_vpp2": ({"pp": 2, "vpp": 2}, {"ep": 2}),
}
pytestmark = pytest.mark.timeout(300)


def layout_of(name: str, family: str) -> RankLayout:
    common, sparse = LAYOUTS[name]
    return RankLayout(4, **common, **(sparse if "num_experts_per_tok" in MODELS[family][1] else {}))


def moved(name: str, family: str, models: str, source: str, target: str) -> tuple[set[str], list[str]]:
    """Load on this layout, out of a checkpoint or the Hugging Face directory; save. (tensors of this stage, those that differ)"""
    layout, directory = layout_of(name, family), Path(models) / family
    arch = read(directory)
    groups = Groups(layout)
    try:
        chunks = model.build(arch, layout, dtype=torch.float32)
        emptied(chunks)
        if source:
            assert checkpoint.load_sharded(chunks, arch, Path(source), with_extra=True) == {"step": 7}
        else:
            weights.load_hf(chunks, arch, directory)
        if target:
            Path(target).mkdir(parents=True, exist_ok=True)
            write = checkpoint.save_sharded(chunks, Path(target), extra={"step": 7})
            found = dict(weights.export_hf(chunks, arch))
            emptied(chunks)  # what is written was copied before
            write()
        else:
            found = dict(weights.export_hf(chunks, arch))
    finally:
        groups.close()
    wanted = tensors(directory)
    return set(found), [tensor for tensor in found if not torch.equal(found[tensor], wanted[tensor])]


def emptied(chunks: list[Any]) -> None:
    for chunk in chunks:
        for weight in chunk.parameters():
            torch.nn.init.constant_(weight, float("nan"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make(family, root / family)
    return root


@pytest.fixture(scope="module")
def saved(models: Path, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all models, written by two tensor-parallel ranks with sequence parallel, experts on two others."""
    target = tmp_path_factory.mktemp("saved")
    for family in FAMILIES:
        same(pool.run(4, moved, "tp2", family, str(models), "", str(target / family)), models / family)
    return target


def same(results: list[tuple[set[str], list[str]]], model: Path) -> None:
    assert [name for _, differ in results for name in differ] == []
    assert set().union(*(names for names, _ in results)) == tensors(model).keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layout", "from_checkpoint"), [("tp2_pp2", True), ("dp4", True), ("pp2_vpp2", True), ("pp2_vpp2", False)])
def test_weights_are_bit_equal_on_every_layout(
    layout: str, from_checkpoint: bool, family: str, models: Path, saved: Path, pool: Pool
) -> None:
    source = str(saved / family) if from_checkpoint else ""
    same(pool.run(4, moved, layout, family, str(models), source, ""), models / family)


class Living(TorchDispatchMode):
    """Bytes of the memory that was made inside and is held: `now`, and the `most` at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._held: dict[int, int] = {}  # tensors in each piece of memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            memory, size = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
            if memory in self._held or memory not in inside:  # else it is a view of a weight
                self.now += 0 if memory in self._held else size
                self._held[memory] = self._held.get(memory, 0) + 1
                self.most = max(self.most, self.now)
                weakref.finalize(t, self._gone, memory, size)
        return out

    def _gone(self, memory: int, size: int) -> None:
        self._held[memory] -= 1
        if not self._held[memory]:
            del self._held[memory]
            self.now -= size


def exported(directory: str, limit: int) -> tuple[int, int]:
    """(most bytes that an export holds beside the weights, bytes that it gave)"""
    layout = RankLayout(2, tp=2, sequence_parallel=True)
    groups = Groups(layout)
    try:
        arch = read(Path(directory))
        chunks = model.build(arch, layout, dtype=torch.float32)
        weights.load_hf(chunks, arch, directory)
        given = 0
        with Living() as living:
            for bucket in bucketed(weights.export_hf(chunks, arch), limit):
                given += sum(t.nbytes for _, t in bucket)
                del bucket
        return living.most, given
    finally:
        groups.close()


def test_an_export_holds_a_bucket_and_the_tensor_that_is_gathered(tmp_path: Path, pool: Pool) -> None:
    """The embedding is by far the largest: once whole, not once more for its parts or for its padding. Rank 1 holds no less."""
    config = transformers.Qwen3Config(**DENSE | {"vocab_size": 4_001}, head_dim=16, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    limit, embedding = 1 << 17, 4_002 * 64 * 4
    for most, given in pool.run(2, exported, str(tmp_path), limit):
        assert given > embedding and most <= limit + 1.2 * embedding, (most, given)


ROWS, WIDE = 64, 256


class Stage:
    """One pipeline stage of two: eight matrices that it makes as they are asked for."""

    exporters = (0, 1)
    device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(8):
            yield f"{self._rank}.{i}", torch.full((ROWS, WIDE), float(10 * self._rank + i), dtype=torch.bfloat16)


def sent(limit: int) -> tuple[int, list[tuple[str, float]]]:
    """(most bytes that sending to rank 0 holds here, what came there)"""
    rank = dist.get_rank()
    came: list[tuple[str, float]] = []
    with Living() as living:
        for bucket in gathered(cast("Any", Stage(rank)), Ranks(rank, 2), limit):
            assert all(t.shape == (ROWS, WIDE) and t.dtype == torch.bfloat16 for _, t in bucket)
            came += [(name, t.unique().item()) for name, t in bucket]
    return living.most, came


def test_a_stage_that_sends_holds_one_bucket_not_two(pool: Pool) -> None:
    matrix = ROWS * WIDE * 2
    (_, came), (most, nothing) = pool.run(2, sent, 4 * matrix)
    assert came == [(f"{rank}.{i}", 10.0 * rank + i) for rank in (0, 1) for i in range(8)] and nothing == []
    assert most <= 5.2 * matrix, "a bucket, and the matrix that came last"


def test_a_checkpoint_that_is_not_whole_or_of_another_model_is_refused(models: Path, saved: Path, tmp_path: Path) -> None:
    arch = read(models / "glm4")
    check(saved / "glm4", arch)
    with pytest.raises(Refused, match=r"another architecture than glm4 with 4 layers: .*with .*k_layernorm"):
        check(saved / "qwen3", arch)
    ours = shutil.copytree(saved / "glm4", tmp_path / "parent" / "iter_0000007")
    shard = sorted(ours.glob("*.distcp"))[0]
    held = shard.read_bytes()
    shard.write_bytes(held[: len(held) // 2])
    with pytest.raises(Refused, match=rf"not whole: shard {shard.name} has {len(held) // 2} bytes"):
        check(ours, arch)
    shard.unlink()
    with pytest.raises(Refused, match=rf"not whole: shard {shard.name} of \d+ is missing"):
        check(ours, arch)


def refused(family: str, models: str, source: str) -> str:
    with pytest.raises(Refused) as caught:
        moved("tp2_pp2", family, models, source, "")
    return str(caught.value)


def test_a_damaged_shard_is_refused_on_every_rank(models: Path, saved: Path, tmp_path: Path, pool: Pool) -> None:
    ours = shutil.copytree(saved / "glm4", tmp_path / "ck")
    for shard in ours.glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    for said in pool.run(4, refused, "glm4", str(models), str(ours)):
        assert said.startswith(f"{ours} can't be loaded: ") and "\n" not in said


def test_shards_that_are_missing_or_cut_are_refused_before_anything_starts(saved: Path, tmp_path: Path) -> None:
    """By a launcher, which loads no torch."""
    ours = shutil.copytree(saved / "glm4", tmp_path / "ck")
    read = "import sys; from pathlib import Path; from actors.trainer.megatron_backend.torch_dist import check_whole; "
    read += "check_whole(Path(sys.argv[1])); assert not {'torch', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", read, str(ours)], cwd=ROOT, check=True, timeout=60)
    shard = max(ours.glob("*.distcp"), key=lambda path: path.stat().st_size)
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    with pytest.raises(Refused, match=rf"{ours} is not whole: shard {shard.name} has {size - 1} bytes, its tensors end at {size}"):
        check_whole(ours)
    shard.unlink()
    with pytest.raises(Refused, match=rf"{ours} is not whole: shard {shard.name} of \d+ is missing"):
        check_whole(ours)
    settings = settings_from(
        hf_checkpoint="builtin:arithmetic", prompt_data="x.jsonl", num_rollout=3, rm_type="math", save=str(tmp_path / "new"),
        train_backend="megatron", ref_load=str(ours),
    )  # fmt: skip
    with pytest.raises(SettingsError, match=rf"ref_load = .*: {ours} is not whole: shard {shard.name} of \d+ is missing"):
        check_shards(settings)
    (ours / ".metadata").write_bytes(pickle.dumps(Shout()))
    with pytest.raises(Refused, match=r"asks for pathlib\.\w*\.?touch|asks for builtins.getattr"):
        check_whole(ours)
    assert not Path("carried-code").exists()


class Shout:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("carried-code"),)


def test_a_table_of_contents_that_carries_code_is_not_opened(models: Path, saved: Path, tmp_path: Path) -> None:
    ours = shutil.copytree(saved / "glm4", tmp_path / "ck")
    (ours / ".metadata").write_bytes(pickle.dumps(Shout()))
    with pytest.raises(Refused, match=r"asks for pathlib\.\w*\.?touch|asks for builtins.getattr"):
        check(ours, read(models / "glm4"))
    assert not Path("carried-code").exists()


def test_the_tracker_chooses_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"latest_checkpointed_iteration\.txt can't be read"):
        iteration(tmp_path)
    tracker = tmp_path / TRACKER
    for said, folder in (("7\n", "iter_0000007"), ("release", "release")):
        tracker.write_text(said)
        with pytest.raises(Refused, match=rf"{folder} is no torch_dist checkpoint"):
            iteration(tmp_path)
        shutil.copytree(saved / "glm4", tmp_path / folder)
        assert iteration(tmp_path) == tmp_path / folder
    assert iteration(tmp_path, 7) == tmp_path / "iter_0000007"
    assert iteration(tmp_path / "release") == tmp_path / "release"
    with pytest.raises(Refused, match=r"iter_0000008 is no torch_dist checkpoint: .* there are iter_0000007, release"):
        iteration(tmp_path, 8)
    tracker.write_text("iter_7")
    with pytest.raises(Refused, match="says 'iter_7'; it must name a step or say release"):
        iteration(tmp_path)
