"""Models without code of our own: transformers' class, proved, trained, published under its checkpoint's names."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.torch_backend.implementations.generic import GenericPolicy
from actors.trainer.torch_backend.implementations.kind import HeadRows, SampleFeed
from actors.trainer.torch_backend.layout import PackedBatch
from actors.trainer.torch_backend.model import load_policy
from actors.trainer.torch_backend.shards import TorchShards
from actors.trainer.training.ranks import Ranks
from scripts.bench.causal_classes import CLASSES, make_causal
from tests.trainer.conftest import SHAPE, backend_config, files_of, saved, served

CPU = torch.device("cpu")
Batch = Callable[..., StepBatch]
MEASURED = Path(__file__).parents[2] / "docs/measurements/cpu_causal_classes.json"
PAGE = Path(__file__).parents[2] / "docs/families.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def backend_on(path: Path, **settings: Any) -> TorchBackend:
    backend = TorchBackend()
    backend.setup(backend_config(path, model_implementation="transformers", **settings))
    return backend


def generic(backend: TorchBackend) -> GenericPolicy:
    policy = backend.core.policy
    assert isinstance(policy, GenericPolicy)
    return policy


def trained(family: str, directory: Path, make_batch: Batch) -> tuple[str, str]:
    """Two steps of it; (feed, head) as they were proved. Before them its weights leave as they came."""
    make_causal(family, directory)
    backend = backend_on(directory)
    source = files_of(directory)
    first = served(backend)
    assert first.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(first[name], tensor.to(first[name].dtype)), name
    for step in range(2):
        metrics = backend.train_step(make_batch(step, step=step)).metrics
        assert 0 < metrics["train/grad_norm"] < float("inf")
    assert any(not torch.equal(t, first[name]) for name, t in served(backend).items())
    policy = generic(backend)
    return policy.feed.value, policy.head.value


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3_next"])
def test_a_class_of_transformers_trains_and_keeps_its_names(family: str, tmp_path: Path, make_batch: Batch) -> None:
    """Packed, packed experts that transformers fuses, and a recurrent class that must not be packed."""
    assert trained(family, tmp_path / "m", make_batch)[0] == ("padded rows" if family == "qwen3_next" else "packed")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nine_of_ten_listed_classes_train(tmp_path: Path, make_batch: Batch) -> None:
    """UPDATE_DOCS=1 writes what was found."""
    found: dict[str, list[str]] = {}
    for family in CLASSES:
        try:
            found[family] = [*trained(family, tmp_path / family, make_batch)]
        except (Refused, AssertionError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            found[family] = ["", " ".join(str(error).split())[:160] or type(error).__name__]
    assert len(CLASSES) == 40
    assert sum(bool(feed) for feed, _ in found.values()) >= 36, found
    if os.environ.get("UPDATE_DOCS"):
        MEASURED.write_text(json.dumps(found, indent=1) + "\n")
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}")
    assert json.loads(MEASURED.read_text()) == found


def table() -> str:
    """Of the page, from what was measured."""
    lines = ["| `model_type` | trains | head over the vocabulary |\n|---|---|---|\n"]
    for family, (feed, head) in json.loads(MEASURED.read_text()).items():
        lines.append(f"| `{family}` | {feed or '**no**'} | {head} |\n")
    return "".join(lines)


def test_the_page_shows_what_was_measured() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() == table().strip()
    assert tuple(json.loads(MEASURED.read_text())) == CLASSES


@pytest.mark.parametrize("family", ["gemma2", "mamba2", "bert"])
def test_log_probs_are_those_of_the_class_alone(family: str, tmp_path: Path, make_batch: Batch) -> None:
    """A capped head, a recurrent class, a head with a layer of its own; at other temperatures than 1."""
    make_causal(family, tmp_path)
    policy = load_policy(str(tmp_path), trainable=True)
    policy.prove(TorchShards(Ranks(), CPU), Ranks(), CPU)
    samples = make_batch(1, temperatures=(1.0, 0.7)).samples
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        got = policy(PackedBatch(samples).micro_batch(range(len(samples)), CPU))[0]
        want = []
        for s in samples:
            tokens = torch.tensor([*s.prompt_tokens, *s.response_tokens])[None]
            logp = torch.log_softmax(hf(tokens, use_cache=False).logits[0] / s.temperature, -1)
            want.append(logp[:-1].gather(1, tokens[0, 1:, None])[len(s.prompt_tokens) - 1 :, 0])
    torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=1e-4)


def test_a_head_with_a_cap_is_not_taken_for_a_product(tmp_path: Path) -> None:
    """With small numbers before and behind it a cap changes nothing that a comparison would see."""
    for family, head, least in (("gemma2", HeadRows.ROWS, -0.99), ("mistral", HeadRows.LINEAR, 0.01)):  # Gemma's norms add 1
        make_causal(family, tmp_path / family)
        policy: Any = load_policy(str(tmp_path / family), trainable=True)
        with torch.no_grad():
            policy.output.weight.mul_(1e-3)
            policy.hf.model.norm.weight.fill_(least)
        policy.prove(TorchShards(Ranks(), CPU), Ranks(), CPU)
        assert policy.head is head


def test_why_a_class_is_not_packed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_causal("mamba2", tmp_path)
    policy: Any = load_policy(str(tmp_path), trainable=True)
    with caplog.at_level(logging.INFO):
        policy.prove(TorchShards(Ranks(), CPU), Ranks(), CPU)
    assert policy.feed is SampleFeed.ROWS
    (line,) = [r.getMessage() for r in caplog.records if "of transformers" in r.getMessage()]
    assert "padded rows equal single samples" in line and "packed: differ" in line and "\n" not in line


def test_what_a_proof_on_short_samples_cannot_see_is_not_packed(tmp_path: Path) -> None:
    """Llama 4 attends in chunks of a row, wherever its samples begin; longrope's positions follow from the longest sample."""
    for family in ("llama4_text", "longrope"):
        directory = tmp_path / family
        make_causal("phi3" if family == "longrope" else family, directory)
        if family == "longrope":
            config = json.loads((directory / "config.json").read_text())
            rope = {"rope_type": family, "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
            config |= {"original_max_position_embeddings": 8, "rope_parameters": rope | {"original_max_position_embeddings": 8}}
            (directory / "config.json").write_text(json.dumps(config))
        policy: Any = load_policy(str(directory), trainable=True)
        policy.prove(TorchShards(Ranks(), CPU), Ranks(), CPU)
        assert policy.feed is SampleFeed.ROWS


class Spilling(LlamaForCausalLM):
    """Causal, and rows of a batch see the first row's first token."""

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask, position_ids)
        out.logits = out.logits + 0.1 * out.logits[:1, :1].detach()
        return out


