"""The governor: what it decides from a record, that it keeps to the envelope and comes to rest, and what it does on a bus."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from actors.recorder.feed import Feed
from actors.recorder.history import History, history_of
from actors.recorder.records import Record
from actors.trainer.spread import LENGTH, QUANTILES, SECONDS
from bus import Bus, Out
from bus.knobs.live import propose, publish_initial, read_history, values_at
from bus.messages.control import Event
from bus.messages.policy import StepDone
from bus.messages.versions import PolicyVersion
from bus.topology import EVENTS, KNOBS, POLICY
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.scene import read_scene
from miles_async.governor.decide import REST, GovernorDecision, decide
from miles_async.governor.govern import act, govern
from miles_async.governor.look import AUTHOR, GovernorLook, look
from miles_async.governor.standing import read_standing
from miles_async.launcher.prepare import live_kinds
from miles_async.settings.live import check_patch
from tests.actors.house import messages, until
from tests.miles_async.console_data import config
from tests.miles_async.test_settings_live import values_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of fewer steps take half the time."""
    monkeypatch.setattr("miles_async.console.whatif.advice.STEPS", 16)


Truth = Callable[[dict[str, Any]], dict[str, float]]
KNOB = "max_weight_staleness"
SIGMA = 0.6


def settings_with(**fields: Any) -> dict[str, Any]:
    given = {
        "use_tis": True, "rollout_batch_size": 4, "n_samples_per_prompt": 8, "sglang_server_concurrency": 16,
        "governor": True, "governor_staleness": "1:6", "max_weight_staleness": 1, "governor_interval": 4,
    }  # fmt: skip
    return values_of(**(given | fields))


def truth(values: dict[str, Any]) -> dict[str, float]:
    """What steps of 1.2 s of training take at each bound, as simulated with these lengths."""
    step_s = {0: 3.8, 1: 1.8, 2: 1.23}.get(values[KNOB], 1.21)
    return {
        "step_s": step_s,
        "wait": max(0.0, step_s - 1.2),
        "masked": {1: 0.008, 2: 0.008}.get(values[KNOB], 0.0),
        "ess": 0.9,
    }


def metrics_of(seen: dict[str, float], draw: random.Random) -> dict[str, float]:
    lengths = [100 * math.exp(SIGMA * draw.gauss(0, 1) - SIGMA**2 / 2) for _ in range(32)]
    found = {"perf/wait_s": seen["wait"], "rollout/masked_fraction": seen["masked"], "train/ess_ratio": seen["ess"]}
    for name, values in ((LENGTH, lengths), (SECONDS, [n * 0.006 for n in lengths])):
        found |= {f"{name}/p{q}": float(v) for q, v in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}
        found[f"{name}/mean"] = float(np.mean(values))
    return found


