"""The embedded engine with pictures, against transformers."""

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
from actors.generation.engines.embedded.weights import load_weights
from actors.generation.engines.embedded.wire import BadRequest, GenerateBody, view_of
from actors.runtime.vision import positions
from scripts.bench import sights


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    sights.make_model(path, family=request.param)
    return path


def prompt_of(eyes: Eyes, *pictures: bytes) -> list[int]:
    words = {word: i for i, word in enumerate(sights.WORDS)}
    ids = [words["user\n"]]
    for picture in pictures:
        t, h, w = eyes.vision.pixels(picture)[1]
        ids += [words["<|vision_start|>"], *[sights.IMAGE] * (t * h * w // 4), words["<|vision_end|>"], words[" and"]]
    return [*ids, words[" which"], words[" colour"]]


def test_requests_with_pictures_are_answered_as_transformers_computes_them(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    hf: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    eyes = Eyes(folder)
    decoder = Decoder(read_config(folder), eyes)
    load_weights(decoder, folder)
    assert set(decoder.slots) >= {"visual.patch_embed.proj.weight", "model.layers.0.self_attn.q_proj.bias"}
    two = sights.square("blue"), sights.square("green", 140, 84)
    shown: list[tuple[bytes, ...]] = [(sights.square("red"),), two, (), (sights.square("white", 84, 56),)]
    requests = []
    for k, pictures in enumerate(shown):
        ids = prompt_of(eyes, *pictures)
        view = eyes.view(ids, list(map(sights.data_url, pictures))) if pictures else None
        requests += [Request(rid=f"{k}/{i}", prompt=ids, limit=6, seed=i, view=view) for i in range(2)]
    batch = Batch(decoder, 16, 4096)
    with torch.inference_mode():
        batch.prefill(list(requests))
        while batch.requests:
            batch.decode()
    for request in requests:
        whole = torch.tensor([request.prompt + request.tokens])
        given: dict[str, Any] = {}
        if request.view:
            kinds = torch.zeros_like(whole)
            kinds[0, request.view.at] = 1
            given = {"pixel_values": request.view.pixels, "image_grid_thw": request.view.grids, "mm_token_type_ids": kinds}
            expected, _ = hf.model.get_rope_index(whole, kinds, request.view.grids)
            np.testing.assert_array_equal(positions(whole.shape[1], request.view.places, 2), expected[:, 0].numpy())
        hf.model.rope_deltas = None
        tokens = whole[0, : len(request.prompt)].tolist(), request.tokens
        if request.view and sights.IMAGE in request.tokens:
            continue  # transformers would take the model's own placeholder for a picture's
        logits = hf(whole, **given).logits[0, len(tokens[0]) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        assert logp.tolist() == pytest.approx([pair[0] for pair in request.pairs], abs=2e-5)


@pytest.mark.parametrize(
    "image_data, problem",
    [
        (["%%%"], "not base64"),
        (["data:image/png;base64,AAAA"], "not a picture"),
        ([sights.data_url(sights.square("red", 84, 84))], "no 9 places in a row"),
        ([sights.data_url(sights.square("red"))] * 2, "picture 2 of 2"),
    ],
)
def test_pictures_that_do_not_fit_are_refused_in_one_line(folder: Path, image_data: list[str], problem: str) -> None:
    eyes = Eyes(folder)
    ids = prompt_of(eyes, sights.square("red"))
    with pytest.raises(BadRequest, match=problem) as found:
        view_of(GenerateBody(input_ids=ids, image_data=image_data), eyes)
    assert "\n" not in str(found.value)
