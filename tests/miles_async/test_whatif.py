"""What a run would do under other settings: the simulation against the model, what it reads of a record, and the command."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.recorder.file import FILE
from bus.messages.groups import OpenGroup
from miles_async.cli.app import main
from miles_async.console.schedule import Sample, Setup, simulate
from miles_async.console.whatif import compare, comparison, recorded, sound, text
from miles_async.console.whatif.engines import NEVER, Engines, Running
from miles_async.console.whatif.setup import Draw, DrawnGroup, Knobs, Pace
from miles_async.console.whatif.simulation import Simulation, Stands
from miles_async.settings.errors import SettingsError
from miles_async.settings.live import initial_values
from miles_async.settings.load import settings_from
from miles_async.settings.runs import write_run_file

GROUPS, N, SLOTS, MEAN_S, SIGMA = 16, 8, 64, 0.6, 0.6
ROLLOUT_S = GROUPS * N * MEAN_S / SLOTS


def seconds(draw: random.Random) -> float:
    return MEAN_S * math.exp(SIGMA * draw.gauss(0, 1) - SIGMA**2 / 2)


def groups(seed: int, *, reason: str = "", every: int = 1, size: int = N, even: bool = True):
    """Endless groups of 100 tokens a sample, or in the mean; one of so many with a reason to be dropped."""
    draw, number = random.Random(seed), 0
    while True:
        number += 1
        took = [seconds(draw) for _ in range(size)]
        members = tuple(Draw(100 if even else max(1, round(100 * s / MEAN_S)), s) for s in took)
        yield DrawnGroup(members, reason if number % every == 0 else "")


def knobs(**more) -> Knobs:
    plain = {
        "max_weight_staleness": 2,
        "staleness_policy": "split",
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": N,
    }
    return Knobs(**(plain | {"slots": SLOTS} | more))


def play(given: Knobs, *, pace: Pace | None = None, steps: int = 24, **drawn):
    drawn_groups = groups(5, size=given.n_samples_per_prompt, **drawn)
    return Simulation(given, pace or Pace(train_s=ROLLOUT_S), drawn_groups, random.Random(1)).play(steps, 15)


# -- the simulation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "bound"), [("whole", 0), ("split", 1), ("split", 2), ("whole", 2), ("member", 1)])
def test_the_rooms_own_code_gives_the_figures_of_the_model(rule, bound):
    """The model in console/schedule has its own words for the same rules."""
    draw = random.Random(5)
    samples = (Sample(seconds(draw), 100.0) for _ in iter(int, 1))
    model = simulate(Setup(rule=rule, bound=bound, queue=SLOTS, train_s=ROLLOUT_S, steps=95), samples)
    policy = rule if bound else "auto"
    found = play(knobs(max_weight_staleness=bound, staleness_policy=policy), steps=80)
    assert found.step_s == pytest.approx(model.step_s, rel=0.03)
    assert found.masked == pytest.approx(model.masked, abs=0.006)
    assert found.idle == pytest.approx(1 - model.running / SLOTS, abs=0.02)


def test_each_setting_does_to_the_simulated_run_what_it_does_to_a_run():
    now = play(knobs())
    assert now.efficiency > 0.97
    assert now.dropped.keys() <= {"outlasted"}
    assert play(knobs(max_weight_staleness=1)).step_s > 1.3 * now.step_s
    assert play(knobs(slots=32)).step_s == pytest.approx(2 * ROLLOUT_S, rel=0.03)
    assert play(knobs(slots=16, num_generation_workers=2)).step_s == pytest.approx(2 * ROLLOUT_S, rel=0.03)
    assert play(knobs(rollout_batch_size=8), pace=Pace(train_token_s=ROLLOUT_S / 12_800)).step_s < 0.6 * now.step_s
    assert play(knobs(n_samples_per_prompt=4)).wait > now.wait - 0.01
    assert play(knobs(over_sampling_batch_size=16)).idle > now.idle + 0.05
    assert play(knobs(update_weights_interval=2)).mean_age > now.mean_age + 0.5
    assert play(knobs(staleness_policy="drop")).dropped.keys() == {"outlasted"}
    waiting = play(knobs(staleness_policy="wait", staleness_lookahead=GROUPS))
    assert waiting.wait > now.wait + 0.1
    dropping = play(knobs(), reason="zero_std_1", every=4)
    assert dropping.dropped == {"zero_std_1": pytest.approx(0.25, abs=0.02)}
    assert dropping.step_s == pytest.approx(ROLLOUT_S / 0.75, rel=0.05)


def test_an_interrupted_sample_goes_on_or_begins_anew_as_partial_rollout_says():
    on = play(knobs(aborts=True))
    assert on.step_s == pytest.approx(play(knobs()).step_s, rel=0.03)
    assert play(knobs(aborts=True, partial_rollout=False)).step_s > 1.3 * on.step_s


def test_the_tails_slots_and_slices_are_those_of_the_workers():
    slow, longest = Pace(slowdown=0.2), {"tail_slots": 2, "tail_after_tokens": 150}
    workers = {"slots": 16, "num_generation_workers": 4, "max_weight_staleness": 1}
    before = play(knobs(**workers), pace=slow, steps=30, even=False)
    lane = play(knobs(**workers, **longest), pace=slow, steps=30, even=False)
    assert lane.max_age < before.max_age, "where few run, the longest end under fewer versions"
    sliced = play(knobs(max_tokens_per_slice=30), steps=24)
    assert sliced.step_s == pytest.approx(play(knobs(), steps=24).step_s, rel=0.05)


def test_a_run_that_cannot_go_on_says_what_its_trainer_waits_for():
    with pytest.raises(Stands, match="samples"):
        play(knobs(), reason="zero_std_1", steps=16)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), abort=st.booleans(), slices=st.sampled_from([0, 7]), tail=st.sampled_from([0, 2]))
def test_every_token_of_a_sample_has_one_version_however_often_it_is_interrupted(seed, abort, slices, tail):
    chance = random.Random(seed)
    engines = Engines(workers=3, slots=2, slowdown=0.1, tail_slots=tail, tail_after=12, slice_tokens=slices)
    now, step, left = 0.0, 0, 12
    for worker in engines.workers:
        engines.load(worker, 0, 0.0, abort=False)
    for index in range(left):
        group = OpenGroup(group_id=f"g{index}", prompt_id="", n_samples=1)
        engines.issue(Running(group, 0, Draw(chance.randrange(1, 40), chance.uniform(0.01, 3.0))))
    while left:
        engines.fill()
        end, worker = engines.next_end()
        assert end < NEVER
        if chance.random() < 0.3:
            now += (end - now) * chance.random()
            engines.advance(now)
            step += 1
            for each in engines.workers:
                engines.load(each, step, chance.choice([0.0, 0.5]), abort=abort)
            continue
        now = end
        engines.advance(now)
        if (run := engines.end(worker)) is not None:
            spans = run.spans()
            assert sum(span.n for span in spans) == run.draw.tokens
            assert all(a.step <= b.step for a, b in pairwise(spans))
            left -= 1
    assert engines.running == 0


# -- the record ------------------------------------------------------------------------------------------------------

SETTINGS = settings_from(
    hf_checkpoint="builtin:arithmetic", prompt_data="x.jsonl", num_rollout=99, rm_type="math", use_tis=True,
    max_weight_staleness=2, staleness_policy="split", rollout_batch_size=GROUPS, n_samples_per_prompt=N,
    num_generation_workers=1, sglang_server_concurrency=SLOTS, dynamic_sampling_filter_path="none",
)  # fmt: skip
STEP_S, PUBLISH_S = 1.2, 0.05


def record(steps=30, *, lives=True, wall_s=STEP_S, **metrics):
    """A run that does a step in 1.2 s: 0.1 s of waiting, 1.05 s of training, 0.05 s between."""
    draw = random.Random(3)
    lines = [{"kind": "knob", "wall": 0.0, "epoch": 0, "values": initial_values(SETTINGS)}]
    for step in range(1, steps + 1):
        took = [[seconds(draw) for _ in range(N)] for _ in range(GROUPS)]
        every = sorted(s for group in took for s in group)
        numbers = {"perf/wait_s": 0.1, "perf/train_s": 1.05, "perf/turned_s": 0.02, "rollout/tokens": 12_800.0}
        for q in (0, 25, 50, 75, 90, 99, 100):
            at = every[min(len(every) - 1, len(every) * q // 100)]
            numbers |= {f"rollout/generate_s/p{q}": at, f"rollout/response_len/p{q}": 100 * at / MEAN_S}
        numbers["rollout/generate_s/mean"] = sum(every) / len(every)
        wall = 100 + wall_s * step
        line = {
            "kind": "step",
            "wall": wall,
            "entry": f"policy@{round(1e3 * wall)}-0",
            "step": step,
            "version": step + 1,
        }
        line |= {"groups": [f"g{step}-{i}" for i in range(GROUPS)], "metrics": numbers | metrics}
        if lives:
            line["lives"] = [
                [i, round(100 * s / MEAN_S), round(1e3 * s), 4] for i, group in enumerate(took) for s in group
            ]
        lines.append(line)
        served = wall + PUBLISH_S
        lines.append(
            {"kind": "activated", "wall": served, "entry": f"events@{round(1e3 * served)}-0", "version": step + 1}
        )
        lines[-1] |= {"actor": "w0", "pause_s": 0.03, "total_s": 0.04, "step": step}
    return lines


def test_a_record_is_read_as_the_run_was():
    seen = recorded(record())
    assert seen.measured.steps == 26  # the first four fill the run up
    assert seen.measured.step_s == pytest.approx(STEP_S)
    assert seen.measured.wait == pytest.approx(0.1 / STEP_S)
    assert (seen.knobs.slots, seen.knobs.num_generation_workers, seen.notes) == (SLOTS, 1, ())
    pace = seen.pace
    assert pace.train_s + pace.train_token_s * 12_800 == pytest.approx(1.05)
    assert pace.between_s == pytest.approx([0.05] * 26)
    assert pace.publish_s == pytest.approx([PUBLISH_S] * 26)
    assert (pace.hop_s, pace.pause_s[0], pace.slowdown) == (0.01, 0.03, 0.0)
    assert {len(group) for group in seen.pool} == {N}
    taken = [d.seconds for group in seen.pool for d in group]
    assert sum(taken) / len(taken) == pytest.approx(MEAN_S * (1 - 0.03 / STEP_S), rel=0.05)


def test_a_group_that_was_trained_in_parts_is_one_group_and_one_at_the_edge_is_left_out():
    lines = record()
    steps = [line for line in lines if line["kind"] == "step"]
    for before, after in pairwise(steps[9:]):  # one late member a step, trained with the next
        late = before["lives"].pop(0)
        after["groups"].append(before["groups"][0])
        after["lives"].append([GROUPS, *late[1:]])
    steps[-1]["lives"].pop(0)  # of the last one, only the early members are known
    pool = recorded(lines).pool
    assert {len(group) for group in pool} == {N}
    assert len(pool) == GROUPS * (
        len(steps) - 8
    )  # four steps in which the run fills up, four whose groups may have more to come


def test_what_the_filter_dropped_is_dropped_again_with_its_lengths():
    lines = record()
    lines[0]["values"] = lines[0]["values"] | {"sglang_server_concurrency": 2 * SLOTS}
    for step in range(1, 31):
        wall = 100 + STEP_S * step
        for _ in range(4):
            lines.append({"kind": "drop", "wall": wall, "reason": "zero_std_1", "samples": N, "tokens": 400})
    seen = recorded(lines)
    assert seen.drops == (("zero_std_1", pytest.approx(4 / 20, abs=0.01), pytest.approx(50)),)
    drawn = [g for g, _ in zip(seen.groups(N, random.Random(1)), range(2000), strict=False)]
    gone = [d.tokens for g in drawn if g.reason for d in g.members]
    assert len(gone) / len(drawn) / N == pytest.approx(0.2, abs=0.03)
    assert sum(gone) / len(gone) == pytest.approx(50, rel=0.05)
    busy = GROUPS * N + 4 * N * 50 / 100  # samples a step, as many as have tokens of a whole one
    assert seen.measured.idle == pytest.approx(1 - busy * MEAN_S / STEP_S / SLOTS / 2, abs=0.03)


def test_records_of_older_releases_are_simulated_with_a_note():
    seen = recorded(record(lives=False))
    assert "independent" in seen.notes[0]
    taken = [d.seconds for group in seen.pool for d in group]
    assert sum(taken) / len(taken) == pytest.approx(MEAN_S, rel=0.06)


def test_steps_before_a_change_and_after_a_restart_do_not_count():
    lines = record(40)
    at = next(i for i, line in enumerate(lines) if line.get("step") == 20)
    for line in lines[at:]:
        if line["kind"] == "step":
            line["knob_epoch"] = 1
    patch = {"kind": "knob", "wall": 123.0, "epoch": 1, "values": {"max_weight_staleness": 3}}
    tuned = recorded([*lines[:at], patch, *lines[at:]])
    assert (tuned.measured.steps, tuned.knobs.max_weight_staleness) == (21 - 5, 3)
    harmless = {**patch, "values": {"lr": 1e-6}}
    assert recorded([*lines[:at], harmless, *lines[at:]]).measured.steps == 36
    again = {"kind": "restored", "wall": 123.0, "step": 19, "version": 77}
    assert recorded([*lines[:at], again, *lines[at:]]).measured.steps == 36 - 5


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no step"),
        (record(6), "2 steps of 6 count .* 8 are needed"),
        (record(30, **{"perf/turn_s": 1.0}), "take turns on shared GPUs"),
    ],
)
def test_a_record_that_does_not_suffice_is_refused(lines, said):
    with pytest.raises(SettingsError, match=said):
        recorded(lines)


def test_the_comparison_says_how_far_the_simulation_is_off(monkeypatch):
    monkeypatch.setattr(comparison, "STEPS", comparison.FEWEST_STEPS)
    found = compare(recorded(record()), {"max_weight_staleness": 1}, seeds=1)
    assert found.changed == {"max_weight_staleness": (2, 1)}
    assert found.then["step_s"].mean > 1.2 * found.simulated["step_s"].mean
    assert abs(found.off) < 0.1
    assert "Warning" not in text(found)
    lines = record(
        wall_s=2.4, **{"perf/wait_s": 1.3}
    )  # half of the time the trainer waits, for nothing that is on record
    assert "Warning: that is more than 10 % off" in text(compare(recorded(lines), {}, seeds=1))


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ask(tmp_path: Path, capsys, monkeypatch):
    """`whatif` on a run whose record has two damaged lines: (status, stdout, stderr)."""
    monkeypatch.setattr(comparison, "STEPS", comparison.FEWEST_STEPS)
    write_run_file(tmp_path / "demo", run="demo", bus_url="redis://127.0.0.1:1", finished=30)
    lines = [json.dumps(line) for line in record()]
    damaged = '{"kind": "step", "step": "no"}\n{"kind": "st\n'
    (tmp_path / "demo" / FILE).write_text("\n".join(lines[:9]) + "\n" + damaged + "\n".join(lines[9:]) + "\n")

    def said(*words):
        status = main(["whatif", *words, "--runs-dir", str(tmp_path), "--seeds", "1"])
        return status, *capsys.readouterr()

    return said


def test_the_command_prints_measured_simulated_and_asked(ask):
    status, out, _ = ask("demo", "--max-weight-staleness", "1", "--sglang-server-concurrency=96")
    assert status == 0
    note, first, asked, _, head, step, *_ = out.splitlines()
    assert note == "Note: 2 lines of the record are damaged, and were left out"
    assert first.startswith("The run as it is, simulated: 1.")
    assert asked == "Asked: max_weight_staleness 2 -> 1, sglang_server_concurrency 64 -> 96"
    assert head.split() == ["measured", "simulated", "then"]
    assert step.startswith("seconds a step")
    status, out, _ = ask("--rollout-batch-size", "8", "--json", "demo")
    found = json.loads(out)
    assert (status, found["run"], found["damaged_lines"]) == (0, "demo", 2)
    assert found["changed"] == {"rollout_batch_size": [16, 8]}
    assert found["then"]["step_s"]["mean"] < found["simulated"]["step_s"]["mean"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("demo", "--lr", "1e-5"), "--lr: not known to the simulation. It knows max_weight_staleness, "),
        (("demo", "--nonsense", "1"), "--nonsense: not known to the simulation. It knows max_weight_staleness, "),
        (("nobody",), "no such run"),
        (("demo", "--max-weight-staleness", "-1"), "must be"),
        (("demo", "--over-sampling-batch-size", "3"), "smaller than rollout_batch_size = 16"),
        (("demo", "--max-weight-staleness", "0"), "no group has a turn to be split on"),
        (("demo", "--tail-slots", "4"), "nothing says which samples are the tail"),
        (("demo", "--tail-slots", "4", "--tail-after-tokens", "100"), "the run has one worker"),
        (("demo", "again"), "one run expected, got demo again"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(ask, words, said):
    status, out, error = ask(*words)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert said in error


def test_a_run_without_a_record_says_so(tmp_path, capsys):
    write_run_file(tmp_path / "fresh", run="fresh", bus_url="redis://127.0.0.1:1")
    assert main(["whatif", "--runs-dir", str(tmp_path)]) == 2
    assert "the run has no record" in capsys.readouterr().err


def test_records_are_sifted_line_by_line():
    good = record(2)
    bad = [
        good[1] | {"entry": "policy@now"},
        {"kind": "drop", "wall": "x", "reason": "a"},
        {"kind": "activated", "actor": "w"},
    ]
    assert sound([*good, *bad]) == good