class Play:
    """A run that does what `truth` says of its knobs, with the governor looking on. `hands`: step -> what an operator patches
    after it. `records` is what the recorder writes."""

    def __init__(self, values: dict[str, Any], truth: Truth = truth, *, seed: int = 1, noise: float = 0.0) -> None:
        self.records: list[Record] = []
        self.history = History()
        self.values, self.truth = dict(values), truth
        self.looks: list[GovernorLook] = []
        self.decisions: list[GovernorDecision] = []
        self._draw, self._noise, self._step, self._wall = random.Random(seed), noise, 0, 0.0
        self._live = dict(values)  # of the step under way, which a patch of this moment does not reach
        self._epoch = -1
        self._after = 0
        self.patch(values, "launcher")

    def patch(self, values: dict[str, Any], author: str, reason: str = "") -> None:
        self.values |= values
        epoch = sum(r["kind"] == "knob" for r in self.records)
        self._take({"kind": "knob", "wall": self._wall, "epoch": epoch, "values": values, "author": author, "reason": reason})

    def run(self, steps: int, hands: dict[int, dict[str, Any]] | None = None, **more: float) -> Play:
        for _ in range(steps):
            self._step += 1
            epoch = self._epoch
            self._epoch = sum(r["kind"] == "knob" for r in self.records) - 1
            seen = self.truth(self._live) | more
            self._live = dict(self.values)
            self._wall += seen["step_s"] * (1 + self._noise * self._draw.uniform(-1, 1))
            self._take(
                {"kind": "step", "wall": self._wall, "step": self._step, "knob_epoch": max(0, epoch), "groups": ["g"] * 16,
                 "metrics": metrics_of(seen, self._draw)}
            )  # fmt: skip
            if hands and (given := hands.get(self._step)):
                self.patch(given, "me@host", "by hand")
            if (found := look(self.history, self._after)) is not None:
                self._after = found.due
                self.looks.append(found)
                self.decisions.append(decide(found))
                if (move := self.decisions[-1].move) is not None:
                    self.patch({move.knob: move.value}, AUTHOR, move.reason)
        return self

    def _take(self, record: Record) -> None:
        self.records.append(json.loads(json.dumps(record).replace("NaN", "null")))  # as the file has it
        self.history.fold(record)

    @property
    def patches(self) -> list[Record]:
        return [r for r in self.records if r["kind"] == "knob" and r["author"] == AUTHOR]

    @property
    def moves(self) -> list[tuple[str, int]]:
        """(purpose, bound) of each patch."""
        return [(r["reason"].partition(":")[0], r["values"][KNOB]) for r in self.patches]

    @property
    def notes(self) -> list[tuple[str, str]]:
        return sorted({(n.kind, n.about) for d in self.decisions for n in d.notes})


def replayed(records: list[Record]) -> list[tuple[str, int, str]]:
    """What a governor says that reads the record from its beginning."""
    history, after, said = History(), 0, []
    for record in records:
        history.fold(record)
        found = look(history, after) if record["kind"] == "step" else None
        if found is not None:
            after = found.due
            if (move := decide(found).move) is not None:
                said.append((move.knob, move.value, move.reason))
    return said


# -- decisions --------------------------------------------------------------------------------------------------------


def test_a_trainer_that_waits_gets_a_higher_bound_with_its_figures_and_then_there_is_rest() -> None:
    play = Play(settings_with()).run(60)
    assert play.moves == [("idle", 2)]
    assert play.patches[0]["reason"].startswith("idle: the trainer waited 33% of the time, with 1")
    assert "as simulated, max_weight_staleness 2 gives 1.2" in play.patches[0]["reason"]


def test_a_change_that_did_not_pay_is_taken_back_and_not_tried_again_soon() -> None:
    play = Play(settings_with(), lambda values: truth({KNOB: 1})).run(4 * REST)
    assert play.moves == [("idle", 2), ("back", 1)]
    assert "did not pay: a step takes 1.8 s, 1.8 s before" in play.patches[1]["reason"]


def test_a_bound_higher_than_it_needs_to_be_comes_down_step_by_step() -> None:
    play = Play(settings_with(max_weight_staleness=5)).run(60)
    assert play.moves == [("fresh", 4), ("fresh", 3), ("fresh", 2)], "at 1 the trainer would wait"


def test_ratios_that_spread_lower_the_bound_to_the_end_of_its_envelope_which_is_told() -> None:
    play = Play(settings_with(max_weight_staleness=4, governor_staleness="2:6")).run(60, ess=0.3)
    assert play.moves == [("old", 3), ("old", 2)]
    assert ("edge", f"{KNOB} low") in play.notes


def test_tokens_that_are_lost_raise_the_bound() -> None:
    play = Play(settings_with(max_weight_staleness=2), lambda v: truth(v) | {"masked": 0.05 if v[KNOB] == 2 else 0.0}).run(14)
    assert play.moves == [("old", 3)]


def test_what_would_serve_beyond_the_envelope_is_told_and_not_done() -> None:
    play = Play(settings_with(governor_staleness="0:1")).run(20)
    assert play.moves == [] and ("edge", f"{KNOB} high") in play.notes


