"""One shadow from its first group to its last: source and comparer brought together, and what they found on file and screen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from bus.errors import MilesAsyncError
from miles_async.console.shadow.compare import Comparer
from miles_async.console.shadow.plan import ShadowPlan
from miles_async.console.shadow.results import Results
from miles_async.console.shadow.units import UnitSource

SAY_S = 5.0


async def follow(plan: ShadowPlan, source: UnitSource, comparer: Comparer, results: Results, say: Callable[[Any], None]) -> int:
    """Until enough groups are compared, the source ends, or somebody asks (SIGINT, SIGTERM). `say` gets summaries. 0, or 1 when
    what the shadow was given does not work; the summary says why."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    results.write([{"kind": "shadow", "what": plan.what, "label": plan.label, "source": source.told, "settings": plan.own}])
    error, said, begun, feed, turn = "", -1, 0, source.units(), asyncio.Lock()

    def summary() -> dict[str, Any]:
        return {
            "kind": "summary",
            "what": plan.what,
            "label": plan.label,
            "source": source.told,
            "unit": "step" if plan.what == "loss" else "group",
            **comparer.paired.as_dict(),
            **comparer.more(),
            "missed": dict(source.missed),
            "left_out": dict(source.left_out + comparer.left_out),
            "error": error,
        }

    async def work() -> None:
        nonlocal begun  # groups that are being compared
        while not (plan.groups and comparer.paired.groups + begun >= plan.groups):
            begun += 1
            try:
                async with turn:
                    unit = await anext(feed)
                results.write(await comparer.compare(unit))
            except StopAsyncIteration:
                return
            finally:
                begun -= 1

    async with comparer:
        asked = asyncio.create_task(stop.wait())
        workers = [asyncio.create_task(work()) for _ in range(comparer.at_once)]
        try:
            while not stop.is_set() and (left := [one for one in workers if not one.done()]):
                done, _ = await asyncio.wait({asked, *left}, timeout=SAY_S, return_when=asyncio.FIRST_COMPLETED)
                for one in done - {asked}:
                    one.result()
                if not done and comparer.paired.groups > said:
                    said = comparer.paired.groups
                    results.write([summary()])
                    say(summary())
        except MilesAsyncError as raised:
            error = " ".join(str(raised).split())
        finally:
            for task in (asked, *workers):
                task.cancel()
            await asyncio.gather(asked, *workers, return_exceptions=True)
            await feed.aclose()
            results.write([summary()])
    say(summary())
    return 1 if error else 0
