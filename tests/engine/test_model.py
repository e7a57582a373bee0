"""The lean forward against transformers: prefill, decode, growth of the cache and moves of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.generation.engines.embedded.cache import KvCache
from actors.generation.engines.embedded.config import ModelRefused, read_config
from actors.generation.engines.embedded.model import BLOCK_ROWS, Decoder
from actors.generation.engines.embedded.weights import load_weights
from tests.engine.models import LLAMA3_ROPE, VOCAB, load_model, make_model

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("qwen2", {}),
    (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
]


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape[0]}-{','.join(shape[1]) or 'plain'}")
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Decoder, Any]:
    """Our decoder and transformers' model with the same weights."""
    torch.set_num_threads(1)
    family, changes = request.param
    make_model(family, tmp_path, seed=3, **changes)
    decoder = Decoder(read_config(tmp_path))
    load_weights(decoder, tmp_path)
    return decoder, load_model(tmp_path)


@torch.inference_mode()
def test_logits_equal_those_of_transformers(pair: tuple[Decoder, Any]) -> None:
    decoder, model = pair
    sequences = torch.randint(0, VOCAB, (5, 60), generator=torch.Generator().manual_seed(0))
    expected = model(sequences).logits
    lengths = torch.tensor([3, 16, 9, 1, 30])
    source = torch.tensor([0, 1, 2, 3, 4, 4, 1])  # two prompts have two rows
    cache = KvCache(decoder.config, max_rows=8, max_total_tokens=8 * 64)
    cache.reserve(7, 30, live=0)
    logits = decoder.prefill(sequences[:, :30].contiguous(), lengths, source, cache, first_row=0)
    torch.testing.assert_close(logits, expected[source, lengths[source] - 1], atol=1e-5, rtol=0)

    positions = lengths[source]
    for step in range(25):
        if step == 10:  # row 6 takes the place of row 0
            cache.move(6, 0, int(positions[6]))
            source, positions = source[[6, 1, 2, 3, 4, 5]], positions[[6, 1, 2, 3, 4, 5]]
        if step == 15:
            order = positions.argsort(descending=True)
            cache.permute(order, int(positions.max()))
            source, positions = source[order], positions[order]
        longest = int(positions.max()) + 1
        cache.reserve(len(source), longest, live=len(source))
        logits = decoder.decode(sequences[source, positions], positions, [longest], cache)
        torch.testing.assert_close(logits, expected[source, positions], atol=1e-5, rtol=0)
        positions = positions + 1


@torch.inference_mode()
def test_rows_of_several_blocks_do_not_meet(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path, seed=3)
    decoder = Decoder(read_config(tmp_path))
    load_weights(decoder, tmp_path)
    model = load_model(tmp_path)
    n = BLOCK_ROWS + 9
    lengths = torch.cat([torch.full((BLOCK_ROWS,), 3), torch.arange(20, 29)])
    sequences = torch.randint(0, VOCAB, (n, 30), generator=torch.Generator().manual_seed(1))
    cache = KvCache(decoder.config, max_rows=n, max_total_tokens=n * 32)
    cache.reserve(n, 30, live=0)
    decoder.prefill(sequences, lengths, torch.arange(n), cache, first_row=0)
    rows = torch.arange(n)
    logits = decoder.decode(sequences[rows, lengths], lengths, [4, 29], cache)
    torch.testing.assert_close(logits, model(sequences).logits[rows, lengths], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"hidden_size": ...}, "lacks 'hidden_size'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_is_not_implemented_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    make_model("qwen3", tmp_path, seed=0)
    config = tmp_path / "config.json"
    raw = {**json.loads(config.read_text()), **change}
    config.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    with pytest.raises(ModelRefused) as caught:
        read_config(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