def test_slots_are_raised_where_all_of_them_run() -> None:
    fields = {"governor_staleness": None, "governor_concurrency": "8:16", "sglang_server_concurrency": 8, KNOB: 4}
    play = Play(settings_with(**fields), lambda _: {"step_s": 2.4, "wait": 1.2, "masked": 0.0, "ess": 0.9}).run(13)
    assert [p["values"] for p in play.patches] == [{"sglang_server_concurrency": 11}]


def test_a_cap_on_what_is_under_way_is_raised_before_the_bound() -> None:
    fields = {
        "governor_oversampling": "4:12",
        "over_sampling_batch_size": 4,
        KNOB: 3,
        "sglang_server_concurrency": 32,
    }
    play = Play(settings_with(**fields), lambda _: {"step_s": 1.0, "wait": 0.6, "masked": 0.0, "ess": 0.9}).run(11)
    assert [p["values"] for p in play.patches] == [{"over_sampling_batch_size": 5}]


def test_a_knob_set_by_hand_is_left_alone_until_its_envelope_is_given_again() -> None:
    play = Play(settings_with(max_weight_staleness=3)).run(30, {3: {KNOB: 1}})
    assert play.moves == [] and play.notes == [("hand", KNOB)]
    play.patch({"governor_staleness": "1:4"}, "me@host")
    play.run(12)
    assert play.moves == [("idle", 2)]


def test_nothing_is_decided_while_a_change_settles_or_the_governor_is_off() -> None:
    assert Play(settings_with()).run(30, {n: {"lr": n * 1e-6} for n in range(1, 30, 4)}).decisions == []
    assert Play(settings_with(governor=False)).run(30).decisions == []


def test_who_is_behind_makes_all_decisions_in_their_order() -> None:
    play = Play(settings_with(max_weight_staleness=2, governor_staleness="2:2")).run(24)
    made: list[GovernorDecision] = []
    while (found := look(play.history, made[-1].due if made else 0)) is not None:
        made.append(decide(found))
    assert [d.due for d in made] == [7, 11, 15, 19, 23] and made == play.decisions


def test_metrics_that_are_no_numbers_are_told_and_the_others_are_used() -> None:
    play = Play(settings_with()).run(20, ess=math.nan)
    assert play.moves == [("idle", 2)] and play.notes == [("unusable", "train/ess_ratio")]
    assert replayed(play.records) == [(KNOB, 2, play.patches[0]["reason"])], "the file has null for NaN"
    blind = Play(settings_with()).run(20, wait=math.nan)
    assert blind.moves == [] and ("unusable", "the simulation") in blind.notes


def test_a_value_that_the_rules_refuse_is_passed_over_and_told() -> None:
    # The bound may not fall to 0 under split, which was patched in after the envelope was given.
    play = Play(settings_with(staleness_policy="whole", governor_staleness="0:2")).run(2, {1: {"staleness_policy": "split"}})
    play.run(20, ess=0.1)
    assert play.moves == [] and ("refused", f"{KNOB}=0") in play.notes


steps_of_truth = st.lists(
    st.tuples(st.floats(0.5, 5.0), st.floats(0.0, 0.9), st.floats(0.0, 0.1), st.floats(0.0, 1.0)),
    min_size=7,
    max_size=7,
)


@given(steps_of_truth, st.integers(1, 3), st.integers(4, 6), st.integers(0, 1 << 30), st.sampled_from([0.0, 0.02, 0.2]))
@hypothesis_settings(max_examples=8, deadline=None)
def test_whatever_a_run_does_the_governor_keeps_inside_rests_and_is_what_its_record_says(
    by_bound: list[tuple[float, float, float, float]], low: int, high: int, seed: int, noise: float
) -> None:
    def wild(values: dict[str, Any]) -> dict[str, float]:
        step_s, wait, masked, ess = by_bound[values[KNOB]]
        return {"step_s": step_s, "wait": wait * step_s, "masked": masked, "ess": ess}

    small = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "sglang_server_concurrency": 3}  # the simulation's time
    values = settings_with(max_weight_staleness=low, governor_staleness=f"{low}:{high}", **small)
    play = Play(values, wild, seed=seed, noise=noise).run(40, {12: {"lr": 3e-6}})
    assert all(low <= bound <= high for _, bound in play.moves)
    bounds = [low, *(bound for _, bound in play.moves)]
    for at, (purpose, bound) in enumerate(play.moves):  # 40 steps are no more than REST decisions
        if purpose == "back":
            assert bound == bounds[at - 1], play.moves
        elif purpose != "old":  # data that are too old go before rest
            assert bound not in bounds[: at + 1], play.moves
    assert replayed(play.records) == [(*next(iter(p["values"].items())), p["reason"]) for p in play.patches]
    if play.decisions and play.decisions[-1].move is None:
        again = look(history_of(play.records), play.decisions[-1].due - 1)
        assert again is None or decide(again) == play.decisions[-1], "a decision that is made late is the same"


