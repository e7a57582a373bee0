"""Training on prompts with pictures: the same log-probs as the engine's, gradients for the tower, weights that engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.generation.engines.embedded.batch import Batch
from actors.generation.engines.embedded.config import read_config
from actors.generation.engines.embedded.model import Decoder
from actors.generation.engines.embedded.pictures import Eyes
from actors.generation.engines.embedded.request import Request
from actors.generation.engines.embedded.weights import load_tensors, load_weights
from actors.runtime.run import Refused
from actors.trainer.backend import BatchRefused, BatchSample, StepBatch
from actors.trainer.objective import TrainSample
from actors.trainer.torch_backend import TorchBackend
from bus.messages.samples import Picture
from scripts.bench import sights
from tests.trainer.conftest import backend_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sighted")
    sights.make_model(path)
    return path


def batch_of(decoder: Decoder, *, extra: int = 0) -> StepBatch:
    """Two samples each of a prompt with one picture, with two and with none, made by the engine."""
    eyes = decoder.eyes
    assert eyes is not None
    words = {word: i for i, word in enumerate(sights.WORDS)}
    samples: list[BatchSample] = []
    shown: list[list[bytes]] = [[sights.square("red")], [sights.square("blue"), sights.square("green", 140, 84)], []]
    for g, pictures in enumerate(shown):
        ids = [words["user\n"]]
        for _ in pictures:
            ids += [words["<|vision_start|>"], sights.IMAGE, words["<|vision_end|>"]]
        ids, places = eyes.vision.laid_out([*ids, words[" which"], words[" colour"]], [eyes.vision.pixels(p)[1] for p in pictures])
        view = eyes.view(ids, list(map(sights.data_url, pictures))) if pictures else None
        assert (view.places if view else ()) == tuple(places)
        requests = [Request(rid=f"g{g}/{i}", prompt=ids, limit=5 + i + extra, seed=i, view=view) for i in range(2)]
        batch = Batch(decoder, 4, 4096)
        with torch.inference_mode():
            batch.prefill(list(requests))
            while batch.requests:
                batch.decode()
        named = [Picture(at=p.at, n=p.n, grid=p.grid, blob=f"{g}.{k}") for k, p in enumerate(places)]
        for i, request in enumerate(requests):
            n = len(request.tokens)
            train = TrainSample(
                sample_id=request.rid, group=f"g{g}", response_length=n, reward=float(i), prompt_length=len(ids),
                loss_mask=np.ones(n, np.uint8), rollout_logp=np.array([pair[0] for pair in request.pairs], np.float32),
                spans=[(0, n)],
            )  # fmt: skip
            ids32, tokens = np.array(ids, np.int32), np.array(request.tokens, np.int32)
            given = tuple(zip(named, pictures, strict=True))
            samples.append(BatchSample(ids32, tokens, 1.0, train, pictures=given))
    return StepBatch(samples, step=0, seed=0)


def decoder_of(folder: Path) -> Decoder:
    decoder = Decoder(read_config(folder), Eyes(folder))
    load_weights(decoder, folder)
    return decoder


def test_a_step_learns_from_pictures_and_what_it_publishes_is_what_engines_then_compute_with(folder: Path) -> None:
    backend, decoder = TorchBackend(), decoder_of(folder)
    backend.setup(backend_config(folder, lr=0.01))
    batch = batch_of(decoder)
    before = {name: p.detach().clone() for name, p in backend.core.policy.named_weights().items()}  # type: ignore[attr-defined]
    assert before.keys() == decoder.slots.keys()
    result = backend.train_step(batch)
    assert not result.skipped
    assert result.metrics["train/train_rollout_logprob_abs_diff"] < 1e-4
    after = backend.core.policy.named_weights()  # type: ignore[attr-defined]
    for name in ("visual.patch_embed.proj.weight", "visual.merger.mlp.2.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert not torch.equal(before[name], after[name])
    for bucket in backend.export(1 << 20):
        load_tensors(decoder, dict(bucket))
    again = backend.train_step(batch_of(decoder, extra=2))
    assert again.metrics["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_packed_samples_have_the_log_probs_that_each_has_alone(folder: Path) -> None:
    backend = TorchBackend()
    backend.setup(backend_config(folder))
    core: Any = backend.core
    packed = core.pack(batch_of(decoder_of(folder)).samples)
    with torch.no_grad():
        together, _ = core.policy(packed.micro_batch((4, 2, 0, 3, 1), core.device))
        alone = torch.cat([core.policy(packed.micro_batch((i,), core.device))[0] for i in (4, 2, 0, 3, 1)])
    assert together.tolist() == pytest.approx(alone.tolist(), abs=2e-5)


def test_a_picture_that_cannot_be_read_refuses_its_batch(folder: Path) -> None:
    backend = TorchBackend()
    backend.setup(backend_config(folder))
    batch = batch_of(decoder_of(folder))
    place, _ = batch.samples[0].pictures[0]
    batch.samples[0].pictures = ((place, b"no picture"),)
    with pytest.raises(BatchRefused, match="g0/0: not a picture"):
        backend.train_step(batch)


def test_what_is_not_carried_with_pictures_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(Refused, match="routing replay is not carried"):
        TorchBackend().setup(backend_config(folder, use_routing_replay=True))
