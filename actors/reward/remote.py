"""A reward service over HTTP: POST {"prompt", "response", "label"} as JSON, the JSON answer is the reward."""

from __future__ import annotations

from typing import Self

import msgspec

from actors.reward.sample import Sample, ScorerFailed, Value
from actors.reward.service import Service, shown
from bus.errors import Poison

MAX_ANSWER_BYTES = 1 << 20


class RemoteRefused(Poison):
    """The service understood and will not score this sample."""


class RemoteScorer:
    """The service at `url`. Use as `async with`."""

    name = "remote_rm"
    default_key = ""

    def __init__(self, url: str) -> None:
        self._url = url
        self._service = Service(RemoteRefused, limit_bytes=MAX_ANSWER_BYTES)

    async def __aenter__(self) -> Self:
        await self._service.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._service.__aexit__(*exc)

    async def score(self, sample: Sample, deadline_s: float) -> Value:
        """The service's answer. Raises DeadlineExceeded, ScorerFailed (may work later) or RemoteRefused."""
        asked = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        body = await self._service.ask(self._url, asked, sample.sample_id, deadline_s, what="reward")
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            text = body[:200].decode("utf-8", "replace")
            raise ScorerFailed(
                f"{shown(self._url)} answered no JSON for {sample.sample_id} ({error}): {text!r}"
            ) from error
