"""The worker's side of the letters to our function inside an engine (inside.py)."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.generation.engine import RequestRefused
from actors.generation.engines.sglang.args import INSIDE
from actors.generation.engines.sglang.inside import TESTED, Answer, Order, read, send
from bus.messages.weights import Bucket

NO_TENSORS = "gARdlC4="  # an empty list as SGLang serialises it
log = logging.getLogger(__name__)


class Inside:
    """What one client asks of its engine's inside. `folder` None: it is not reached. `post`: sends a body to a path."""

    def __init__(self, folder: Path | None, post: Callable[[str, dict[str, Any]], Awaitable[None]]) -> None:
        self._folder = folder
        self._post = post
        self._numbers = itertools.count(time.time_ns())  # no number of a client before us, whose answer may still lie there
        self._gpus = 1
        self._runs = False  # our function

    def hear(self, info: Mapping[str, Any]) -> None:
        """What the engine says of itself: whether it runs our function, in an SGLang that it was tested with, on how many GPUs."""
        version, runs = info.get("version"), INSIDE in (info.get("custom_weight_loader") or ())
        self._runs = runs and version in TESTED
        if runs and not self._runs:
            log.warning(
                "SGLang %s is none that our function inside it was tested with (%s): it is not asked. Tokens of a chunk that an "
                "update in place may divide count as the older version's",
                version,
                ", ".join(TESTED),
            )
        self._gpus = int(info.get("tp_size") or 1)

    @property
    def able(self) -> bool:
        """Whether it can be asked at all."""
        return self._folder is not None and self._runs

    async def counts(self) -> Mapping[str, int] | None:
        """Tokens of each request of an engine paused in place; None where it cannot tell."""
        answer = await self._ask(Order(number=next(self._numbers), what="count"))
        return None if answer is None else answer.counts

    async def draw(self) -> bool:
        """Have next tokens drawn by our sampler from now on, where sampling is plain. False, with the reason in the log, where
        that cannot be done."""
        return await self._ask(Order(number=next(self._numbers), what="draw")) is not None

    async def checksums(self) -> Mapping[str, str] | None:
        """Of each parameter on each GPU, as "<rank>/<name>"; None for an engine of one, whose own tell everything: SGLang's
        checker answers for its first GPU only. RequestRefused where they cannot be had."""
        if self._gpus == 1:
            return None
        order = Order(number=next(self._numbers), what="checksum")
        first = await self._ask(order)
        if first is None or self._folder is None:
            raise RequestRefused(f"an engine of {self._gpus} GPUs that this run did not start tells checksums of the first only")
        answers = [first, *(read(self._folder, order, rank) for rank in range(1, self._gpus))]
        for rank, answer in enumerate(answers):
            if answer.unknown:
                raise RequestRefused(f"GPU {rank} of the engine told no checksums: {answer.unknown}")
        return {f"{rank}/{name}": value for rank, answer in enumerate(answers) for name, value in answer.checksums.items()}

    async def receive(self, buckets: Sequence[Bucket], group: str, *, counts: bool) -> Answer | None:
        """All buckets of a version over a group, `counts` with the tokens of each request before it; None, and nothing was
        received, where that cannot be done."""
        layouts = tuple(msgspec.json.encode([i, bucket.tensors]).decode() for i, bucket in enumerate(buckets))
        return await self._ask(Order(number=next(self._numbers), what="receive", group=group, layouts=layouts, counts=counts))

    async def _ask(self, order: Order) -> Answer | None:
        if self._folder is None or not self._runs:
            return None
        try:
            send(self._folder, order)
        except OSError as error:
            log.warning("%s cannot be written (%s): the engine is not asked to %s", self._folder, error.strerror, order.what)
            return None
        body = {"serialized_named_tensors": [NO_TENSORS] * self._gpus, "load_format": INSIDE, "flush_cache": False}
        await self._post("/update_weights_from_tensor", body)
        answer = read(self._folder, order)
        if answer.unknown:
            log.warning("the engine could not %s its own way: %s", order.what, answer.unknown)
            return None
        return answer
