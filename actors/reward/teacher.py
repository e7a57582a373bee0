"""A teacher behind an SGLang-compatible server: log-probs of a response's tokens, for on-policy distillation.

POST {url}/generate with the whole sequence, max_new_tokens 0, return_logprob and logprob_start_len; the answer's
meta_info.input_token_logprobs is [[logprob | null, token id, text], ...] from that token on. Owns one connection pool. Always
true: what is returned belongs to exactly the tokens that were sent, untempered, one finite number each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from actors.reward.sample import ScorerFailed
from actors.runtime.deadline import deadline
from actors.runtime.seeds import seed_for
from bus.errors import Poison
from bus.messages.base import EMPTY, Packed, pack_floats, unpack_ints
from bus.messages.samples import RolloutDone

_TRY_AGAIN = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})


class TeacherRefused(Poison):
    """The teacher will never speak of this sample: refused, or another tokenizer."""


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]] = []


class _Answer(msgspec.Struct):
    meta_info: _Meta


class Teacher:
    """One or several servers of one model; a sample always asks the same one. Use as `async with`."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(f"{url.rstrip('/')}/generate" for url in urls)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Concurrency and deadline are the caller's: a limit here would queue unseen, outside of every deadline.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def logprobs(self, rollout: RolloutDone, deadline_s: float) -> Packed:
        """float32 [n_tokens]. Raises DeadlineExceeded, ScorerFailed (may work later) or TeacherRefused."""
        task, response = rollout.task, unpack_ints(rollout.response.tokens)
        if not response:
            return EMPTY
        prompt = unpack_ints(task.prompt_tokens)
        url = self._urls[seed_for(0, "teacher", task.sample_id) % len(self._urls)]
        shown = str(URL(url).with_user(None).with_query(None))  # credentials stay out of errors and dead letters
        body = {
            "input_ids": prompt + response,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0, "skip_special_tokens": False},
            "return_logprob": True,
            "logprob_start_len": max(0, len(prompt) - 1),
        }
        async with deadline(deadline_s, f"teacher's log-probs of {task.sample_id} from {shown}"):
            status, raw = await self._post(url, shown, task.sample_id, body)
        text = raw[:200].decode("utf-8", "replace")
        if status in _TRY_AGAIN or status >= 500:
            raise ScorerFailed(f"teacher {shown} answered {status} for {task.sample_id}: {text!r}")
        if status != HTTPStatus.OK:
            raise TeacherRefused(f"teacher {shown} answered {status} for {task.sample_id}: {text!r}")
        try:
            pairs = msgspec.json.decode(raw, type=_Answer).meta_info.input_token_logprobs
        except msgspec.MsgspecError as error:
            raise ScorerFailed(f"teacher {shown} gave no log-probs for {task.sample_id} ({error}): {text!r}") from error
        return pack_floats(_checked(pairs, response, prompted=bool(prompt), who=f"teacher {shown}", of=task.sample_id))

    async def _post(self, url: str, shown: str, sample_id: str, body: dict[str, Any]) -> tuple[int, bytes]:
        assert self._http is not None
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.post(
                url, data=msgspec.json.encode(body), headers=headers, allow_redirects=False
            ) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ScorerFailed(f"teacher {shown} not reached for {sample_id}: {type(error).__name__}: {error}") from error


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


__all__ = ("Teacher", "TeacherRefused")
