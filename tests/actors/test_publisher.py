"""The publisher room: a version is ordered until it is served, and who is late says why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from actors.publisher.actor import PublisherSpec, run
from bus import Bus
from bus.messages.control import Event, Vitals
from bus.messages.policy import Activate, PolicyActive, PolicyAnnounced, WeightManifest
from bus.messages.versions import PolicyVersion
from bus.topology import ACTIVE, EVENTS, POLICY
from tests.actors.house import messages, open_bus, put, running, until


@pytest.mark.parametrize(
    ("waits_for", "says"),
    [("the engine to boot", "it waits for the engine to boot"), ("", "it does not say why")],
)
async def test_a_worker_that_is_late_is_told_with_its_reason_and_ordered_again(
    redis_url: str, run_name: str, tmp_path: Path, waits_for: str, says: str
) -> None:
    manifest = WeightManifest(path=str(tmp_path))
    vitals = Vitals(
        actor="w", role="generation", pid=1, host="h", state="running", wall=time.time(), waits_for=waits_for
    )

    async def orders(bus: Bus, at_least: int) -> list[Activate]:
        found = [m for m in await messages(bus, ACTIVE) if isinstance(m, Activate)]
        return found if len(found) >= at_least else []

    async def served(bus: Bus) -> list[Any]:
        return [m for m in await messages(bus, ACTIVE) if isinstance(m, PolicyActive) and m.serving == {"w": 1}]

    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "publisher", run, PublisherSpec(activation_deadline_s=0.2)):
            await put(bus, POLICY, PolicyAnnounced(version=PolicyVersion(1, 0), manifest=manifest))
            await put(bus, EVENTS, vitals)
            found = await until(lambda: orders(bus, 2))
            assert {(o.version.id, o.workers, o.manifest.transport) for o in found} == {(1, ("w",), "disk")}
            late = next(m for m in await messages(bus, EVENTS) if isinstance(m, Event) and m.kind == "activation late")
            assert late.text == f"w has not served version 1 within 0.2 s: {says}; ordered again, in files"
            await put(bus, EVENTS, Event(actor="w", kind="activated", text="", wall=time.time(), data={"version": 1}))
            await until(lambda: served(bus))
