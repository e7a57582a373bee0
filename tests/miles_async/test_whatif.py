"""What a run would do under other settings: what is read of its record, the comparison, and the command."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest

from actors.generation.slots import Limits
from actors.recorder.file import FILE
from miles_async.cli.app import main
from miles_async.cli.whatif import KEPT, _read
from miles_async.console.whatif import compare, comparison, recorded, sound, text
from miles_async.settings.errors import SettingsError
from miles_async.settings.live import initial_values
from miles_async.settings.load import settings_from
from miles_async.settings.runs import write_run_file

GROUPS, N, SLOTS, MEAN_S, SIGMA = 16, 8, 64, 0.6, 0.6
ROLLOUT_S = GROUPS * N * MEAN_S / SLOTS


def seconds(draw: random.Random) -> float:
    return MEAN_S * math.exp(SIGMA * draw.gauss(0, 1) - SIGMA**2 / 2)


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
            line["lives"] = [[i, round(100 * s / MEAN_S), round(1e3 * s), 4] for i, group in enumerate(took) for s in group]
        lines.append(line)
        served = wall + PUBLISH_S
        lines.append({"kind": "activated", "wall": served, "entry": f"events@{round(1e3 * served)}-0", "version": step + 1})
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
    assert len(pool) == GROUPS * (len(steps) - 8)  # four steps in which the run fills up, four whose groups may have more to come


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
        ([], "no trained step"),
        (record(6), "2 steps of 6 count .* 8 are needed"),
        (record(30, **{"perf/turn_s": 1.0}), "take turns on shared GPUs"),
        (record(lives=False), "no group of samples"),
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
    lines = record(wall_s=2.4, **{"perf/wait_s": 1.3})  # half of the time the trainer waits, for nothing that is on record
    assert "Warning: that is more than 5 % off" in text(compare(recorded(lines), {}, seeds=1))


def test_slots_that_the_run_finds_are_found_in_the_simulation_too(monkeypatch):
    monkeypatch.setattr(comparison, "STEPS", comparison.FEWEST_STEPS)
    lines = record()
    lines[0]["values"] |= {"sglang_server_concurrency": 0, "sglang_concurrency_max": SLOTS, "max_masked_fraction": 0.001}
    lines.append({"kind": "slots", "wall": 101.0, "actor": "w0", "slots": SLOTS // 2, "why": ""})
    seen = recorded(lines)
    assert (seen.knobs.slots, seen.knobs.auto) == (SLOTS // 2, Limits(8, SLOTS, 0.001, 2))
    note = "sglang_server_concurrency is auto: simulated from 32 on each worker, with keys and values that suffice"
    assert seen.notes == (note,)
    wide = compare(seen, {"max_masked_fraction": 0.5}, seeds=1)
    # As many as the share allows, and no more than the ceiling.
    assert wide.simulated["slots"].mean < wide.then["slots"].mean <= SLOTS
    assert "engine slots, found by themselves" in text(wide)
    fixed = compare(seen, {"sglang_server_concurrency": 48, "max_masked_fraction": None}, seeds=1)
    assert "Asked: sglang_server_concurrency auto -> 48, max_masked_fraction 0.001 -> none" in text(fixed)
    assert "slots" not in fixed.then


def test_engines_that_run_fewer_at_once_than_the_settings_allow_are_simulated_as_such():
    lines = record()
    lines[0]["values"] |= {"sglang_server_concurrency": 0, "sglang_concurrency_max": None}
    lines.append({"kind": "slots", "wall": 101.0, "actor": "w0", "slots": 24, "why": "", "most": 48})
    seen = recorded(lines)
    assert seen.knobs.auto.ceiling == 48  # of an engine that somebody else started, not ours
    assert comparison.changed(seen, {"max_weight_staleness": 3}).auto.ceiling == 48
    assert comparison.changed(seen, {"sglang_concurrency_max": 32}).auto.ceiling == 32
    lines[-1]["most"] = 512
    assert comparison.changed(recorded(lines), {"sglang_concurrency_max": 700}).auto.ceiling == 700


def test_of_a_long_run_what_is_looked_at_is_held_and_every_change_of_knobs(tmp_path):
    """All of a record of 50,000 steps took two gigabytes."""
    lines = [{"kind": "knob", "epoch": 0}, *({"kind": kind, "step": n} for n in range(KEPT + 9) for kind in ("step", "drop"))]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines) + "no record\n")
    records, damaged = _read(tmp_path)
    assert damaged == 1 and records == [lines[0], *lines[2 * 9 :]]


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
