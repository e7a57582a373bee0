"""Two real processes over gloo: rank 0 here, rank 1 a follower."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from actors.runtime.run import Refused
from actors.trainer.backend import BackendConfig, BatchRefused, StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.training.files import hash_tensors, read_index
from actors.trainer.training.ranked import FollowingRank, RankedBackend
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.state import CRITIC, CRITIC_OPTIMIZER, MODEL, OPTIMIZER, StateFiles
from actors.trainer.training.wire import Save, StepOrder, decode, encode
from bus.errors import CheckpointRefused
from bus.messages.samples import Picture
from scripts.bench import sights
from tests.trainer.conftest import STOP_DEADLINE_S, alone, backend_config, published, saved, served, state_of
from tests.trainer.own_core import FULL
from tests.trainer.test_pictures import batch_of, decoder_of
from tests.warm.launched import Warmed

Batch = Callable[..., StepBatch]
Config = Callable[..., BackendConfig]
Backend = Callable[..., TorchBackend]
pytestmark = pytest.mark.timeout(120)  # the first of them starts a process that loads torch


def gradients(backend: TorchBackend) -> dict[str, torch.Tensor]:
    """Gradients of the first step, read off Adam's first moment."""
    state = state_of(backend)
    moments = state[OPTIMIZER] | {f"{n}/critic": t for n, t in state[CRITIC_OPTIMIZER].items()}
    return {n.split("/", 1)[1]: t / 0.1 for n, t in moments.items() if n.startswith("exp_avg/")}


@pytest.mark.parametrize("model", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "objective",
    [
        {"entropy_coef": 0.01},
        {"reduction": "per_token", "use_kl_loss": True, "kl_loss_coef": 0.1},
        {"correction": "mis", "tis_batch_normalize": True, "proximal": "recompute", "normalize_advantages": True},
        {"reduction": "constant", "loss_constant": 13.0, "entropy_coef": 0.01},
        {"advantage_estimator": "ppo", "lambd": 0.9},
        {"advantage_estimator": "on_policy_distillation"},
    ],
    ids=["per_sample", "per_token_kl", "mis_whitened", "dr_grpo", "ppo", "distillation"],
)
def test_two_ranks_have_the_loss_and_gradient_of_one(
    model: str,
    objective: dict[str, object],
    pair: TorchBackend,
    make_config: Config,
    make_backend: Backend,
    make_batch: Batch,
    models: dict[str, Path],
    critic_dir: Path,
) -> None:
    batch = make_batch(5, temperatures=(1.0, 0.8))
    second = {"critic_load": str(critic_dir), "opd_teacher_load": str(models["qwen3_wide"])}
    settings = {"objective": objective, "clip_grad": 0.0, **second}
    pair.setup(make_config(model, **settings))
    one = alone(make_backend, model, **settings)
    a, b = pair.train_step(batch), one.train_step(batch)
    assert a.trained_tokens == b.trained_tokens and a.flags == b.flags
    assert sorted(i for ids in a.packing for i in ids) == list(range(16))
    timing = {n for n in b.metrics if n.endswith("_s")} | {"train/micro_batches"}
    for name in b.metrics.keys() - timing:
        assert a.metrics[name] == pytest.approx(b.metrics[name], abs=1e-5, rel=1e-5), name
    got, want = gradients(pair), gradients(one)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        assert (got[name] - grad).abs().max() <= 1e-5 * max(1.0, float(grad.abs().max())), name


def test_two_ranks_that_slept_train_as_if_they_had_not(
    pair: TorchBackend, make_config: Config, make_batch: Batch, tmp_path: Path
) -> None:
    """Shards leave both devices; without a GPU, for a file."""
    hashes = []
    for away in (True, False):
        pair.setup(make_config(offload_train_target="disk", offload_dir=str(tmp_path)))
        for step in range(2):
            pair.train_step(make_batch(step, step=step))
            if away:
                pair.sleep()
                with pytest.raises(RuntimeError, match="its memory is away"):
                    state_of(pair)
                pair.wake()
        hashes.append(pair.weights_hash())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("sizes", [{"max_tokens_per_gpu": 48}, {"use_dynamic_batch_size": False, "micro_batch_size": 2}])
