"""How many tokens each request of a paused SGLang has: what makes a version boundary exact where chunks hold several tokens.

Runs inside the scheduler process of SGLang, as one of its --custom-weight-loader functions (never in a worker); an update
without tensors asks for it. SGLang that is paused in place keeps the result of its last step back until it goes on, and says
of a whole chunk only which version is served when the chunk leaves.
Always true: a count includes the token of the step kept back, and that step has left the GPU when the counts are
written, so no weight changes under it. Where the scheduler is not as known here, the file says why, and has no counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

VARIABLE = "MILES_ASYNC_CENSUS"
"""Environment of the server: the file that takes the answer."""
_DEPTH = 16  # frames from here to the scheduler: three in SGLang 0.5.12


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """`counts`: request -> tokens made; a request that is not named has none, or has ended. `unknown`: why there are none."""

    counts: dict[str, int] | UnsetType = UNSET
    unknown: str = ""


def take(model: Any, named: Iterable[Any]) -> None:
    """Called by SGLang with its model and no tensors."""
    import torch

    scheduler = _scheduler(sys._getframe())
    try:
        found = count(scheduler)
    except (AttributeError, TypeError) as error:
        found = Census(unknown=f"SGLang's scheduler is not as this package knows it: {error}")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if getattr(scheduler, "tp_rank", 0) == 0:
        path = Path(os.environ[VARIABLE])
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(found))
        part.replace(path)


def count(scheduler: Any) -> Census:
    """Of a scheduler that is paused in place. AttributeError or TypeError: it is of a kind not known here."""
    if scheduler is None:
        return Census(unknown="SGLang's scheduler was not found")
    if not scheduler._engine_paused:
        return Census(unknown="the engine is not paused")
    if not scheduler.spec_algorithm.is_none():
        return Census(unknown="speculative decoding makes several tokens a step")
    sizes = {name: getattr(scheduler, name) for name in ("pp_size", "dp_size")}
    if any(size != 1 for size in sizes.values()):
        return Census(unknown=f"requests are spread over schedulers ({sizes})")
    batches = [scheduler.running_batch, scheduler.last_batch]
    kept_back = [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    requests = {
        request.rid: request
        for some in (scheduler.waiting_queue, *(batch.reqs for batch in (*batches, *kept_back) if batch is not None))
        for request in some
    }
    counts = {rid: len(r.output_ids) for rid, r in requests.items() if not r.finished()}
    for batch in kept_back:
        extends = batch.forward_mode.is_extend()
        for request in batch.reqs:
            makes_none = request.is_retracted or (extends and request.is_chunked > 0)
            if request.rid in counts and not makes_none:
                counts[request.rid] += 1
    return Census(counts=counts)


def _scheduler(frame: FrameType | None) -> Any:
    """Whoever called, some frames up, and holds the batches; None if nobody does."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if hasattr(owner, "running_batch") and hasattr(owner, "waiting_queue"):
            return owner
        frame = frame.f_back
    return None


def read(path: Path) -> Census:
    """What was written last; its absence is told as unknown."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Census)
    except (OSError, msgspec.DecodeError) as error:
        return Census(unknown=f"no census in {path}: {error}")


__all__ = ("VARIABLE", "Census", "count", "read", "take")
