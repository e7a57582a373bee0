"""Attaching to a server that runs already: what it serves is compared before it gets a sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.generation.engine import BootRefused
from actors.generation.engines.sglang.attach import check_served
from actors.generation.engines.sglang.wire import NEVER_MIXES


def config(folder: Path, **values: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64, "vocab_size": 64} | values))
    return str(folder)


def test_an_engine_of_another_shape_is_refused_and_a_like_one_is_taken(tmp_path: Path) -> None:
    ours = config(tmp_path / "ours")
    like = config(tmp_path / "like", head_dim=16)
    other = config(tmp_path / "other", hidden_size=128)
    info = {"stream_interval": 8, "skip_tokenizer_init": True, "tp_size": 2, "context_length": 4096}
    found = check_served("http://e:1", info, like, ours)
    assert (found.exact, found.tp_size, found.note) == (False, 2, "context of 4096 tokens")
    with pytest.raises(BootRefused, match=r"http://e:1 serves another model .*hidden_size is 128, .* has 64"):
        check_served("http://e:1", info, other, ours)
    assert "not compared" in check_served("http://e:1", info, "/far/away", ours).note


def test_an_engine_of_another_quantisation_is_refused(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    plain = config(tmp_path / "plain")
    narrow = config(tmp_path / "narrow", quantization_config=fp8)
    other = config(tmp_path / "other", quantization_config={"quant_method": "awq"})
    check_served("u", {}, narrow, narrow)
    with pytest.raises(BootRefused, match=r"serves plain weights .* is published as FP8 \(128 x 128 blocks\)"):
        check_served("u", {}, plain, narrow)
    with pytest.raises(BootRefused, match=r"serves \{'quant_method': 'awq'\} weights .* is published as plain"):
        check_served("u", {}, other, plain)


def test_only_one_token_a_chunk_without_a_detokenizer_is_exact() -> None:
    for interval, skip, exact in ((1, True, True), (1, False, False), (16, True, False)):
        info = {"stream_interval": interval, "skip_tokenizer_init": skip}
        assert check_served("u", info, "", "").exact is exact
        assert not check_served("u", info, "", "").exact_in_place  # the newest token comes after the pause
        assert check_served("u", info | {"disable_overlap_schedule": True}, "", "").exact_in_place is exact
    embedded = check_served("u", {NEVER_MIXES: True, "stream_interval": 16}, "", "")
    assert embedded.exact and embedded.exact_in_place
