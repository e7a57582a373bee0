"""Checkpoints of grouped experts: written and read on every layout, and interchangeable with experts one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.trainer.megatron_backend import checkpoint, model, weights
from actors.trainer.megatron_backend.convert import megatron_to_hf
from actors.trainer.megatron_backend.directory import read
from actors.trainer.megatron_backend.grouped import GroupedExperts
from actors.trainer.megatron_backend.layout import RankLayout
from actors.trainer.megatron_backend.parallel import Groups
from tests.megatron.grouped_layers import SPEC
from tests.megatron.models import make, tensors
from tests.megatron.pool import Pool
from tests.megatron.tiny import trained

pytestmark = pytest.mark.timeout(180)
LAYOUTS = {
    "one": RankLayout(1),
    "ep2": RankLayout(2, ep=2),
    "tp2_etp2": RankLayout(2, tp=2, sequence_parallel=True, etp=2),
    "pp2": RankLayout(2, pp=2),
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    make("qwen3_moe", directory)
    return directory


def moved(layout: str, path: str, source: str, target: str, spec: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Load out of a checkpoint or the Hugging Face directory, and save; this stage's weights."""
    groups = Groups(LAYOUTS[layout])
    try:
        arch = read(Path(path))
        chunks = model.build(arch, LAYOUTS[layout], dtype=torch.float32, spec=spec)
        assert any(isinstance(m, GroupedExperts) for m in chunks[0].modules()) == bool(spec)
        if source:
            checkpoint.load_sharded(chunks, arch, Path(source))
        else:
            weights.load_hf(chunks, arch, path)
        if target:
            checkpoint.save_sharded(chunks, Path(target))()
        return {name: t.clone() for name, t in weights.export_hf(chunks, arch)}
    finally:
        groups.close()


def same(found: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    assert set().union(*found) == wanted.keys()
    assert [name for one in found for name, t in one.items() if not torch.equal(t, wanted[name])] == []


@pytest.mark.parametrize(("written", "loaded"), [("one", "ep2"), ("ep2", "one"), ("tp2_etp2", "pp2")])
def test_a_checkpoint_of_grouped_experts_is_read_by_any_layout_and_by_experts_one_by_one(
    written: str, loaded: str, moe: Path, tmp_path: Path, pool: Pool
) -> None:
    wanted, source = tensors(moe), tmp_path / "saved"
    source.mkdir()
    same(pool.run(LAYOUTS[written].world, moved, written, str(moe), "", str(source), SPEC), wanted)
    for spec in (SPEC, ()):
        same(pool.run(LAYOUTS[loaded].world, moved, loaded, str(moe), str(source), "", spec), wanted)


def test_grouped_experts_read_a_checkpoint_of_experts_one_by_one(moe: Path, tmp_path: Path, pool: Pool) -> None:
    same(pool.run(2, moved, "ep2", str(moe), "", str(tmp_path), ()), tensors(moe))
    same(pool.run(1, moved, "one", str(moe), str(tmp_path), "", SPEC), tensors(moe))


def first_two(path: str, settings: dict[str, Any], end: str) -> Any:
    return trained(path, 2, settings, end=end)


def last_two(path: str, settings: dict[str, Any], begin: str) -> Any:
    return trained(path, 2, settings, begin=begin, first=2)


def all_four(path: str, settings: dict[str, Any]) -> Any:
    return trained(path, 4, settings)


def test_training_of_grouped_experts_goes_on_to_the_last_bit(moe: Path, tmp_path: Path, pool: Pool) -> None:
    """Moments too; and the checkpoint converts to the weights that were saved."""
    settings = {"lr": 1e-3, "adam_eps": 1e-8, "own": {"spec": SPEC}}
    saved = tmp_path / "saved"
    saved.mkdir()
    [(whole, end)] = pool.run(1, all_four, str(moe), settings)
    [(first, middle)] = pool.run(1, first_two, str(moe), settings, str(saved))
    [(rest, again)] = pool.run(1, last_two, str(moe), settings, str(saved))
    assert first + rest == whole
    same([again], end)
    megatron_to_hf(saved, tmp_path / "hf", lambda _: None, hf=moe)
    same([load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")], middle)
