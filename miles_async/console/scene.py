"""All that the doctor looks at, read at one go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from actors.recorder.file import read_records
from actors.runtime.snapshot import Snapshot, read_snapshot, readable
from bus import Bus
from bus.inspect import Head, newest_heads
from bus.knobs.live import read_history, values_at
from bus.ledger import LedgerCheck, check
from bus.messages.policy import StepDone
from bus.topology import DEAD, POLICY, VERDICTS
from miles_async.console.places import Places, read_places
from miles_async.console.server import ServerState, read_server
from miles_async.governor.govern import Standing, read_standing


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """`verdicts`: newest verdict heads, oldest first. `knobs`: live values, may be empty. `now`: the server's time.
    `uncommitted`: samples that were trained since the last checkpoint; they hold no credit but stay open until the next.
    `first_step`: metrics of the run's first training step, empty where unknown."""

    snapshot: Snapshot
    places: Places
    server: ServerState
    ledger: LedgerCheck
    verdicts: list[Head]
    dead: list[Head]
    knobs: Mapping[str, Any]
    uncommitted: frozenset[str]
    now: float
    lease_s: float
    stream_max_bytes: int
    first_step: Mapping[str, float | None] = {}
    governor: Standing | None = None

    @property
    def over(self) -> bool:
        """The trainer did its last step, or everything was stopped on purpose."""
        actors = self.snapshot.actors
        return self.snapshot.policy.finished or (bool(actors) and all(a.vitals.state == "stopped" for a in actors))


async def read_scene(bus: Bus, run_dir: Path | None = None, *, ledger: LedgerCheck | None = None) -> Scene:
    """One look at everything. The ledger check is exact; the rest may be a few milliseconds apart. `run_dir`: the run's
    folder where it is on this host; its metrics.jsonl still knows steps that the bus has trimmed. `ledger`: an audit that is
    recent enough for the one who looks; else another is made, which holds the server."""
    if ledger is None:
        ledger = await check(bus)
    snapshot, places, server, time = await asyncio.gather(
        read_snapshot(bus), read_places(bus), read_server(bus), bus.server_time()
    )
    verdicts, dead, patches, uncommitted = await asyncio.gather(
        newest_heads(bus, VERDICTS, 2000), newest_heads(bus, DEAD, 20), read_history(bus), trained_unsaved(bus)
    )
    return Scene(
        snapshot=snapshot,
        places=places,
        server=server,
        ledger=ledger,
        verdicts=verdicts,
        dead=dead,
        knobs=dict(values_at(patches, patches[-1].epoch).values) if patches else {},
        uncommitted=uncommitted,
        now=time,
        lease_s=bus.config.lease_s,
        stream_max_bytes=bus.config.stream_max_bytes,
        first_step=await asyncio.to_thread(_first_step, run_dir) if run_dir is not None else {},
        governor=await read_standing(bus),
    )


def _first_step(run_dir: Path) -> Mapping[str, float | None]:
    """Metrics of step 1 as it was last done: a run killed before its first checkpoint does it again."""
    steps = (r for r in reversed(read_records(run_dir)) if r["kind"] == "step" and r.get("step") == 1)
    metrics = next(steps, {}).get("metrics")
    return metrics if isinstance(metrics, dict) else {}


async def trained_unsaved(bus: Bus, most: int = 1000) -> frozenset[str]:
    """Samples of the steps behind the newest checkpoint or restore."""
    samples: set[str] = set()
    for entry in await bus.last(POLICY, most):
        kind = entry.fields.get("type")
        if kind in ("policy.checkpointed", "policy.restored"):
            break
        if kind == "policy.step":
            message = await readable(bus, entry)
            samples.update(message.samples if isinstance(message, StepDone) else ())
    return frozenset(samples)
