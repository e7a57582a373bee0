"""Tiny random models on disk, and transformers as the oracle for what they say."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAMILIES = ["qwen3", "llama"]
VOCAB = 64
EOS = 1
CONTEXT = 4096

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def make_model(family: str, path: Path, *, seed: int, **changes: Any) -> None:
    """Save a random model of the family; `changes` go to its transformers config."""
    import transformers

    names = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "qwen3_moe": "Qwen3Moe"}
    config_class = getattr(transformers, f"{names[family]}Config")
    model_class = getattr(transformers, f"{names[family]}ForCausalLM")
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": family == "qwen3",
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = model_class(config_class(**{**shape, **changes})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.15)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)


def load_model(path: Path) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class Oracle:
    """What transformers says about a sequence under one model."""

    def __init__(self, path: Path) -> None:
        self.model = load_model(path)

    @torch.no_grad()
    def logprobs(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each response token given all tokens before it."""
        logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return _gather(logits, response, temperature)

    @torch.no_grad()
    def logprobs_after(self, old: Oracle, prompt: list[int], kept: list[int], response: list[int]) -> list[float]:
        """As above for `response` after prompt + kept, where every key and value but the last is still `old`'s."""
        before = torch.tensor([prompt + kept])
        cache = old.model(before[:, :-1], use_cache=True).past_key_values
        tail = torch.tensor([[(prompt + kept)[-1], *response]])
        logits = self.model(tail, past_key_values=cache).logits[0, :-1]
        return _gather(logits, response, 1.0)

    @torch.no_grad()
    def greedy(self, prompt: list[int], n_tokens: int) -> list[int]:
        out: list[int] = []
        for _ in range(n_tokens):
            out.append(int(self.model(torch.tensor([prompt + out])).logits[0, -1].argmax()))
        return out


def _gather(logits: Tensor, tokens: list[int], temperature: float) -> list[float]:
    scores = torch.log_softmax(logits.float() / temperature, -1)
    return scores[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