# -- on a bus ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
async def test_on_a_bus_it_patches_as_anybody_does_and_goes_on_after_a_restart(
    redis_url: str, run_name: str, restarted: bool
) -> None:
    async with Bus(config(redis_url, run_name)) as bus:
        await publish_initial(bus, settings_with(), live_kinds())
        draw, stop, feed = random.Random(1), asyncio.Event(), Feed(bus)
        step = 0

        async def train(n: int, epoch: int, bound: int) -> None:
            nonlocal step
            for _ in range(n):
                step += 1
                seen = truth({KNOB: bound})
                metrics = metrics_of(seen, draw) | {"perf/step_s": seen["step_s"]}
                version = PolicyVersion(id=step + 1, step=step)
                done = StepDone(step=step, version=version, trained_on=version, groups=("g",) * 16, metrics=metrics,
                                knob_epoch=epoch, wall=1000.0 + 1.8 * step)  # fmt: skip
                await bus.append([Out(POLICY, done)])
            while (await feed.read(0.0))[1]:
                continue

        async def bound() -> int:
            history = await read_history(bus)
            return int(values_at(history, history[-1].epoch).max_weight_staleness)

        async def moved() -> bool:
            return await bound() == 2

        governor = asyncio.create_task(govern(bus, feed, stop))
        await train(6, 0, 1)
        await until(moved)

        async def stands() -> bool:
            return (found := await read_standing(bus)) is not None and found.changes == 1

        await until(stands)
        if restarted:  # the launcher died; another reads the record from its beginning
            governor.cancel()
            await feed.close()
            feed = Feed(bus)
            while (await feed.read(0.0))[1]:
                continue
            governor = asyncio.create_task(govern(bus, feed, stop))
        await train(1, 1, 2)
        await propose(bus, {KNOB: 3}, author="me@host", check=check_patch)
        await train(8, 2, 3)

        async def left() -> bool:
            found = await read_standing(bus)
            return found is not None and any(n.kind == "hand" for n in found.notes)

        await until(left)
        scene = await read_scene(bus)
        [finding] = [f for f in diagnose(scene) if f.about == "governor"]
        assert (finding.level, finding.rule) == ("info", "governor") and "by me@host and is left alone" in finding.text
        assert scene.governor is not None
        assert scene.governor.text().startswith(f"governor: {KNOB} 3 of 1:6 (left to me@host); 1 change, the last ")
        stop.set()
        await governor
        await feed.close()
        authors = [p.author for p in await messages(bus, KNOBS)]
        assert authors == ["launcher", AUTHOR, "me@host"]
        events = [e for e in await messages(bus, EVENTS) if isinstance(e, Event)]
        assert [e.kind for e in events] == ["governor", "governor/hand"]
        assert events[0].text.startswith(f"epoch 1 after step 6: {KNOB}=2 (idle: ")


async def test_who_tunes_while_it_thinks_is_not_overruled(redis_url: str, run_name: str) -> None:
    play = Play(settings_with()).run(8)
    assert play.moves == [("idle", 2)]
    async with Bus(config(redis_url, run_name)) as bus:
        await publish_initial(bus, settings_with(), live_kinds())
        await propose(bus, {KNOB: 3}, author="me@host", check=check_patch)
        await act(bus, play.looks[0], play.decisions[0], set())
        assert [p.author for p in await read_history(bus)] == ["launcher", "me@host"]