def test_balancing_moves_work_and_changes_no_gradient(
    sizes: dict[str, Any], pair: TorchBackend, make_config: Config, make_backend: Backend, make_batch: Batch
) -> None:
    one = alone(make_backend, clip_grad=0.0, **sizes)
    one.train_step(make_batch(5))
    want, imbalance = gradients(one), {}
    for balance in ("none", "tokens", "flops"):
        pair.setup(make_config(clip_grad=0.0, balance=balance, **sizes))
        result = pair.train_step(make_batch(5))
        imbalance[balance] = result.metrics["train/rank_imbalance"]
        assert sorted(i for ids in result.packing for i in ids) == list(range(16))
        for name, grad in gradients(pair).items():
            torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-6)
    assert 1 <= imbalance["flops"] <= imbalance["none"] and imbalance["flops"] < 1.1


def test_a_dynamic_global_batch_is_a_multiple_of_the_ranks(
    pair: TorchBackend, make_config: Config, make_backend: Backend, make_batch: Batch
) -> None:
    """15 trajectories on two ranks: the youngest is left out; its reward still counts in its group's baseline."""
    settings = {"use_dynamic_global_batch_size": True, "clip_grad": 0.0, "objective": {"normalize_advantages": True}}
    pair.setup(make_config(**settings))
    result = pair.train_step(make_batch(6, groups=3, siblings=5))
    assert result.flags == {"trimmed": ["g2/4"]} and result.trained_tokens[14] == 0
    assert sorted(i for ids in result.packing for i in ids) == list(range(14))
    assert result.metrics["train/global_batch_size"] == 14 and result.metrics["train/updates"] == 1

    one, batch = alone(make_backend, **settings), make_batch(6, groups=3, siblings=5)
    batch.samples[14].train.remove = True
    alike = one.train_step(batch)
    assert alike.metrics["train/global_batch_size"] == 15 and "trimmed" not in alike.flags
    assert alike.metrics["train/trained_tokens"] == result.metrics["train/trained_tokens"]
    got, want = gradients(pair), gradients(one)
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad * 15 / 14, rtol=1e-4, atol=1e-6)


def test_two_ranks_keep_the_old_actors_of_one(
    pair: TorchBackend, make_config: Config, make_backend: Backend, make_batch: Batch, tmp_path: Path
) -> None:
    """Tokens of two former versions; then the same from a checkpoint of the two ranks, in one process."""
    settings = {"objective": {"keep_old_actor": True, "max_staleness": 2, "correction": "tis"}, "lr": 0.02}
    pair.setup(make_config(**settings))
    one = alone(make_backend, **settings)
    for step in (0, 1):
        for backend in (pair, one):
            backend.train_step(make_batch(step, step=step))
    saved(pair, tmp_path / "two")
    resumed = alone(make_backend, **settings)
    resumed.load(tmp_path / "two")
    batch = make_batch(7, step=2)
    for i, sample in enumerate(batch.samples):
        sample.train.spans = [(i % 3, sample.train.response_length)]
    want = one.train_step(batch)
    for backend in (pair, resumed):
        got = backend.train_step(batch)
        assert got.flags == want.flags == {}
        for name in ("train/tis", "train/tis_abs", "train/ppo_kl", "train/grad_norm"):
            assert got.metrics[name] == pytest.approx(want.metrics[name], abs=1e-4, rel=1e-4), name
    assert want.metrics["train/tis_abs"] > 0.01


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "adam"}, {"optimizer": "muon"}, {"objective": {"advantage_estimator": "ppo"}}],
    ids=["adam", "muon", "critic"],
)
def test_checkpoints_move_between_one_and_two_ranks(
    settings: dict[str, object],
    pair: TorchBackend,
    make_config: Config,
    make_backend: Backend,
    make_batch: Batch,
    tmp_path: Path,
) -> None:
    one = alone(make_backend, **settings)
    one.train_step(make_batch(0))
    saved(one, tmp_path / "one")
    pair.setup(make_config(seed=4, **settings))
    pair.load(tmp_path / "one")
    assert pair.weights_hash() == one.weights_hash()
    assert hash_tensors(state_of(pair)[OPTIMIZER]) == hash_tensors(state_of(one)[OPTIMIZER])
    assert hash_tensors(state_of(pair)[CRITIC_OPTIMIZER]) == hash_tensors(state_of(one)[CRITIC_OPTIMIZER])

    for k in (1, 2):
        pair.train_step(make_batch(k, step=k))
    saved(pair, tmp_path / "two")
    pair.train_step(make_batch(3, step=3))
    after = pair.weights_hash()
    pair.load(tmp_path / "two")
    pair.train_step(make_batch(3, step=3))
    assert pair.weights_hash() == after
    one.load(tmp_path / "two")
    one.train_step(make_batch(3, step=3))
    got, want = state_of(pair), state_of(one)
    for name, p in (want[MODEL] | want[CRITIC]).items():
        torch.testing.assert_close((got[MODEL] | got[CRITIC])[name], p, rtol=1e-4, atol=1e-5)


