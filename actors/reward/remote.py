"""A reward service over HTTP: POST a sample as JSON, the JSON answer is the reward; or a list of samples, answered by a list.

Always true: a service that does not answer is passed by for a while where there is another; a batch is one question, and each
sample in it gets its own answer or the same failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.reward.sample import Sample, SampleGroup, ScorerFailed, Value
from actors.reward.service import Service
from bus.errors import DeadlineExceeded, Poison

MAX_ANSWER_BYTES = 4 << 20
GATHER_S = 0.02  # a sample waits for others of its batch
ILL_S = 10.0  # a service that failed is asked last


class RemoteRefused(Poison):
    """The service understood and will not score this sample."""


class RemoteScorer(Service):
    """The services at `urls`, which answer alike; up to `batch` samples a question. Use as `async with`."""

    name = "remote_rm"
    default_key = ""

    def __init__(self, urls: Sequence[str], *, batch: int = 1) -> None:
        self._urls = tuple(urls)
        self._batch = batch
        self._asked = 0
        self._ill: dict[str, float] = {}  # url -> loop time until which it is asked last
        self._waiting: list[tuple[Sample, asyncio.Future[Value]]] = []
        super().__init__(RemoteRefused, limit_bytes=MAX_ANSWER_BYTES)

    async def score(self, sample: Sample | SampleGroup, deadline_s: float) -> Value:
        """The service's answer; of a group a list. Raises DeadlineExceeded, ScorerFailed (may work later) or RemoteRefused."""
        if isinstance(sample, SampleGroup):
            return await self._several(sample.samples, deadline_s)
        if self._batch == 1:
            return await self._ask(_body(sample), sample.sample_id, deadline_s)
        own: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, own))
        if len(self._waiting) < self._batch:
            await asyncio.wait([own], timeout=GATHER_S)
        if any(future is own for _, future in self._waiting):
            await self._send(deadline_s)
        return await own

    async def _send(self, deadline_s: float) -> None:
        """Ask for all that wait; each of them gets its answer, or what failed."""
        batch, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
        failure: Exception = ScorerFailed("the question was given up before its answer came")
        try:
            answers = await self._several([sample for sample, _ in batch], deadline_s)
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        except (ScorerFailed, DeadlineExceeded, RemoteRefused) as error:
            failure = error
        finally:
            for _, future in batch:
                if not future.done():
                    future.set_exception(failure)
                    future.exception()  # seen: whoever asked may have gone

    async def _several(self, samples: Sequence[Sample], deadline_s: float) -> list[Value]:
        who = samples[0].sample_id
        answers = await self._ask([_body(sample) for sample in samples], who, deadline_s)
        if not isinstance(answers, list) or len(answers) != len(samples):
            what = f"{len(answers)} answers" if isinstance(answers, list) else f"a {type(answers).__name__}"
            raise ScorerFailed(f"the reward service gave {what} to {len(samples)} samples, first {who}; it must give a list.")
        return answers

    async def _ask(self, body: Any, sample_id: str, deadline_s: float) -> Value:
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        self._asked += 1
        turn = [self._urls[(self._asked + i) % len(self._urls)] for i in range(len(self._urls))]
        failure: Exception | None = None
        for url in sorted(turn, key=lambda url: self._ill.get(url, 0.0) > loop.time()):
            try:
                answer = await self.ask(url, body, sample_id, max(0.001, until - loop.time()), what="reward")
                self._ill.pop(url, None)
                return answer
            except (DeadlineExceeded, ScorerFailed) as error:
                self._ill[url] = loop.time() + ILL_S
                if isinstance(error, DeadlineExceeded):
                    raise
                failure = error
        assert failure is not None
        raise failure


def _body(sample: Sample) -> dict[str, Any]:
    keys = ("prompt", "response", "label", "metadata", "sample_id")
    return {key: getattr(sample, key) for key in keys}
