"""What this package does inside SGLang's scheduler process, as one of its --custom-weight-loader functions (never in a worker),
and the letters a worker exchanges with it.

An update without tensors calls `run` on each of the engine's GPUs; order and answers are files in the server's boot folder:
count     tokens of each request, of an engine paused in place (census.py)
checksum  of each parameter; every GPU answers, each of its own parts
receive   all buckets of a version over a group that SGLang joined, into a buffer that is kept, and from there by quick_load.py;
          before that it counts too, if asked
draw      next tokens are drawn by our sampler from now on, where sampling is plain (sampling.py)
Always true: an answer of `unknown` means that nothing was touched. Weights are all there, on the GPU, when `receive` is answered
without `failed`; otherwise, also where its answer is lost, they are to be discarded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from actors.generation.engines.sglang.qualified import tested
from bus.errors import UNREADABLE

VARIABLE = "MILES_ASYNC_INSIDE"
"""Environment of the server: the folder of the letters."""
TESTED = tested()
"""Versions of SGLang, in its own words, whose scheduler this was tested with, as the shipped records say; no other is asked
(inside_client.py)."""
log = logging.getLogger(__name__)
_DEPTH = 16  # frames from here to the scheduler: three in SGLang 0.5.12


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`layouts`: of each bucket in turn, as quick_load.Layout in JSON. `counts`: whether to count before receiving."""

    number: int
    what: Literal["count", "receive", "checksum", "draw"]
    group: str = ""
    layouts: tuple[str, ...] = ()
    counts: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`number`: that of the order. `counts`: request -> tokens made; one that is not named has none, or has ended. `checksums`:
    parameter -> XXH3 of its bytes on this GPU."""

    number: int
    counts: dict[str, int] = {}
    checksums: dict[str, str] = {}
    unknown: str = ""
    failed: str = ""


def run(model: Any, named: Iterable[Any]) -> None:
    """Called by SGLang with its model and no tensors. What cannot be read or written is not answered: SGLang must not end."""
    folder = Path(os.environ.get(VARIABLE, ""))
    try:
        order = msgspec.json.decode((folder / "order.json").read_bytes(), type=Order)
        _answer(folder, order, model)
    except (OSError, *UNREADABLE) as error:
        log.warning("an order is not answered: %s", error)


def _answer(folder: Path, order: Order, model: Any) -> None:
    frame = sys._getframe()
    scheduler = _owner(frame, "running_batch", "waiting_queue")
    rank = int(getattr(scheduler, "tp_rank", 0))
    if order.what == "count":
        answer = _count(order, scheduler)
    elif order.what == "receive":
        counted = _count(order, scheduler) if order.counts else Answer(number=order.number)
        answer = counted if counted.unknown else _receive(order, model, _owner(frame, "_model_update_group"), counted)
    else:
        try:
            if order.what == "draw":
                answer = Answer(number=order.number, unknown=_draw(_owner(frame, "sampler", "server_args")))
            else:
                answer = Answer(number=order.number, checksums=_checksums(model))
        except Exception as error:  # noqa: BLE001 - whatever it was, SGLang must not end: it goes on with its own sampler
            answer = Answer(number=order.number, unknown=f"{type(error).__name__}: {error}"[:500])
    if rank == 0 or order.what == "checksum":
        _write(_answer_file(folder, rank), answer)
    elif answer.failed:
        raise RuntimeError(answer.failed)  # the answer of the first rank does not know; this ends the engine


def _count(order: Order, scheduler: Any) -> Answer:
    import torch

    from actors.generation.engines.sglang.census import CannotCount, count

    try:
        counts = count(scheduler)
    except CannotCount as error:
        return Answer(number=order.number, unknown=str(error))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the step kept back has left the GPU before any weight changes
    return Answer(number=order.number, counts=counts)


def _draw(runner: Any) -> str:
    """Why not; empty when it is done."""
    from actors.generation.engines.sglang.sampling import install

    return "SGLang's sampler was not found" if runner is None else install(runner)


def _checksums(model: Any) -> dict[str, str]:
    import torch

    from actors.runtime.checksum import checksum

    flat = ((name, p.detach().contiguous().reshape(-1).view(torch.uint8)) for name, p in model.named_parameters())
    return {name: checksum(weight.cpu().numpy()).hexdigest() for name, weight in flat}


def _receive(order: Order, model: Any, runner: Any, counted: Answer) -> Answer:
    from actors.generation.engines.sglang.quick_load import receive

    group = None if runner is None else runner._model_update_group.get(order.group)
    if group is None:
        return Answer(number=order.number, unknown=f"SGLang's membership in group {order.group} was not found")
    try:
        receive(model, order.layouts, group)
    except Exception as error:  # noqa: BLE001 - whatever it was, weights may be half changed, and SGLang must not end
        return msgspec.structs.replace(counted, failed=f"{type(error).__name__}: {error}"[:500])
    return counted


def _owner(frame: Any, *names: str) -> Any:
    """Whoever called, some frames up, and has these attributes; None if nobody does."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if all(hasattr(owner, name) for name in names):
            return owner
        frame = frame.f_back
    return None


def send(folder: Path, order: Order) -> None:
    """The worker's part: an order for the next call."""
    _write(folder / "order.json", order)


def read(folder: Path, order: Order, rank: int = 0) -> Answer:
    """The answer to an order. Where none is: unknown, but for `receive`, after which nobody knows what the engine holds."""
    try:
        answer = msgspec.json.decode(_answer_file(folder, rank).read_bytes(), type=Answer)
        if answer.number == order.number:
            return answer
        why = f"no answer in {folder}"
    except (OSError, *UNREADABLE) as error:
        why = f"no answer in {folder}: {error}"
    received = order.what == "receive"
    return Answer(number=order.number, unknown="" if received else why, failed=why if received else "")


def _answer_file(folder: Path, rank: int = 0) -> Path:
    return folder / (f"answer.{rank}.json" if rank else "answer.json")


def _write(path: Path, letter: Order | Answer) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(letter))
    part.replace(path)
