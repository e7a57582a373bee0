"""Exported weights, snapshots, and what a damaged checkpoint is told."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from actors.generation.activation import check_manifest
from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.training.files import hash_tensors, read_tensors, write_tensors
from actors.trainer.training.state import MODEL, OPTIMIZER
from bus.errors import CheckpointRefused
from tests.declared import backend_of
from tests.trainer.conftest import files_of, published, saved, served, state_of

Backend = Callable[..., TorchBackend]
Batch = Callable[..., StepBatch]


@pytest.mark.parametrize(("model", "limit_bytes", "shards"), [("qwen3", 1 << 20, 1), ("llama", 20_000, 4)])
def test_exported_weights_are_a_model_directory(
    model: str, limit_bytes: int, shards: int, tmp_path: Path, make_backend: Backend, make_batch: Batch
) -> None:
    backend = make_backend(model)
    backend.train_step(make_batch(0))
    manifest = published(backend, tmp_path / "v1", limit_bytes)
    files = sorted((tmp_path / "v1").glob("*.safetensors"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v1"] and len(files) == shards
    assert manifest.checksum == xxhash.xxh3_128(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert manifest.n_bytes == sum(file.stat().st_size for file in files) and manifest.path == str(tmp_path / "v1")
    check_manifest(manifest)
    tensors = files_of(tmp_path / "v1")
    assert manifest.n_tensors == len(tensors) and ("lm_head.weight" in tensors) == (model == "llama")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    for name, p in backend.core.weights.params.items():
        assert torch.equal(loaded.state_dict()[name], p.detach())


def test_a_copy_is_not_touched_by_later_steps(tmp_path: Path, make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend()
    copied, snapshot, before = served(backend), state_of(backend), backend.weights_hash()
    backend.train_step(make_batch(0))
    assert hash_tensors(copied) == hash_tensors(snapshot[MODEL]) == before != backend.weights_hash()


def test_a_version_written_over_another_one_is_an_error(tmp_path: Path, make_backend: Backend) -> None:
    backend = make_backend()
    published(backend, tmp_path / "v1")
    with pytest.raises(OSError):
        published(backend, tmp_path / "v1")


def test_bf16_weights_are_exported_as_bf16(tmp_path: Path, make_backend: Backend) -> None:
    published(make_backend(model_dtype="bfloat16"), tmp_path / "v1")
    assert {t.dtype for t in load_file(tmp_path / "v1" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "v1" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"optimizer": "muon"},
        {"model_dtype": "bfloat16"},
        {"objective": {"use_kl_loss": True, "kl_loss_coef": 0.1}, "ref_update_interval": 2},
        {"num_steps_per_rollout": 2},
    ],
    ids=["adam", "muon", "bf16", "moving_reference", "two_steps"],
)
def test_restored_training_is_the_same_to_the_last_bit(
    extra: dict[str, object], tmp_path: Path, make_backend: Backend, make_batch: Batch
) -> None:
    backend = make_backend(**extra)
    for k in range(3):
        backend.train_step(make_batch(k, step=k))
    saved(backend, tmp_path / "c")
    for k in (3, 4):
        backend.train_step(make_batch(k, step=k))
    other = make_backend(**{**extra, "seed": 9})
    other.train_step(make_batch(77))
    other.load(tmp_path / "c")
    for k in (3, 4):
        other.train_step(make_batch(k, step=k))
    assert other.weights_hash() == backend.weights_hash()
    assert hash_tensors(state_of(other)[OPTIMIZER]) == hash_tensors(state_of(backend)[OPTIMIZER])


def test_a_snapshot_before_the_first_step_is_complete(tmp_path: Path, make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend()
    saved(backend, tmp_path / "c")
    backend.train_step(make_batch(0))
    after = backend.weights_hash()
    backend.load(tmp_path / "c")
    assert backend.core.optimizer.steps == 0 and not backend.core.optimizer.state()
    backend.train_step(make_batch(0))
    assert backend.weights_hash() == after


def test_a_checkpoint_is_taken_up_without_optimizer_or_random_state(
    tmp_path: Path, make_backend: Backend, make_batch: Batch
) -> None:
    """Left out when it was written, or when it is read: the next step is the first of a new optimizer on the same weights."""
    backend = make_backend()
    backend.train_step(make_batch(0))
    saved(backend, tmp_path / "whole")
    slim = make_backend(no_save_optim=True)
    slim.load(tmp_path / "whole")
    saved(slim, tmp_path / "slim")
    assert not (tmp_path / "slim" / "optimizer.safetensors").exists()
    with pytest.raises(CheckpointRefused, match="Add --no-load-optim"):
        backend.load(tmp_path / "slim")
    slim.load(tmp_path / "slim")  # as this run's own restarts must
    assert slim.core.optimizer.steps == 0

    ends = set()
    for name in ("whole", "slim"):
        other = make_backend()
        torch.manual_seed(5)
        drawn = torch.get_rng_state()
        other.load(tmp_path / name, ("optim", "rng"))
        assert torch.equal(torch.get_rng_state(), drawn) and not other.core.optimizer.state()
        other.train_step(make_batch(1, step=1))
        ends.add(other.weights_hash())
    backend.train_step(make_batch(1, step=1))
    assert len(ends) == 1 and backend.weights_hash() not in ends


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [Path.unlink, _cut, _flip], ids=["missing", "cut", "damaged"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "scalars.json", "index.json"])
def test_a_checkpoint_with_a_broken_file_is_refused_before_anything_changes(
    name: str, harm: Callable[[Path], None], tmp_path: Path, make_backend: Backend, make_batch: Batch
) -> None:
    backend = make_backend()
    backend.train_step(make_batch(0))
    saved(backend, tmp_path / "c")
    backend.train_step(make_batch(1, step=1))
    before = backend.weights_hash(), hash_tensors(state_of(backend)[OPTIMIZER]), backend.core.optimizer.steps
    harm(tmp_path / "c" / name)
    with pytest.raises(CheckpointRefused) as refusal:
        backend.load(tmp_path / "c")
    assert "\n" not in str(refusal.value) and str(tmp_path / "c") in str(refusal.value)
    assert before == (backend.weights_hash(), hash_tensors(state_of(backend)[OPTIMIZER]), backend.core.optimizer.steps)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path, make_backend: Backend, make_batch: Batch) -> None:
    backend = make_backend()
    backend.train_step(make_batch(0))
    saved(backend, tmp_path / "c")
    for other in (make_backend("qwen3_wide"), make_backend("llama"), make_backend(optimizer="muon")):
        before = other.weights_hash()
        with pytest.raises(CheckpointRefused):
            other.load(tmp_path / "c")
        assert other.weights_hash() == before
    with pytest.raises(CheckpointRefused, match="never finished"):
        backend.load(tmp_path / "nowhere")


def test_pickled_weights_and_unknown_models_are_refused(tmp_path: Path, models: dict[str, Path], make_backend: Backend) -> None:
    for name, change in (("pickled", {}), ("unknown", {"model_type": "gpt2"})):
        directory = tmp_path / name
        directory.mkdir()
        config = json.loads((models["qwen3"] / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | change))
        (directory / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": 1}))
        models[name] = directory
        with pytest.raises(Refused) as refusal:
            make_backend(name)
        assert "\n" not in str(refusal.value)
        del models[name]


def test_a_model_directory_without_all_tensors_is_refused(tmp_path: Path, models: dict[str, Path], make_backend: Backend) -> None:
    tensors = load_file(models["qwen3"] / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_bytes((models["qwen3"] / "config.json").read_bytes())
    write_tensors(tmp_path / "model.safetensors", tensors, durable=False)
    models["holes"] = tmp_path
    with pytest.raises(Refused, match=r"lacks 1 tensors.*up_proj"):
        make_backend("holes")
    del models["holes"]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
            lambda s: s != "__metadata__"
        ),
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
        ),
        max_size=5,
    )
)
def test_written_tensors_come_back_equal(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[list[int], torch.dtype]]
) -> None:
    directory = tmp_path_factory.mktemp("t")
    tensors = {name: (torch.rand(shape) * 100).to(dtype) for name, (shape, dtype) in shapes.items()}
    write_tensors(directory / "x.safetensors", tensors, durable=False)
    back = read_tensors(directory, "x.safetensors")
    assert back.keys() == tensors.keys() and hash_tensors(back) == hash_tensors(tensors)


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def with_tokenizer(models: dict[str, Path], tmp_path: Path) -> Path:
    """The qwen3 directory with a tokenizer of 40 words and a chat template."""
    directory = tmp_path / "model"
    shutil.copytree(models["qwen3"], directory)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1")
    made.chat_template = CHAT
    made.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checkpoint_and_an_export_are_models_that_can_be_talked_to(
    dtype: torch.dtype, with_tokenizer: Path, tmp_path: Path, make_batch: Batch
) -> None:
    backend = TorchBackend()
    backend.setup(backend_of(hf_checkpoint=str(with_tokenizer), model_dtype=str(dtype).removeprefix("torch."), device="cpu"))
    backend.train_step(make_batch(0))
    weights = served(backend)
    saved(backend, tmp_path / "c").write_hf(tmp_path / "hf" / "0")
    for directory, kind in ((tmp_path / "c", torch.float32), (tmp_path / "hf" / "0", dtype)):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert len(tokenizer) == 40 and tokenizer("w3 w7")["input_ids"] == [3, 7] and tokenizer.eos_token == "w1"
        assert tokenizer.apply_chat_template([{"role": "user", "content": "w5"}], tokenize=False) == "<user>w5"
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        assert model.dtype == kind
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items()), "what engines serve"
    assert load_file(tmp_path / "hf" / "0" / "model.safetensors").keys() == weights.keys()
    backend.load(tmp_path / "c")


def test_an_export_replaces_an_earlier_one_and_nothing_else(tmp_path: Path, make_backend: Backend, models: dict[str, Path]) -> None:
    checkpoint = saved(make_backend(), tmp_path / "c")
    for _ in range(2):
        checkpoint.write_hf(tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "hf"]
    before = sorted(p.name for p in models["llama"].iterdir())
    with pytest.raises(FileExistsError, match="no earlier export"):
        checkpoint.write_hf(models["llama"])
    assert sorted(p.name for p in models["llama"].iterdir()) == before
