"""LoRA beside classes of transformers: proved, trained, checkpoints of peft's, engines of the class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.stablelm.modeling_stablelm import StableLmMLP

from actors.generation.engines.embedded.adapters import Adapters
from actors.generation.engines.embedded.decoders import open_decoder
from actors.generation.engines.embedded.weights import load_weights
from actors.runtime.lora import AdapterShape, matrix_of
from actors.runtime.run import Refused
from actors.trainer.backend import StepBatch
from actors.trainer.lora.adapters import AdaptedGeneric
from actors.trainer.torch_backend import TorchBackend
from scripts.bench.causal_classes import make_causal
from tests.trainer.conftest import backend_config, files_of, published, saved, served

Batch = Callable[..., StepBatch]
pytestmark = pytest.mark.timeout(120)
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "weight_decay": 0.0, "lr": 0.02}
TOKENS = torch.arange(3, 20)[None]


def backend_on(path: Path, **settings: Any) -> TorchBackend:
    backend = TorchBackend()
    backend.setup(backend_config(path, model_implementation="transformers", **(LORA | settings)))
    return backend


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=TOKENS).logits.double(), -1)


@pytest.mark.parametrize("family", ["gemma", "stablelm", "qwen3_next"])
@pytest.mark.parametrize("publish", ["merged", "adapters"])
def test_adapters_of_a_class_are_trained_and_peft_reads_them(family: str, publish: str, tmp_path: Path, make_batch: Batch) -> None:
    make_causal(family, tmp_path / "m")
    kl = {"objective": {"use_kl_loss": True, "kl_loss_coef": 0.1}}
    targets = {"target_modules": "q_proj,k_proj,v_proj,o_proj"} if family == "qwen3_next" else {}
    backend = backend_on(tmp_path / "m", lora_publish=publish, **kl, **targets)
    assert isinstance(backend.core.policy, AdaptedGeneric)
    first = [backend.train_step(make_batch(step, step=step)).metrics["train/kl_loss"] for step in range(2)]
    assert first[0] == 0 and first[1] != 0, "the reference is the base"
    base = load_file(tmp_path / "m" / "model.safetensors")
    saved(backend, tmp_path / "c")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    without = logits(plain)
    with_adapters = logits(PeftModel.from_pretrained(plain, tmp_path / "c").eval())
    assert (with_adapters - without).abs().max() > 1e-3
    published(backend, tmp_path / "v")
    decoder = open_decoder(tmp_path / "m", None, repeatable=True)
    load_weights(decoder, tmp_path / "m")
    if publish == "adapters":
        assert all(map(matrix_of, files_of(tmp_path / "v")))
        decoder.adapters = Adapters(AdapterShape(4, 8))
    else:
        assert files_of(tmp_path / "v").keys() == base.keys()
    load_weights(decoder, tmp_path / "v")
    with torch.no_grad():
        mine = decoder.score(TOKENS[0])
    want = with_adapters[0, :-1].gather(1, TOKENS[0, 1:, None])[:, 0]
    torch.testing.assert_close(mine.double(), want, rtol=0, atol=1e-4)


def test_what_is_proved_leaves_no_trace(tmp_path: Path) -> None:
    make_causal("stablelm", tmp_path / "m")
    backend, base = backend_on(tmp_path / "m"), load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(t, base[name].to(t.dtype)) for name, t in served(backend).items())


def test_a_class_that_goes_round_its_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter would do nothing there, while merged weights do."""

    def around(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight)

    make_causal("stablelm", tmp_path / "m")
    monkeypatch.setattr(StableLmMLP, "forward", around)
    with pytest.raises(Refused, match="does not compute adapters as merged weights") as error:
        backend_on(tmp_path / "m")
    assert "\n" not in str(error.value)
    backend_on(tmp_path / "m", exclude_modules="down_proj")