def test_what_rank_0_refuses_leaves_the_pair_at_work(
    pair: TorchBackend, make_config: Config, make_batch: Batch, tmp_path: Path
) -> None:
    pair.setup(make_config())
    with pytest.raises(CheckpointRefused):
        pair.load(tmp_path)
    batch = make_batch(0)
    for s in batch.samples:
        s.train.rollout_logp = None
    with pytest.raises(BatchRefused):
        pair.train_step(batch)
    assert pair.train_step(make_batch(0)).metrics["train/updates"] == 1
    manifest = published(pair, tmp_path / "v1")
    assert manifest.n_tensors == len(pair.core.shapes) and pair.weights_hash()


def test_a_fault_of_one_rank_is_heard_by_all_and_none_waits(
    pair: TorchBackend, make_config: Config, make_batch: Batch, models: dict[str, Path]
) -> None:
    """A user's function that fails on one sample; then a library that one host refuses. After both the two go on."""
    pair.setup(make_config(objective={"custom_loss_function_path": "tests.trainer.hook_samples.picky"}))
    before, spoke = pair.weights_hash(), set()
    batches = {seed: make_batch(seed) for seed in range(40)}
    n_long = {seed: sum(s.train.response_length == 13 for s in batch.samples) for seed, batch in batches.items()}
    for seed in [seed for seed, n in n_long.items() if n == 1][:6]:
        with pytest.raises(BatchRefused, match=r"13 tokens are too many") as refused:
            pair.train_step(batches[seed])
        text = str(refused.value)
        assert "custom_loss_function_path" in text and "\n" not in text and not refused.value.half_done
        spoke.add(text.split(" on ")[0])
    assert spoke == {"rank 0", "rank 1"} and pair.weights_hash() == before
    assert pair.train_step(batches[next(seed for seed, n in n_long.items() if n == 0)]).metrics["train/updates"] == 1

    backend = RankedBackend("tests.trainer.own_core.OneHostLacksIt")
    backend._ranks = pair._ranks
    with pytest.raises(Refused, match=r"rank 1 on .*: its licence is missing on this host"):
        backend.setup(make_config())
    with pytest.raises(Refused, match=r"rank 0 on .*: ref_load=nowhere: no such directory on this host"):
        pair.setup(make_config(ref_load="nowhere"))
    pair.setup(make_config())
    assert pair.train_step(make_batch(0)).metrics["train/updates"] == 1


def test_a_metric_that_one_rank_alone_names_is_added_up(pair: TorchBackend, make_config: Config, make_batch: Batch) -> None:
    pair.setup(make_config(objective={"correction": "none", "custom_loss_function_path": "tests.trainer.hook_samples.lopsided"}))
    batches = [make_batch(seed) for seed in range(40)]
    n_long = [sum(s.train.response_length == 13 for s in batch.samples) for batch in batches]
    for batch in [batch for batch, n in zip(batches, n_long, strict=True) if n == 1][:6]:
        assert pair.train_step(batch).metrics["train/thirteen"] > 0
    assert "train/thirteen" not in pair.train_step(batches[n_long.index(0)]).metrics


@pytest.fixture
def own(pair: TorchBackend, make_config: Config) -> RankedBackend:
    """The same two processes with a library of the user's own."""
    backend = RankedBackend("tests.trainer.own_core.OwnCore")
    backend._ranks = pair._ranks
    backend.setup(make_config())
    return backend


def test_what_each_rank_holds_is_exported_in_buckets(own: RankedBackend, make_backend: Backend, tmp_path: Path) -> None:
    """Left in the middle, the other rank is heard to the end, and the next command finds both."""
    want, limit = served(alone(make_backend)), 10_000
    buckets = own.export(limit)
    sizes = {sum(t.nbytes for _, t in next(buckets))}
    buckets.close()
    got: dict[str, torch.Tensor] = {}
    for bucket in own.export(limit):
        sizes.add(sum(t.nbytes for _, t in bucket))
        got |= {name: t.clone() for name, t in bucket}
    assert len(sizes) > 2 and max(sizes) <= limit
    assert got.keys() == want.keys() and all(torch.equal(got[name], t) for name, t in want.items())
    assert published(own, tmp_path / "v1").n_tensors == len(want)


