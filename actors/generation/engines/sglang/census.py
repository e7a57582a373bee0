"""How many tokens each request of a paused SGLang has: what makes a version boundary exact where chunks hold several tokens
(pure; called inside SGLang, see inside.py).

SGLang that is paused in place keeps the result of its last step back until it goes on, and says of a whole chunk only which
version is served when the chunk leaves. Always true: a count includes the token of the step kept back.
"""

from __future__ import annotations

from typing import Any


class CannotCount(Exception):
    """The scheduler is not in a state, or not of a kind, known here."""


def count(scheduler: Any) -> dict[str, int]:
    """Request -> tokens made, of SGLang's scheduler (0.5.12 and like) paused in place. CannotCount says why not."""
    if scheduler is None:
        raise CannotCount("SGLang's scheduler was not found")
    try:
        return _count(scheduler)
    except (AttributeError, TypeError) as error:
        raise CannotCount(f"SGLang's scheduler is not as this package knows it: {error}") from error


def _count(scheduler: Any) -> dict[str, int]:
    if not scheduler._engine_paused:
        raise CannotCount("the engine is not paused")
    if not scheduler.spec_algorithm.is_none():
        raise CannotCount("speculative decoding makes several tokens a step")
    sizes = {name: getattr(scheduler, name) for name in ("pp_size", "dp_size")}
    if any(size != 1 for size in sizes.values()):
        raise CannotCount(f"requests are spread over schedulers ({sizes})")
    kept_back = [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch, *kept_back) if batch is not None]
    requests = {r.rid: r for some in (scheduler.waiting_queue, *(batch.reqs for batch in batches)) for r in some}
    counts = {rid: len(r.output_ids) for rid, r in requests.items() if not r.finished()}
    for batch in kept_back:
        extends = batch.forward_mode.is_extend()
        for request in batch.reqs:
            makes_none = request.is_retracted or (extends and request.is_chunked > 0)
            if request.rid in counts and not makes_none:
                counts[request.rid] += 1
    return counts
