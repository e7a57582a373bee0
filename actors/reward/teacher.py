"""A teacher behind an SGLang-compatible server: log-probs of a response's tokens, for on-policy distillation.

POST {url}/generate with the whole sequence, max_new_tokens 0, return_logprob and logprob_start_len; the answer's
meta_info.input_token_logprobs is [[logprob | null, token id, text], ...] from that token on. Always true: what is returned
belongs to exactly the tokens that were sent, untempered, one finite number each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from actors.reward.service import Service, shown
from actors.runtime.seeds import seed_for
from bus.errors import Poison
from bus.messages.base import EMPTY, Packed, pack_floats, unpack_ints
from bus.messages.samples import RolloutDone

MAX_ANSWER_BYTES = 64 << 20  # some 40 bytes a token


class TeacherRefused(Poison):
    """The teacher will never speak of this sample: refused, or another tokenizer."""


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]] = []


class _Answer(msgspec.Struct):
    meta_info: _Meta


class Teacher(Service):
    """One or several servers of one model; a sample always asks the same one. Use as `async with`."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(f"{url.rstrip('/')}/generate" for url in urls)
        super().__init__(TeacherRefused, limit_bytes=MAX_ANSWER_BYTES, role="teacher")

    async def logprobs(self, rollout: RolloutDone, deadline_s: float) -> Packed:
        """float32 [n_tokens]. Raises DeadlineExceeded, ScorerFailed (may work later) or TeacherRefused."""
        task, response = rollout.task, unpack_ints(rollout.response.tokens)
        if not response:
            return EMPTY
        prompt = unpack_ints(rollout.prompt_tokens)
        url = self._urls[seed_for(0, "teacher", task.sample_id) % len(self._urls)]
        body = {
            "input_ids": prompt + response,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0, "skip_special_tokens": False},
            "return_logprob": True,
            "logprob_start_len": max(0, len(prompt) - 1),
        }
        who, what = f"teacher {shown(url)}", "teacher's log-probs"
        said = await self.ask(url, body, task.sample_id, deadline_s, what=what, kind=_Answer, gives="log-probs")
        pairs = said.meta_info.input_token_logprobs
        return pack_floats(_checked(pairs, response, prompted=bool(prompt), who=who, of=task.sample_id))


def _checked(
    pairs: Sequence[tuple[float | None, int, Any]], response: Sequence[int], *, prompted: bool, who: str, of: str
) -> list[float]:
    """The response's log-probs. Nothing predicts the first token of a response without a prompt: 0, it is masked anyway."""
    tail = pairs[-len(response) :]
    if [token for _, token, _ in tail] != list(response):
        raise TeacherRefused(f"{who} spoke of other tokens than {of} has; give a server of the policy's tokenizer.")
    found = [0.0 if i == 0 and not prompted else p for i, (p, _, _) in enumerate(tail)]
    numbers = [p for p in found if p is not None and math.isfinite(p)]
    if len(numbers) != len(response):
        raise TeacherRefused(f"{who} gave {len(response) - len(numbers)} of {len(response)} log-probs of {of} no number.")
    return numbers
