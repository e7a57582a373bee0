"""A run that starts with a bound that is too small for its lengths is moved by its governor; a plan holds from exactly its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.recorder.history import history_of
from actors.trainer.record import path_of, read_record
from bus.knobs.live import read_history
from bus.knobs.plans import plan
from miles_async.governor.look import AUTHOR
from miles_async.settings.live import check_patch
from scripts.bench.schedule_house import Case, governed, run_of
from tests.actors.house import until
from tests.miles_async.test_governor import KNOB, replayed

pytestmark = pytest.mark.timeout(150)
PLANNED, STEPS = 3, 24


async def test_a_run_moves_its_own_bound_within_its_envelope_and_no_sample_waits_past_it(tmp_path: Path) -> None:
    more = {"governor": True, "governor_staleness": "0:3", "governor_interval": 4}
    case = Case(
        lengths="lognormal", load="R=T", bound=0, policy="auto", batch=2, group=4, slots=8, median_s=0.05, tokens=16, more=more
    )
    async with run_of(case, tmp_path) as (bus, _, _), governed(bus) as records:
        planned = await plan(bus, {"lr": 0.5}, at_step=PLANNED, author="me", check=check_patch)

        async def far_enough() -> bool:
            history = history_of(records)
            return bool(history.steps) and history.steps[-1].step >= STEPS and any(r["author"] == AUTHOR for r in history.knobs)

        await until(far_enough, deadline_s=100)
        patches = [p for p in await read_history(bus) if p.author == AUTHOR]
        [due] = [p for p in await read_history(bus) if p.plan == planned.epoch]
        seen = list(records)
    assert patches[0].values[KNOB] > 0 and patches[0].reason.startswith("idle: the trainer waited ")
    assert all(0 <= p.values[KNOB] <= 3 for p in patches)
    said = [(KNOB, p.values[KNOB], p.reason) for p in patches]
    assert replayed(seen)[: len(said)] == said, "the record gives the same decisions again"
    steps = history_of(seen).steps
    assert next(s.step for s in steps if s.knob_epoch >= due.epoch) == due.at_step == PLANNED
    bounds: list[int] = []
    for step in steps:
        record = read_record(path_of(str(tmp_path / "batches" / "{rollout_id}"), step.step))
        bound = int(record.knobs[KNOB])
        bounds.append(bound)
        admitted = max(bounds[-4:])  # what was issued under a bound of up to 3 before it was lowered drains for as many steps
        ages = [step.step - 1 - s.rollout.response.spans[-1].step for g in record.groups for s in g.samples]
        assert max(ages) <= admitted, f"step {step.step}: a sample that had ended waited past the bounds {bounds[-4:]}"
        assert record.knobs["lr"] == (0.5 if step.step >= PLANNED else 1e-6)
    assert len(set(bounds)) > 1
