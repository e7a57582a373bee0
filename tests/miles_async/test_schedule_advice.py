"""Advice on the bound from what a run's steps recorded: the sentences, and where there is nothing to say."""

import itertools
import json
import random
import re

import numpy as np
import pytest

from actors.recorder.history import history_of
from actors.trainer.spread import LENGTH, PACE, QUANTILES, RUNNING, SECONDS, STRAGGLER
from miles_async.console.report import write_report
from miles_async.console.whatif.advice import advise, predict, share
from miles_async.console.whatif.observed import Spread, observe

KNOBS = {
    "rollout_batch_size": 16, "n_samples_per_prompt": 8, "max_weight_staleness": 2, "staleness_policy": "split",
    "over_sampling_batch_size": 0, "sglang_server_concurrency": 64, "update_weights_interval": 1,
}  # fmt: skip
SIGMA = 0.6


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Simulations of smaller batches take half the time."""
    monkeypatch.setattr("miles_async.console.whatif.advice.MOST_SAMPLES", 64)


def run_of(steps=24, *, step_s=1.2, wait_s=0.0, sigma=SIGMA, knobs=(), more=()):
    """Records of a run with log-normal lengths of a mean of 100 tokens, 6 ms each."""
    draw = random.Random(3)
    records = [{"kind": "knob", "wall": 0.0, "epoch": 0, "values": KNOBS | dict(knobs)}]
    for number in range(1, steps + 1):
        lengths = [100 * np.exp(sigma * draw.gauss(0, 1) - sigma**2 / 2) for _ in range(128)]
        metrics = {"perf/wait_s": wait_s, "perf/train_s": step_s - wait_s, **dict(more)}
        for name, values in ((LENGTH, lengths), (SECONDS, [n * 0.006 for n in lengths]), (STRAGGLER, [2.0, 3.0])):
            metrics |= {f"{name}/p{q}": float(np.percentile(values, q)) for q in QUANTILES}
            metrics[f"{name}/mean"] = float(np.mean(values))
        records.append({"kind": "step", "wall": 1.0 + step_s * number, "step": number, "groups": [], "metrics": metrics})
    return records


def advice(**given):
    found = advise(history_of(run_of(**given)))
    assert found is not None
    return found


def test_a_run_is_seen_as_the_simulation_takes_it():
    seen = observe(history_of(run_of(wait_s=0.3)))
    assert seen is not None
    assert (seen.batch, seen.group, seen.slots, seen.bound, seen.rule) == (16, 8, 64, 2, "split")
    assert seen.step_s == pytest.approx(1.2)
    assert seen.train_s == pytest.approx(0.9)
    assert seen.running == pytest.approx(128 * 0.6 / 1.2, rel=0.03)


def test_steps_under_former_settings_are_not_taken_for_the_present_ones():
    records = run_of(24)
    patch = {"kind": "knob", "wall": 0.0, "epoch": 1, "values": {"sglang_server_concurrency": 8}}
    for record in records[1:]:
        record["knob_epoch"] = int(record["step"] > 14)
        if record["step"] > 14:  # its samples take twice as long
            record["metrics"] |= {key: 2 * value for key, value in record["metrics"].items() if key.startswith(SECONDS)}
    before, after = records[:15], records[15:]
    assert observe(history_of([*before, patch, *after[:6]])) is None, "the first of them trains what began before it"
    seen = observe(history_of([*before, patch, *after]))
    assert seen is not None
    assert len(seen.lengths) == 10 - 3
    assert seen.running == pytest.approx(128 * 1.2 / 1.2, rel=0.05)
    lost = {"kind": "knob", "wall": 0.0, "epoch": 9, "values": {"max_weight_staleness": 3}}
    anew = {"kind": "knob", "wall": 0.0, "epoch": 1, "values": {"lr": 0.1}}
    assert observe(history_of([*before, lost, anew, *after])) is not None, "an epoch that a lost bus took with it"


def test_what_the_filter_drops_takes_slots_as_well():
    plain, records = run_of(), []
    for record in plain:
        if record["kind"] == "step":
            dropped = {"kind": "drop", "wall": record["wall"], "group": "g", "reason": "zero_std_1", "samples": 8, "tokens": 400}
            records += [dropped] * 16
        records.append(record)
    seen = observe(history_of(records))
    assert seen is not None
    assert (seen.thrown, seen.thrown_length) == (0.5, pytest.approx(0.5, rel=0.05))
    assert seen.running == pytest.approx(1.5 * 128 * 0.6 / 1.2, rel=0.05), "half of the samples, half as long"
    groups = list(itertools.islice(seen.groups(), 1000))
    assert np.mean([bool(group.reason) for group in groups]) == pytest.approx(0.5, abs=0.05)
    tokens = [(group.reason, draw.tokens) for group in groups for draw in group.members]
    kept = np.mean([n for reason, n in tokens if not reason])
    assert np.mean([n for reason, n in tokens if reason]) == pytest.approx(kept / 2, rel=0.1)
    few, alone = {"sglang_server_concurrency": 32}, history_of(run_of(knobs={"sglang_server_concurrency": 32}))
    records[0] = {**records[0], "values": records[0]["values"] | few}
    found, without = advise(history_of(records)), advise(alone)
    assert found is not None and without is not None
    assert found.now.step_s > 1.3 * without.now.step_s, "with all slots in use a step takes the longer the more is dropped"


@pytest.mark.parametrize("straggler", [1.05, 1.4])
def test_members_of_a_group_are_as_alike_as_the_run_tells(straggler):
    records = run_of()
    for record in records[1:]:
        record["metrics"][f"{STRAGGLER}/mean"] = straggler
    seen = observe(history_of(records))
    assert seen is not None
    drawn = [[draw.seconds for draw in group.members] for group in itertools.islice(seen.groups(), 2000)]
    assert np.mean([max(group) / np.mean(group) for group in drawn]) == pytest.approx(straggler, rel=0.05)


def test_what_runs_is_read_from_all_steps_together_however_uneven_they_are():
    records, wall = run_of(), 1.0
    for number, record in enumerate(records[1:]):  # samples end in waves: a short step, a long one
        wall += 0.2 if number % 2 else 2.2
        record["wall"] = wall
    seen = observe(history_of(records))
    assert seen is not None
    assert seen.running == pytest.approx(128 * 0.6 / 1.2, rel=0.05)


def test_slots_that_no_setting_tells_are_the_most_that_ran():
    records = run_of(knobs={"sglang_server_concurrency": 0})
    for number, record in enumerate(records[1:]):
        record["metrics"][f"{RUNNING}/mean"] = 90.0 if number == 7 else 50.0
    seen = observe(history_of(records))
    assert seen is not None
    assert seen.slots == 90
    drawn = [draw for group in itertools.islice(seen.groups(), 500) for draw in group.members]
    assert np.mean([s.seconds for s in drawn]) == pytest.approx(0.6, rel=0.05)
    assert np.mean([s.tokens for s in drawn]) == pytest.approx(100, rel=0.05)
    assert np.percentile([s.tokens for s in drawn], 99) == pytest.approx(100 * np.exp(2.33 * SIGMA - 0.18), rel=0.1)


def test_a_choice_is_what_a_long_simulation_of_the_same_lengths_says(monkeypatch):
    monkeypatch.undo()
    short = advice()
    monkeypatch.setattr("miles_async.console.whatif.advice.STEPS", 150)
    long = predict(short.observed, "split", 2, 64)
    assert short.now.step_s == pytest.approx(long.step_s, rel=0.02)
    assert short.now.masked == pytest.approx(long.masked, abs=0.004)
    assert [c.bound for c in short.choices] == [1, 2, 3, 4, 5, 6]
    assert short.choices[0].step_s > 1.3 * short.choices[1].step_s
    assert short.choices[0].masked > 0.002
    assert short.choices[5].masked < 0.001


def test_a_bound_that_serves_is_left_alone():
    assert advice(knobs={"max_weight_staleness": 3}).lines[-1].startswith("Bound 3 serves these lengths")


def test_a_bound_that_starves_is_raised_and_the_gain_is_named():
    last = advice(knobs={"max_weight_staleness": 1}, step_s=1.8, wait_s=0.6).lines[-1]
    found = re.match(r"Bound ([2-4]) masks (.*) % and is ([\d.]+) times as fast: [\d.]+ s a step, \d+ running\.", last)
    assert found, last
    assert float(found[2]) <= 1.0
    assert float(found[3]) > 1.3


def test_whole_groups_are_told_what_splitting_them_would_gain():
    found = advice(knobs={"staleness_policy": "whole", "over_sampling_batch_size": 16}, step_s=1.3, wait_s=0.1)
    assert found.now.rule == "whole"
    assert found.now.masked > 0.02
    assert "under split" in found.lines[-1]


def test_a_run_with_fewer_groups_in_generation_than_its_bound_admits_is_told_what_all_would_give():
    found = advice(knobs={"over_sampling_batch_size": 16})
    assert found.now.bound == 2 and found.now.step_s > found.choices[1].step_s and found.now.running < found.choices[1].running
    assert "Bound 2, with all that it admits in generation, masks" in found.lines[-1]


def limit(*, wait_s=0.9, **knobs):
    """The sentence about engines that are the limit; empty where there is none."""
    lines = advice(knobs={"max_weight_staleness": 3, "engine": "sglang", **knobs}, step_s=1.3, wait_s=wait_s).lines
    return "".join(line for line in lines if line.startswith("The engines are the limit"))


def test_engines_that_are_the_limit_are_named_and_the_trainers_gpus_where_they_may_help():
    said = limit()
    assert re.match(r"The engines are the limit: 64 slots are full, and the trainer works 3\d % of a step\.", said), said
    assert "--colocate --no-offload" in said
    for other in ({"engine": "external"}, {"colocate": True}, {"lend_trainer_gpus": True}):
        said = limit(**other)
        assert said and "--colocate" not in said
    assert not limit(wait_s=0.1)
    assert not limit(wait_s=1.29, sglang_server_concurrency=2048)


def pace(records, *, alone, per_running, scatter):
    """Add what samples say of their pace: `scatter` of the number running, half of it within steps."""
    for number, record in enumerate(records[1:]):
        running = 60.0 + scatter * (1 if number % 2 else -1)
        record["metrics"] |= {
            f"{RUNNING}/mean": running, f"{RUNNING}/variance": scatter**2,
            f"{PACE}/mean": alone + per_running * running, f"{PACE}/per_running": per_running,
        }  # fmt: skip
    return records


def test_requests_that_slow_each_other_are_seen_and_fewer_slots_are_offered(monkeypatch):
    monkeypatch.undo()
    given = run_of(32, step_s=0.9, knobs={"sglang_server_concurrency": 128})
    records = pace(given, alone=0.0024, per_running=6e-5, scatter=20.0)
    seen = observe(history_of(records))
    assert seen is not None
    assert seen.slowdown == pytest.approx(6e-5 / 0.0024)
    found = advise(history_of(records))
    assert found is not None
    plain = advise(history_of(run_of(32, step_s=0.9, knobs={"sglang_server_concurrency": 128})))
    assert plain is not None
    assert any("does not show" in line for line in plain.lines)
    assert not any("does not show" in line for line in found.lines)
    assert found.choices[1].masked > plain.choices[1].masked
    assert [line for line in found.lines if re.match(r"With \d\d slots bound 2 masks [01](\.\d)? %, at [\d.]+ s a step", line)]


def test_samples_that_always_run_in_equal_numbers_do_not_show_what_more_would_cost():
    seen = observe(history_of(pace(run_of(), alone=0.0024, per_running=6e-5, scatter=1.0)))
    assert seen is not None
    assert seen.slowdown == 0.0


@pytest.mark.parametrize(
    "records",
    [
        [],
        run_of(3),
        run_of(10)[1:],
        run_of(10, more={"perf/turn_s": 1.0}),
        [{"kind": "step", "wall": float(n), "step": n, "groups": [], "metrics": {}} for n in range(20)],
        run_of(10, more={"perf/wait_s": None}),  # how a file has NaN
        run_of(10, more={"perf/wait_s": float("inf")}),
    ],
    ids=["nothing", "few steps", "no knobs", "shared GPUs", "steps of another release", "NaN", "infinity"],
)
def test_a_run_that_tells_too_little_gets_no_advice(records):
    assert advise(history_of(records)) is None


def test_batches_of_thousands_are_advised_on_as_well():
    found = advice(knobs={"rollout_batch_size": 512, "sglang_server_concurrency": 2048}, step_s=1.2)
    small = advice()
    assert found.now.step_s == pytest.approx(small.now.step_s, rel=0.1)
    assert found.now.running == pytest.approx(32 * small.now.running, rel=0.1)


def test_the_doctor_gives_the_advice_and_finds_nothing_wrong_with_the_run_for_it(whole):
    status, out, _ = whole.ask("doctor")
    assert (status, "versions or more" in out) == (0, False)
    assert whole.ask_json("doctor")[1]["advice"] is None
    lines = [json.dumps(record) + "\n" for record in run_of(step_s=1.8, wait_s=0.6, knobs={"max_weight_staleness": 1})]
    (whole.dir / "metrics.jsonl").write_text("".join(lines))
    status, out, _ = whole.ask("doctor")
    assert status == 0
    assert re.search(r"^Bound [2-4] masks .* times as fast", out, re.MULTILINE)
    assert out.splitlines()[-1] == "nothing is wrong"
    said = whole.ask_json("doctor")[1]["advice"]
    assert said["now"]["bound"] == 1
    assert [choice["bound"] for choice in said["choices"]] == [1, 2, 3, 4, 5, 6]


def test_the_report_shows_the_spreads_and_the_advice(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in run_of()))
    page = write_report(tmp_path).read_text("utf-8")
    section = page[page.index("<h2>Scheduling</h2>") :]
    section = section[: section.index("</section>")]
    for word in ("tokens masked", "One sample in 100"):
        assert word in section
    assert section.count("<tr>") == 7
    [data] = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    lengths, shares = data["spreads"][LENGTH]
    assert lengths == sorted(lengths) and shares[0] == 1.0 and shares[-1] == pytest.approx(0.002)


def test_a_spread_is_read_both_ways():
    spread = Spread((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0))
    assert [spread.at(q / 100) for q in QUANTILES] == list(spread.values)
    assert spread.at(0.995) == pytest.approx(7.0)
    for value in (0.0, 0.5, 2.0, 4.4, 8.0):
        assert spread.at(spread.below(value)) == pytest.approx(value)
    assert (spread.below(-1.0), spread.below(10.0)) == (0.0, 1.0)
    equal = Spread((4.0,) * 7)
    assert (equal.below(3.9), equal.below(4.0), equal.at(0.3)) == (0.0, 1.0, 4.0)


def test_a_report_is_written_where_a_metric_is_no_number(tmp_path):
    records = run_of(more={"train/loss": None, "rollout/raw_reward": None})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "<h2>Scheduling</h2>" in write_report(tmp_path).read_text("utf-8"), "the steps were left out"


def test_shares_are_said_as_they_are_read():
    assert [share(v) for v in (0.0, 0.0004, 0.001, 0.0123, 0.09, 0.123)] == [
        "0 %",
        "0 %",
        "0.1 %",
        "1.2 %",
        "9.0 %",
        "12 %",
    ]