class Leaking(Spilling):
    """Its log-probs are right; gradients of all rows reach the first row's first token."""

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        out = LlamaForCausalLM.forward(self, input_ids, attention_mask, position_ids)
        first = out.logits[:1, :1]
        out.logits = out.logits + (first - first.detach())
        return out


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Spilling, r"padded rows: differ from single samples, log-probs by \d\.\de.* allowed 2e-04"),
        (Leaking, r"padded rows: differ from single samples, log-probs by (0\.0e\+00|\d\.\de-0[5-9]), gradients by \d"),
    ],
)
def test_rows_that_see_each_other_are_refused_with_the_difference(kind: type[Spilling], said: str) -> None:
    torch.manual_seed(0)
    policy = GenericPolicy(kind(LlamaConfig(**SHAPE)).float().eval())
    with pytest.raises(Refused, match=said):
        policy.prove(TorchShards(Ranks(), CPU), Ranks(), CPU)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """One that transformers would make a causal model of, and one that it would not."""
    make_causal("roberta", tmp_path / "roberta")
    with pytest.raises(Refused, match="not causal: tokens that follow change a log-prob by"):
        backend_on(tmp_path / "roberta")
    (tmp_path / "config.json").write_text('{"model_type": "distilbert"}')
    with pytest.raises(Refused, match="no causal language model for model_type 'distilbert'"):
        backend_on(tmp_path)


