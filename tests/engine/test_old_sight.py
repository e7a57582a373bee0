"""A picture that was seen before an update is looked at with the new weights after it.

The embedded engine; and real SGLang, started as a run starts it, where MILES_ASYNC_TEST_SGLANG names its command (sglang-cpu of
scripts/sglang_cpu.sh).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.generation.engine import GenerateRequest
from actors.generation.engines.sglang.args import sglang_env
from actors.generation.engines.sglang.attach import check_served
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.server import SGLangServer
from actors.generation.engines.sglang.wire import NEVER_MIXES
from actors.generation.spec import GenerationSpec
from actors.runtime.vision import Vision
from scripts.bench import sights
from tests.engine.conftest import engine_process

COMMAND = os.environ.get("MILES_ASYNC_TEST_SGLANG", "")


@asynccontextmanager
async def engine(kind: str, model: Path, folder: Path) -> AsyncIterator[str]:
    if kind == "embedded":
        with engine_process(model) as (url, _):
            yield url
        return
    spec = GenerationSpec(engine="sglang", model_path=str(model), server_command=(COMMAND,), boot_deadline_s=250.0)

    async def report(kind: str, text: str, level: str) -> None:
        print(kind, text)

    server = SGLangServer(spec, folder, report)
    try:
        yield await server.start()
    finally:
        await server.stop()


def truth(model: Path, ids: list[int], tokens: list[int]) -> list[float]:
    from transformers import AutoModelForImageTextToText

    hf: Any = AutoModelForImageTextToText.from_pretrained(model).float().eval()
    pixels, grid = Vision(str(model)).pixels(sights.square("red"))
    whole = torch.tensor([ids + tokens])
    kinds = (torch.tensor([ids + [0] * len(tokens)]) == sights.IMAGE).long()
    shown = {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.tensor([grid]), "mm_token_type_ids": kinds}
    with torch.no_grad():
        logits = hf(whole, **shown).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind", ["embedded", pytest.param("sglang", marks=pytest.mark.skipif(not COMMAND, reason="MILES_ASYNC_TEST_SGLANG is unset"))]
)
async def test_a_picture_seen_before_an_update_is_seen_anew_after_it(kind: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        sights.make_model(folder)
    weights = load_file(second / "model.safetensors")
    torch.manual_seed(5)
    changed = {name: w + 0.5 * torch.randn_like(w) if "visual" in name else w for name, w in weights.items()}
    save_file(changed, second / "model.safetensors", metadata={"format": "pt"})
    t, h, w = Vision(str(first)).pixels(sights.square("red"))[1]
    words = [sights.WORDS.index(word) for word in ("user\n", "<|vision_start|>", "<|vision_end|>", " which")]
    ids = [*words[:2], *[sights.IMAGE] * (t * h * w // 4), *words[2:]]
    async with engine(kind, first, tmp_path / "engines") as url:
        client = SGLangClient(url, request_deadline_s=60.0, token_deadline_s=60.0, control_deadline_s=60.0)
        for number, model in enumerate((first, second, first)):
            if number:
                await client.pause("retract")
                await client.update_weights_from_disk(str(model), str(number))
                await client.resume()
            request = GenerateRequest(
                rid=f"r{number}", input_ids=ids, max_new_tokens=1, top_k=1, extra_key=str(number),
                images=(sights.data_url(sights.square("red")),),
            )  # fmt: skip
            chunks = [chunk async for chunk in client.generate(request)]
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            said = [value for chunk in chunks for value in chunk.logprobs]
            assert len(tokens) == 1
            found = truth(model, ids, tokens)
            assert said == pytest.approx(found, abs=1e-3), f"weights {number}"
        await client.close()


def test_engines_of_models_that_see_are_started_without_the_memory_of_pictures(tmp_path: Path) -> None:
    sights.make_model(tmp_path, weights=False)
    seeing, blind = (GenerationSpec(engine="sglang", model_path=str(path)) for path in (tmp_path, tmp_path / "none"))
    assert sglang_env(seeing) == {"SGLANG_VLM_CACHE_SIZE_MB": "0"} and sglang_env(blind) == {}


def test_an_attached_sglang_is_warned_of_and_an_embedded_engine_is_not() -> None:
    assert "SGLANG_VLM_CACHE_SIZE_MB=0" in check_served("http://e:1", {"version": "0.5.12"}, "", "").sight
    assert check_served("http://e:1", {NEVER_MIXES: True}, "", "").sight == ""
