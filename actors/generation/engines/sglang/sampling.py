"""The draw of next tokens inside SGLang in one pass over the logits, where sampling is plain: temperature and nothing else.

SGLang divides the logits [B, V], makes probabilities of them, draws with torch.multinomial and takes logarithms: some twenty
passes over B * V numbers. Ours (draw_kernel.py) reads them once: the token is the argmax of logit / temperature plus Gumbel
noise, which has the same distribution, and its log-prob comes from a softmax kept while reading. A server without a GPU draws by
draw_torch.py, what tests compare with.
Always true: what is not plain goes to SGLang's own sampler, untouched. A log-prob that is NaN is refused by the client.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from actors.generation.engines.sglang.draw_torch import Draw, draw

log = logging.getLogger(__name__)
_ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def why_not(server: Any) -> str:
    """Why an SGLang with these settings (its ServerArgs) draws by itself always; empty if it does not."""
    bad: dict[str, Any] = {
        "tp_size": server.tp_size > 1,  # its ranks draw alike because they share a generator
        "dp_size": server.dp_size > 1,
        "enable_deterministic_inference": server.enable_deterministic_inference,
        "rl_on_policy_target": server.rl_on_policy_target,
        "enable_nan_detection": server.enable_nan_detection,
        "speculative_algorithm": server.speculative_algorithm,
        _ORIGINAL: os.environ.get(_ORIGINAL, "").lower() in ("1", "true"),
    }
    return next((f"{name} is set" for name, value in bad.items() if value), "")


class PlainSampler:
    """Stands in for SGLang's sampler of one engine (`theirs`), whose every other name it passes on."""

    def __init__(self, theirs: Any, by: Draw, state: torch.Tensor) -> None:
        self.theirs = theirs
        self.drawn = self.passed_on = 0  # batches
        self._by, self._state = by, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)

    def __call__(
        self,
        output: Any,
        info: Any,
        return_logprob: bool,
        top_logprobs: Sequence[int] | None,
        of_tokens: Sequence[Any] | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Tokens [B] int32; their log-probs [B] on `output`, where they are asked for."""
        if not _plain(output.next_token_logits, info, top_logprobs, of_tokens):
            self.passed_on += 1
            tokens: torch.Tensor = self.theirs(output, info, return_logprob, top_logprobs, of_tokens, positions)
            return tokens
        self.drawn += 1
        tokens, logprobs = self._by(output.next_token_logits, info.temperatures, self._state)
        if return_logprob:
            output.next_token_logprobs = logprobs
        return tokens


def _plain(logits: torch.Tensor, info: Any, top_logprobs: Sequence[int] | None, of_tokens: Sequence[Any] | None) -> bool:
    """Whether a batch needs temperature and log-probs of the drawn tokens only. Penalties, biases and masks are in the logits."""
    others = (
        info.is_all_greedy, info.need_top_p_sampling, info.need_top_k_sampling, info.need_min_p_sampling, info.grammars,
        info.has_custom_logit_processor, info.sampling_seed is not None,
    )  # fmt: skip
    asked = any(top_logprobs or ()) or any(ids is not None for ids in of_tokens or ())
    shaped = logits.dtype == torch.float32 and logits.is_contiguous() and len(logits) == len(info.temperatures)
    return shaped and not asked and not any(others)


def install(runner: Any) -> str:
    """Put our sampler before SGLang's in a model runner that draws plainly. Why not, if it cannot be; empty when it is there."""
    if isinstance(runner.sampler, PlainSampler):
        return ""
    if why := why_not(runner.server_args):
        return why
    device = torch.device(runner.device)
    state = torch.tensor([runner.server_args.random_seed, 0], dtype=torch.int64, device=device)
    by: Draw = draw
    if device.type == "cuda":
        from actors.generation.engines.sglang.draw_kernel import draw as by

        # Compiled before a request waits, for rows of this length; SGLang draws on another stream than this one.
        by(torch.zeros(1, runner.model_config.vocab_size, device=device), torch.ones(1, 1, device=device), state)
        torch.cuda.synchronize()
    runner.sampler = PlainSampler(runner.sampler, by, state)
    log.info("next tokens are drawn in one pass over the logits where sampling is plain")
    return ""