def test_code_in_a_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="run only with --trust-remote-code"):
        backend_on(tmp_path)
    assert not (tmp_path / "ran").exists()


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "mine"
class Model(LlamaForCausalLM):
    config_class = Config
"""


def test_code_in_a_directory_that_is_trusted_trains(
    models: dict[str, Path], tmp_path: Path, make_batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    shutil.copytree(models["llama"], model := tmp_path / "m")
    (model / "own.py").write_text(OWN_CODE)
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | own))
    mine, theirs = backend_on(model, trust_remote_code=True), backend_on(models["llama"])
    assert type(generic(mine).hf).__name__ == "Model"
    batch = make_batch(0)
    found, want = (backend.train_step(batch).metrics["train/grad_norm"] for backend in (mine, theirs))
    assert found == pytest.approx(want, rel=1e-5) and served(mine).keys() == files_of(model).keys()


def test_an_unknown_family_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_nxt"}')
    with pytest.raises(Refused, match=r"unknown to transformers \d.*nearest it has is 'qwen3_next' \(Qwen3NextForCausalLM\)"):
        backend_on(tmp_path)


def test_own_code_is_preferred_and_can_be_demanded(models: dict[str, Path], tmp_path: Path) -> None:
    assert not isinstance(load_policy(str(models["qwen3"]), trainable=True), GenericPolicy)
    make_causal("gpt2", tmp_path)
    with pytest.raises(Refused, match="has no code of our own"):
        load_policy(str(tmp_path), trainable=True, implementation="own")


def test_both_ways_train_the_same(models: dict[str, Path], make_batch: Batch) -> None:
    """Several micro-batches with every layer recomputed."""
    found = []
    for how in ("own", "transformers"):
        backend = TorchBackend()
        backend.setup(backend_config(models["qwen3"], model_implementation=how, max_tokens_per_gpu=48, gradient_checkpointing=True))
        found.append([backend.train_step(make_batch(step, step=step)).metrics for step in range(2)])
    for own, other in zip(*found, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
            assert other[name] == pytest.approx(own[name], rel=1e-3, abs=1e-6), name


def test_a_resumed_run_goes_on_as_it_was(tmp_path: Path, make_batch: Batch) -> None:
    make_causal("mixtral", tmp_path / "m")
    one = backend_on(tmp_path / "m")
    one.train_step(make_batch(0))
    checkpoint = saved(one, tmp_path / "c")
    checkpoint.write_hf(tmp_path / "hf")
    other = backend_on(tmp_path / "m")
    other.load(tmp_path / "c")
    assert other.weights_hash() == one.weights_hash()
    want, got = (b.train_step(make_batch(1, step=1)).metrics["train/loss"] for b in (one, other))
    assert want == got
    assert files_of(tmp_path / "hf").keys() == files_of(tmp_path / "m").keys()
    assert served(backend_on(tmp_path / "hf")).keys() == files_of(tmp_path / "m").keys()


def test_dropout_of_a_config_does_not_train(tmp_path: Path) -> None:
    """GPT-2's configs ask for it; layers that are recomputed count as training."""
    make_causal("gpt2", tmp_path)
    policy: Any = load_policy(str(tmp_path), trainable=True, gradient_checkpointing=True)
    assert policy.hf.is_gradient_checkpointing
    assert {m.p for m in policy.modules() if isinstance(m, nn.Dropout)} == {0.0}
    policy.prove(TorchShards(Ranks(), CPU), Ranks(), CPU)
