"""What only some families compute (windows, two rotary bases, capped scores and logits, norms over all heads) in training: packed
samples give transformers' log-probs and gradients, and ranks that share a model the numbers of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.trainer.megatron_backend.core import MegatronCore
from actors.trainer.megatron_backend.weights import export_hf
from actors.trainer.training.clockwork import Stopwatch
from actors.trainer.training.ranks import Ranks
from actors.trainer.training.step import _planned
from tests.megatron.models import make, tensors
from tests.megatron.pool import Pool
from tests.megatron.tiny import NUMBERS, batch_of, config_of, trained

pytestmark = pytest.mark.timeout(180)
BENT = 0.3  # of the entropies, in a loss that sums log-probs with them


def packed(path: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(log-probs of the batch's response tokens, gradients under their Hugging Face names) by the backend."""
    core = MegatronCore(config_of(path), Ranks())
    try:
        samples = batch_of(0).samples
        batch = core.pack(samples)
        _, [work] = _planned(core, core.config, batch, [s.train.trajectory for s in samples])
        assert len(work) > 1 and core.config.max_tokens_per_gpu > 30, "several samples in each of several micro-batches"
        logp = core.score("old_logp", batch, [work])
        core.forward_backward(
            work, lambda ids, logp, entropy: logp.sum() + BENT * entropy.sum(), lambda *_: torch.zeros([]),
            learns=True, entropy_gradient=True, watch=Stopwatch(core.device),
        )  # fmt: skip
        with torch.no_grad():
            for weight in core.model.bare[0].parameters():
                weight.copy_(weight.main_grad)
        return logp, {name: t.clone() for name, t in export_hf(core.model.bare, core.model.architecture)}
    finally:
        core.close()


def one_by_one(path: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    model.get_input_embeddings().padding_idx = None  # its embedding is trained as any other
    found, loss = [], torch.zeros([])
    for s in batch_of(0).samples:
        ids = torch.tensor([*s.prompt_tokens, *s.response_tokens])[None]
        said = (model(ids).logits[0, len(s.prompt_tokens) - 1 : -1] / s.temperature).log_softmax(-1)
        found.append(said.gather(1, ids[0, len(s.prompt_tokens) :, None])[:, 0])
        loss = loss + found[-1].sum() - BENT * (said.exp() * said).sum()
    loss.backward()
    return torch.cat(found).detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_packed_samples_give_the_log_probs_and_gradients_of_transformers(family: str, pool: Pool, tmp_path: Path) -> None:
    make(family, tmp_path)
    [(logp, gradients)] = pool.run(1, packed, str(tmp_path))
    want, wanted = one_by_one(str(tmp_path))
    torch.testing.assert_close(logp, want, rtol=0, atol=1e-4)
    assert gradients.keys() == wanted.keys() == tensors(tmp_path).keys()
    for name, gradient in wanted.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


SHARED: dict[str, dict[str, Any]] = {
    "minimax_m2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "gemma2": {"pipeline_model_parallel_size": 2},
    "gemma3_text": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
}


@pytest.mark.parametrize("family", SHARED)
def test_ranks_that_share_a_model_train_it_as_one_does(family: str, pool: Pool, tmp_path: Path) -> None:
    """Numbers and updates of one step."""
    make(family, tmp_path)
    [(want, after)] = pool.run(1, trained, str(tmp_path), 1, {})
    before = tensors(tmp_path)
    ranks = 4 if "context_parallel_size" in SHARED[family] else 2
    for got, weights in pool.run(ranks, trained, str(tmp_path), 1, {"own": SHARED[family]}):
        for name in NUMBERS:
            assert got[0][name] == pytest.approx(want[0][name], rel=1e-4, abs=1e-6), name
        for name, weight in weights.items():
            torch.testing.assert_close(weight - before[name], after[name] - before[name], rtol=1e-3, atol=1e-6, msg=name)
