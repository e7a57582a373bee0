"""Checkpoints and versions of the Megatron backend, through the front that the trainer calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from safetensors.torch import load_file

from actors.runtime.run import Refused
from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.megatron_backend.setup import _attention
from actors.trainer.training.ranked import RankedBackend
from actors.trainer.training.saving import RankedCheckpoint
from bus.errors import CheckpointOfAnother, CheckpointRefused
from tests.megatron.tiny import batch_of, config_of

pytestmark = pytest.mark.timeout(180)


def tensors(backend: RankedBackend, limit_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    return {name: t.clone() for bucket in backend.export(limit_bytes) for name, t in bucket}


@pytest.fixture
def backend() -> Iterator[RankedBackend]:
    made = RankedBackend("megatron")
    yield made
    made.close()


def steps(backend: RankedBackend, *numbers: int) -> list[float]:
    return [backend.train_step(batch_of(step)).metrics["train/loss"] for step in numbers]


def saved(backend: RankedBackend, directory: Path) -> RankedCheckpoint:
    directory.mkdir()
    checkpoint = backend.save(directory)
    checkpoint.write()
    checkpoint.finish()
    return checkpoint


def test_a_resumed_run_goes_on_to_the_last_bit(backend: RankedBackend, model_dirs: dict[str, str], tmp_path: Path) -> None:
    """Four steps are two, saved, loaded in a new backend, and two more; a damaged copy is refused and changes nothing."""
    settings = {"lr": 1e-3, "adam_eps": 1e-8}
    backend.setup(config_of(model_dirs["tied"], **settings))
    whole = steps(backend, 0, 1)
    written = saved(backend, tmp_path / "two")
    middle = backend.weights_hash()
    whole += steps(backend, 2, 3)
    end = backend.weights_hash()

    backend.setup(config_of(str(tmp_path / "two"), published_as=model_dirs["tied"], **settings))
    assert backend.weights_hash() == middle  # a start from torch_dist

    backend.setup(config_of(model_dirs["tied"], **settings))
    backend.load(tmp_path / "two")
    assert steps(backend, 2, 3) == whole[2:]
    assert backend.weights_hash() == end

    written.write_hf(tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in tensors(backend).items()}

    moving = {**settings, "ref_update_interval": 2}
    backend.setup(config_of(model_dirs["tied"], **moving))
    with pytest.raises(CheckpointRefused, match=r"it has no reference\. .* Set ref_update_interval as it was"):
        backend.load(tmp_path / "two")

    backend.setup(config_of(model_dirs["tied"], **settings))
    backend.load(tmp_path / "two")
    steps(backend, 2, 3)
    shard = next((tmp_path / "two").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointRefused, match="it is cut or overwritten"):
        backend.load(tmp_path / "two")
    assert backend.weights_hash() == end


def test_a_checkpoint_of_the_other_library_is_told_as_such(
    backend: RankedBackend, model_dirs: dict[str, str], tmp_path: Path
) -> None:
    """The same model, so neither its size nor its layers are what is wrong."""
    torch_backend = RankedBackend("torch")
    torch_backend.setup(config_of(model_dirs["tied"], library="torch"))
    saved(torch_backend, tmp_path / "torch")
    backend.setup(config_of(model_dirs["tied"]))
    saved(backend, tmp_path / "megatron")
    with pytest.raises(CheckpointOfAnother, match=r"the torch backend wrote it.*Set --train-backend torch"):
        backend.load(tmp_path / "torch")
    with pytest.raises(CheckpointOfAnother, match=r"the Megatron backend wrote it.*Set --train-backend megatron"):
        torch_backend.load(tmp_path / "megatron")
    torch_backend.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_taken_up_without_its_optimizer(
    dtype: str, backend: RankedBackend, model_dirs: dict[str, str], tmp_path: Path
) -> None:
    """Left out when it was written, or when it is read: the same weights, and the first step of a new optimizer."""
    settings: dict[str, Any] = {"lr": 1e-2, "adam_eps": 1e-8, "model_dtype": dtype}
    backend.setup(config_of(model_dirs["tied"], **settings))
    steps(backend, 0, 1)
    saved(backend, tmp_path / "whole")
    end = backend.weights_hash()
    backend.setup(config_of(model_dirs["tied"], no_save_optim=True, **settings))
    backend.load(tmp_path / "whole", ("optim",))
    assert backend.weights_hash() == end
    saved(backend, tmp_path / "slim")
    assert steps(backend, 2) and (after := backend.weights_hash()) != end
    backend.load(tmp_path / "slim")  # as this run's own restarts must
    assert backend.weights_hash() == end
    steps(backend, 2)
    assert backend.weights_hash() == after

    backend.setup(config_of(model_dirs["tied"], **settings))
    with pytest.raises(CheckpointRefused, match="Add --no-load-optim"):
        backend.load(tmp_path / "slim")


def test_a_version_is_the_model_and_memory_comes_back(backend: RankedBackend, model_dirs: dict[str, str], tmp_path: Path) -> None:
    backend.setup(config_of(model_dirs["apart"], offload_train_target="disk", offload_dir=str(tmp_path)))
    steps(backend, 0)
    before = backend.weights_hash()
    backend.sleep()
    with pytest.raises(RuntimeError, match="its memory is away"):
        backend.weights_hash()
    backend.wake()
    assert backend.weights_hash() == before
    small, large = tensors(backend, 1 << 12), tensors(backend)
    assert "lm_head.weight" in large and small.keys() == large.keys()
    assert all(torch.equal(t, large[name]) for name, t in small.items())
    assert "config.json" in backend.core.beside()


def note_init(core: MegatronCore) -> None:
    SEEN.append(("init", len(core.model.chunks)))


def note_pass(core: MegatronCore) -> None:
    SEEN.append(("pass", core.updates))


def note_step(core: MegatronCore) -> None:
    SEEN.append(("step", core.updates))


SEEN: list[tuple[str, int]] = []


def miles_init(args: Any) -> None:
    MILES.append(("init", args.hidden_size, args.tensor_model_parallel_size, args.eps_clip))


def miles_pass(args: Any, model: list[Any], store_prefix: str) -> None:
    MILES.append(("pass", store_prefix, sum(p.numel() for p in model[0].parameters()) > 1000))


def miles_step(args: Any, rollout_id: int, step_id: int, model: list[Any], optimizer: Any, opt_param_scheduler: Any) -> None:
    MILES.append(("step", rollout_id, step_id, optimizer.param_groups[0]["lr"]))


MILES: list[tuple[Any, ...]] = []


def provided(
    pre_process: bool, post_process: bool, config: Any, layers: Any, vocab_size: int, vp_stage: int | None = None
) -> GPTModel:
    PROVIDED.append(vocab_size)
    return GPTModel(
        config, layers, vocab_size, 64, pre_process, post_process, share_embeddings_and_output_weights=True,
        position_embedding_type="rope", vp_stage=vp_stage,
    )  # fmt: skip


PROVIDED: list[int] = []


def test_functions_written_for_miles_are_called_as_miles_calls_them(backend: RankedBackend, model_dirs: dict[str, str]) -> None:
    MILES.clear()
    hooks = {f"custom_megatron_{n}_path": f"{__name__}.miles_{f}"
             for n, f in (("init", "init"), ("before_log_prob_hook", "pass"), ("before_train_step_hook", "step"))}  # fmt: skip
    backend.setup(config_of(model_dirs["tied"], own=hooks, num_steps_per_rollout=2))
    backend.train_step(batch_of(3))
    assert MILES[0] == ("init", 32, 1, 0.2)
    assert MILES[1:] == [("pass", "", True), ("pass", "ref_", True), ("step", 3, 0, 1.0), ("step", 3, 1, 1.0)]


def test_a_model_of_the_users_is_trained_as_ours(backend: RankedBackend, model_dirs: dict[str, str]) -> None:
    PROVIDED.clear()
    backend.setup(config_of(model_dirs["tied"]))
    want = steps(backend, 0, 1)
    backend.setup(config_of(model_dirs["tied"], own={"custom_model_provider_path": f"{__name__}.provided"}))
    assert steps(backend, 0, 1) == want and PROVIDED == [45]


def test_tokens_of_former_weights_are_scored_under_them_and_hooks_are_called(
    backend: RankedBackend, model_dirs: dict[str, str]
) -> None:
    """Two former versions in one batch, as the torch backend has it; the user's functions in their places."""
    settings: dict[str, Any] = {"lr": 0.02, "adam_eps": 1e-5}
    settings["objective"] = {"keep_old_actor": True, "max_staleness": 2, "use_kl_loss": False}
    hooks = {f"custom_megatron_{n}_path": f"{__name__}.note_{f}"
             for n, f in (("init", "init"), ("before_log_prob_hook", "pass"), ("before_train_step_hook", "step"))}  # fmt: skip
    torch_backend = RankedBackend("torch")
    torch_backend.setup(config_of(model_dirs["tied"], library="torch", **settings))
    SEEN.clear()
    backend.setup(config_of(model_dirs["tied"], own=hooks, **settings))
    for step in range(3):
        batches = [batch_of(step) for _ in range(2)]
        for batch in batches if step == 2 else ():
            for k, sample in enumerate(batch.samples):
                sample.train.spans = [(k % 3, sample.train.response_length)]
        got, want = backend.train_step(batches[0]), torch_backend.train_step(batches[1])
        assert got.flags == want.flags == {}
        for name in ("train/tis", "train/tis_abs", "train/grad_norm"):
            assert got.metrics[name] == pytest.approx(want.metrics[name], rel=1e-3, abs=1e-5), (step, name)
    assert [("init", 1), ("pass", 0), ("step", 0), ("pass", 1), ("step", 1), *[("pass", 2)] * 3, ("step", 2)] == SEEN
    torch_backend.close()


