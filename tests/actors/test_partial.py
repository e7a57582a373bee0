"""The partial buffer: what was interrupted goes on from its prefix, or begins again where partial_rollout is off."""

from __future__ import annotations

import msgspec
import pytest

from actors.partial.actor import PartialSpec, run
from bus.ledger import read_accounts
from bus.messages.samples import Parked
from bus.topology import PARKED, PREFIXES
from tests.actors.house import messages, open_bus, put, rollout, running, until


@pytest.mark.parametrize(("partial", "reason", "kept"), [(True, "engine", 3), (False, "engine", 0), (False, "slice", 3)])
async def test_an_interrupted_sample_begins_again_where_partial_rollout_is_off(
    redis_url: str, run_name: str, partial: bool, reason: str, kept: int
) -> None:
    done = rollout(1, 0, n=2, tokens=3)
    parked = msgspec.structs.replace(Parked(task=done.task, response=done.response, reason="engine"), reason=reason)
    async with open_bus(redis_url, run_name, knobs={"partial_rollout": partial}) as bus:
        async with running(bus, "partial", run, PartialSpec()):
            await put(bus, PARKED, parked)

            async def moved() -> bool:
                return bool(await messages(bus, PREFIXES))

            await until(moved)
            [resumed] = await messages(bus, PREFIXES)
        assert resumed.response.n_tokens == kept
        assert (await read_accounts(bus)).tokens_dropped.get("restarted", 0) == 3 - kept
