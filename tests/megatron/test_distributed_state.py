"""The distributed optimizer's state in a checkpoint: each rank's own part, as megatron-core would have it of all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.megatron_backend.distributed_state import _pieces, boxes
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.step import train_batch
from tests.megatron.models import make
from tests.megatron.pool import Pool
from tests.megatron.test_train_layouts import interrupted, one_rank, resumed, saving
from tests.megatron.tiny import NUMBERS, SHAPE, batch_of, config_of

pytestmark = pytest.mark.timeout(180)


DISTRIBUTED = {"megatron": {"use_distributed_optimizer": True}}
CUT: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "dp3": (3, {}),
    "tp2_sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2_dp2": (4, {"pipeline_model_parallel_size": 2}),
}


CHANGES = [("dp3", "dp2"), ("dp2", "tp2_sp"), ("tp2_sp", "dp3"), ("pp2_dp2", "dp1"), ("dp1", "pp2_dp2")]


@pytest.mark.parametrize(("begins", "goes_on"), CHANGES)
def test_what_data_parallel_ranks_hold_of_the_optimizer_goes_on_under_any_layout(
    begins: str, goes_on: str, model_dirs: dict[str, str], pool: Pool, tmp_path: Path
) -> None:
    """Each rank writes its part, and reads what will be its part."""
    path, directory = model_dirs["apart"], tmp_path / begins
    directory.mkdir()
    want, after = one_rank(pool, path)
    ranks, own = CUT[begins]
    pool.run(ranks, saving, path, {"own": {**own, **DISTRIBUTED}}, str(directory))
    ranks, own = CUT[goes_on]
    for got, weights in pool.run(ranks, resumed, path, {"own": {**own, **DISTRIBUTED}}, str(directory)):
        for name in NUMBERS:
            assert got[0][name] == pytest.approx(want[1][name], rel=1e-4, abs=1e-6), name
        for name, weight in weights.items():
            torch.testing.assert_close(weight, after[name], rtol=1e-4, atol=1e-5, msg=name)


def gathered(path: str, settings: dict[str, Any], mine: str, theirs: str) -> None:
    """A trained optimizer's state in two checkpoints: as each rank's own part, and as megatron-core gathers it."""
    torch.set_num_threads(1)
    core = MegatronCore(config_of(path, **settings), Ranks(dist.get_rank(), dist.get_world_size()))
    try:
        train_batch(core, batch_of(0))
        core.save(Path(mine)).write()
        for part in core.update.optimizer.chained_optimizers:
            del part.sharded_param_state_fully_reshardable
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("actors.trainer.megatron_backend.checkpoint.cut", lambda optimizer: False)
            core.save(Path(theirs)).write()
    finally:
        core.close()


@pytest.mark.parametrize("layout", ["dp3", "tp2_sp", "dp4_ep2"])
def test_the_checkpoint_is_what_megatron_core_would_write(layout: str, pool: Pool, tmp_path: Path) -> None:
    """Names, shapes and each element once, so that either reads what the other wrote. Rows of odd lengths: ranks end within one."""
    ranks, own = {**CUT, "dp4_ep2": (4, {"expert_model_parallel_size": 2})}[layout]
    path = str(tmp_path / "model")
    if "ep2" in layout:
        make("qwen3_moe", Path(path))
    else:
        odd = Qwen3Config(**{**SHAPE, "hidden_size": 36, "intermediate_size": 50}, tie_word_embeddings=True)
        Qwen3ForCausalLM(odd).save_pretrained(path)
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
    pool.run(ranks, gathered, path, {"own": {**own, **DISTRIBUTED}}, str(tmp_path / "mine"), str(tmp_path / "theirs"))
    held = []
    for name in ("mine", "theirs"):
        state: dict[str, Any] = {}
        _load_state_dict(
            state, storage_reader=FileSystemReader(tmp_path / name), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
        held.append({k: v for k, v in flatten_state_dict(state)[0].items() if k.startswith("optimizer.state.")})
    assert held[0].keys() == held[1].keys() and len(held[0]) > 20
    table = FileSystemReader(tmp_path / "mine").read_metadata().state_dict_metadata
    for key in held[0]:
        assert sum(math.prod(chunk.sizes) for chunk in table[key].chunks) == math.prod(table[key].size), f"{key}: elements twice"
    assert any(chunk.sizes[-1] < table[key].size[-1] for key in held[0] for chunk in table[key].chunks) or "ep2" in layout
    for key, want in held[1].items():
        assert want.abs().sum() > 0
        torch.testing.assert_close(held[0][key], want, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma2", "minimax_m2"])
def test_optimizer_and_moving_reference_of_a_family_go_on(family: str, pool: Pool, tmp_path: Path) -> None:
    """Latent attention and routers with biases; tied and capped; experts without any dense layer, what can be compiled."""
    make(family, tmp_path / "model")
    settings = {"lr": 1e-2, "adam_eps": 1e-5, "ref_update_interval": 2, "own": DISTRIBUTED}
    results = []
    for name, broken in (("whole", False), ("broken", True)):
        (tmp_path / name).mkdir()
        compiled = family == "minimax_m2"
        [found] = pool.run(1, interrupted, str(tmp_path / "model"), settings, str(tmp_path / name), broken, compiled=compiled)
        results.append(found)
    for whole, gone_on in zip(*results, strict=True):
        for name in NUMBERS:
            assert gone_on[f"train/{name}"] == pytest.approx(whole[f"train/{name}"], rel=1e-5, abs=1e-7), name


def test_elements_that_do_not_lie_together_are_refused() -> None:
    def turned(key: str, weight: torch.Tensor, replica: Any, _: Any) -> dict[str, ShardedTensor]:
        return {key: ShardedTensor.from_rank_offsets(key, weight.T, replica_id=replica)}

    factory = ShardedTensorFactory("experts.weight", torch.zeros(4, 6), turned, dict, (0, 0, 0))
    with pytest.raises(Refused, match=r"^experts\.weight is made of elements .* add --no-save-optim"):
        list(_pieces(factory, 3, 9))


def refused(path: str, settings: dict[str, Any], begin: str) -> str:
    core = MegatronCore(config_of(path, **settings), Ranks(dist.get_rank(), dist.get_world_size()))
    try:
        with pytest.raises(Refused) as told:
            core.load(Path(begin), None)
        return str(told.value)
    finally:
        core.close()


def test_an_optimizer_of_the_other_kind_is_refused_in_one_line(model_dirs: dict[str, str], pool: Pool, tmp_path: Path) -> None:
    path = model_dirs["tied"]
    for kind, other, said in (({}, DISTRIBUTED, "leave out"), (DISTRIBUTED, {}, "set")):
        directory = tmp_path / said.replace(" ", "_")
        directory.mkdir()
        pool.run(1, saving, path, {"own": kind}, str(directory))
        [text] = pool.run(1, refused, path, {"own": other}, str(directory))
        assert f"distributed; {said} --use-distributed-optimizer, or begin the optimizer anew with --no-load-optim" in text


@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_boxes_hold_each_element_of_the_range_once_and_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.numel() - 1))
    stop = data.draw(st.integers(start + 1, whole.numel()))
    found = []
    for offsets, sizes in boxes(tuple(shape), start, stop):
        box = whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        assert box.shape == torch.Size(sizes)
        found += box.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(boxes(tuple(shape), start, stop))) <= 2 * len(shape) + 1