def test_a_checkpoint_is_complete_when_every_rank_has_written_its_part(
    own: RankedBackend, make_batch: Batch, tmp_path: Path
) -> None:
    own.train_step(make_batch(0))
    (tmp_path / FULL).mkdir()
    failing = own.save(tmp_path / FULL)
    with pytest.raises(OSError, match="rank 1: No space left on device"):
        failing.write()
    (tmp_path / "c").mkdir()
    checkpoint, before = own.save(tmp_path / "c"), own.weights_hash()
    own.train_step(make_batch(1, step=1))  # beside the writing
    checkpoint.write()
    with pytest.raises(CheckpointRefused, match="never finished"):
        own.load(tmp_path / "c")
    checkpoint.finish()
    files = {"rank-0.safetensors", "rank-1.safetensors", "total"}
    assert read_index(tmp_path / "c").files.keys() == files == {p.name for p in (tmp_path / "c").iterdir()} - {"index.json"}
    assert int((tmp_path / "c" / "total").read_text()) == read_index(tmp_path / "c").n_params
    assert own.weights_hash() != before
    own.load(tmp_path / "c")
    assert own.weights_hash() == before


def test_rank_0_knows_the_processes_of_the_others(
    pair: TorchBackend, follower: Warmed | subprocess.Popen[bytes], make_config: Config
) -> None:
    pair.setup(make_config())
    assert pair.others == f"{follower.pid} on {socket.gethostname()}"


@pytest.mark.parametrize("library", ["tests.trainer.own_core.Nothing", "nowhere.Core"])
def test_a_library_that_is_not_there_is_refused_in_one_line(library: str, make_config: Config) -> None:
    with pytest.raises(Refused, match=library) as refusal:
        RankedBackend(library).setup(make_config())
    assert "\n" not in str(refusal.value)


def test_a_library_that_is_not_installed_is_refused_with_the_way_to_get_it(
    make_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "actors.trainer.megatron_backend.core", None)
    with pytest.raises(Refused, match=r"train backend megatron cannot be loaded: .*pip install 'miles-async\[megatron\]'"):
        RankedBackend("megatron").setup(make_config())


def test_a_step_travels_as_msgpack(make_batch: Batch) -> None:
    batch = make_batch(3, lr=1e-4)
    for sample in batch.samples[:2]:
        sample.pictures = ((Picture(blob="b", at=1, n=4, grid=(1, 4, 4)), b"png"),)
    sent = encode(StepOrder.of(batch))
    assert sent.count(b"png") == 1, "a picture that samples share"
    again = decode(sent)
    assert isinstance(again, StepOrder)
    back = again.arrived()
    assert (back.step, back.seed, back.knobs) == (batch.step, batch.seed, batch.knobs)
    np.testing.assert_equal(list(map(asdict, back.samples)), list(map(asdict, batch.samples)))
    assert encode(StepOrder.of(back)) == encode(StepOrder.of(batch))
    with pytest.raises(msgspec.MsgspecError):
        decode(b"\x80\x04K\x01.")


def test_a_follower_lets_go_of_its_copy_of_a_checkpoint_when_that_is_written(tmp_path: Path) -> None:
    """Of a sharded library it is all of a rank's weights and moments in host memory."""
    copies: list[weakref.ref[StateFiles]] = []

    class Library:
        def save(self, directory: Path) -> StateFiles:
            made = StateFiles(None, directory)
            copies.append(weakref.ref(made))
            return made

    FollowingRank(Ranks())._obey(cast("Any", Library()), Save(str(tmp_path)))
    for writing in [thread for thread in threading.enumerate() if thread.name == "checkpoint"]:
        writing.join(STOP_DEADLINE_S)
    assert copies[0]() is None


def test_two_ranks_have_the_gradient_of_one_where_only_some_samples_show_pictures(pair: TorchBackend, tmp_path: Path) -> None:
    sights.make_model(tmp_path)
    batch = batch_of(decoder_of(tmp_path))
    settings: dict[str, Any] = {"clip_grad": 0.0, "max_tokens_per_gpu": 16}
    pair.setup(backend_config(tmp_path, **settings))
    one = TorchBackend()
    with pytest.MonkeyPatch.context() as env:
        env.setenv("WORLD_SIZE", "1")
        one.setup(backend_config(tmp_path, **settings))
    a, b = pair.train_step(batch), one.train_step(batch)
    assert a.trained_tokens == b.trained_tokens and len(a.packing) > 2
    got, want = gradients(pair), gradients(one)
    assert any(name.startswith("visual.") for name in want) and got.keys() == want.keys()
    for name, grad in want.items():
        assert (got[name] - grad).abs().max() <= 1e-5 * max(1.0, float(grad.abs().max())), name
