"""Classes of transformers in the embedded engine: what they say is what transformers' own forward says of each sample alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.generation.engines.embedded.batch import Batch
from actors.generation.engines.embedded.classes import ClassDecoder
from actors.generation.engines.embedded.config import ModelRefused
from actors.generation.engines.embedded.decoders import open_decoder
from actors.generation.engines.embedded.memory import WEIGHTS, Occupation
from actors.generation.engines.embedded.request import Request
from actors.generation.engines.embedded.weights import checksums, load_tensors, load_weights
from scripts.bench.causal_classes import make_causal

FAMILIES = ("gpt2", "mixtral", "qwen3_next", "gemma3_text")


def opened(family: str, directory: Path, **options: Any) -> ClassDecoder:
    make_causal(family, directory)
    decoder = open_decoder(directory, None, **({"repeatable": False} | options))
    assert isinstance(decoder, ClassDecoder)
    load_weights(decoder, directory)
    with torch.inference_mode():
        decoder.settled()
    return decoder


@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_have_the_log_probs_of_the_class(family: str, repeatable: bool, tmp_path: Path) -> None:
    """Requests of unlike lengths come and go, so rows move."""
    decoder = opened(family, tmp_path, repeatable=repeatable)
    batch = Batch(decoder, 8, 4096)
    requests = [Request(rid=f"r{i}", prompt=list(range(3 + i, 6 + 3 * i)), limit=3 + 2 * i, seed=i) for i in range(4)]
    with torch.inference_mode():
        ended = batch.prefill(requests[:2])
        ended += batch.decode()
        ended += batch.prefill(requests[2:])
        while batch.requests:
            ended += batch.decode()
        hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        for request in requests:
            assert request in ended and len(request.tokens) == request.limit
            ids = torch.tensor([request.prompt + request.tokens])
            want = torch.log_softmax(hf(ids, use_cache=False).logits[0], -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(decoder.score(ids[0]), want, rtol=0, atol=1e-4)
            said = torch.tensor([logp for logp, _, _ in request.pairs])
            torch.testing.assert_close(said, want[len(request.prompt) - 1 :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_arrive_by_their_checkpoints_names(family: str, tmp_path: Path) -> None:
    """Those of another model in pieces, and memory that was given back in between."""
    decoder = opened(family, tmp_path / "a")
    make_causal(family, tmp_path / "b", seed=1)
    other = load_file(tmp_path / "b" / "model.safetensors")
    memory = Occupation(decoder, Batch(decoder, 2, 64))
    memory.release([WEIGHTS])
    memory.resume([WEIGHTS])
    for name, tensor in other.items():
        load_tensors(decoder, {name: tensor})
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32).eval()
    ids = torch.arange(3, 20)
    with torch.inference_mode():
        want = torch.log_softmax(hf(ids[None], use_cache=False).logits[0], -1)[:-1].gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(decoder.score(ids), want, rtol=0, atol=1e-4)
    again = opened(family, tmp_path / "c")
    load_weights(again, tmp_path / "b")
    assert checksums(again) == checksums(decoder)


def test_what_transformers_does_not_know_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt9", "auto_map": {"AutoConfig": "x.Y"}}')
    with pytest.raises(ModelRefused, match=r"^[^\n]*'gpt9' is not served here[^\n]*use --engine sglang\.$"):
        open_decoder(tmp_path, None, repeatable=False)


def test_a_missing_tensor_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    decoder = opened("mixtral", tmp_path / "a")
    before = checksums(decoder)
    make_causal("mixtral", tmp_path / "b", seed=1)
    from safetensors.torch import save_file

    file = tmp_path / "b" / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if ".experts." in name)
    save_file({n: t for n, t in tensors.items() if n != lost}, file)
    with pytest.raises(ModelRefused, match=f"1 tensors are missing, first {lost}"):
        load_weights(decoder, tmp_path / "b")
    assert checksums(decoder) == before