def test_flash_attention_that_is_not_installed_is_no_kernel_of_transformer_engines(caplog: pytest.LogCaptureFixture) -> None:
    """A launch script's --attention-backend flash goes on with the kernels that are there, and says so."""
    assert importlib.util.find_spec("flash_attn") is None, "this test is for a host without it"
    assert _attention(AttnBackend.flash) == {"attention_backend": AttnBackend.auto}
    assert "flash-attn is not installed" in caplog.text
    assert _attention(AttnBackend.fused) == _attention(None) == {}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"own": {"tensor_model_parallel_size": 3}}, "tensor_model_parallel_size=3: 4 attention heads"),
        ({"own": {"megatron": {"recompute_granulation": "full"}}}, "recompute_granulation: megatron-core has no such field"),
        ({"own": {"megatron": {"use_precision_aware_optimizer": True}}}, "it needs a GPU and Transformer Engine"),
        ({"own": {"megatron": {"store_param_remainders": True}}}, "no checkpoint of such masters can be read again"),
        ({"own": {"megatron": {"optimizer_cpu_offload": True}}}, "add --use-precision-aware-optimizer"),
        ({"own": {"megatron": {"attention_backend": "flesh"}}}, "attention_backend=flesh: it is one of flash, fused, unfused"),
        ({"own": {"megatron": {"exp_avg_dtype": "half"}}}, "exp_avg_dtype=half: it is one of fp32, fp16, bf16, fp8"),
        ({"own": {"megatron": {"recompute_granularity": "all"}}}, "megatron-core refuses these settings"),
        ({"own": {"megatron": {"layernorm_zero_centered_gamma": True}}}, "--layernorm-zero-centered-gamma is given"),
        ({"own": {"megatron": {"moe_router_fusion": True}}}, "moe_router_fusion: it needs a GPU and Transformer Engine"),
        ({"own": {"megatron": {"transformer_impl": "transformer_engine"}}}, "transformer_impl=transformer_engine: it needs a GPU"),
        ({"own": {"megatron": {"overlap_param_gather": True}}}, "overlap_param_gather: .* add --use-distributed-optimizer"),
        ({"own": {"megatron": {"use_kitchen": True}}}, r"refuses these settings: assert .*\.py, line"),
        ({"own": {"custom_megatron_init_path": "no.such.function"}}, "no.such.function"),
        ({"own": {"custom_model_provider_path": "no.such.provider"}}, "no.such.provider"),
        ({"own": {"spec": ("no.such", "layers")}}, "no.such.layers"),
        ({"optimizer": "muon"}, "optimizer=muon: the Megatron backend has adam"),
        ({"own": {"megatron": {"num_layers": 3}}}, "--num-layers 3 is given, config.json says 4"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    settings: dict[str, Any], said: str, backend: RankedBackend, model_dirs: dict[str, str]
) -> None:
    with pytest.raises(Refused, match=said):
        backend.setup(config_of(model_dirs["tied"], **settings))
