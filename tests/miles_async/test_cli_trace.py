"""`miles-async trace` on a running run and on what an ended one left."""

import asyncio
import json
import time

import pytest

from actors.recorder.actor import Recorder
from actors.recorder.file import FILE, lines_of
from actors.recorder.records import records_of
from actors.recorder.trained import FILE as TRAINED_FILE
from bus import Entry
from bus.dead import read_letters, retry
from bus.messages.control import Event
from bus.messages.groups import GroupVerdict
from bus.messages.policy import SamplesTrained, SampleTrained, StepDone
from bus.messages.samples import Mark
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.topology import EVENTS, POLICY, PROMPTS, TRAINED, VERDICTS
from miles_async.console.trace import settled
from miles_async.settings.runs import write_run_file
from tests.miles_async.console_data import task


def test_a_trace_tells_where_a_sample_is_and_how_it_ended(whole):
    assert "held by generation-1 on prompts" in whole.ask("trace", "g3/1")[1]
    assert "scored, waiting for its siblings: held by filter" in whole.ask("trace", "g3/0")[1]
    assert "trained in step 1, policy version 2" in whole.ask("trace", "g1/0")[1].splitlines()[0]
    out = whole.ask("trace", "g2/1")[1]
    assert out.startswith("g2/1: group dropped by the filter: zero_std_0")
    assert "reward: retry: rollouts g2/1: slow" in out
    _, found = whole.ask_json("trace", "g3/0")
    assert found["place"]["stream"] == "scored"
    assert found["task"]["rollout"]["task"]["prompt_text"] == "1+1="


def test_a_step_that_was_lost_is_told_apart(whole):
    async def again(story):
        from bus.messages.policy import Restored
        from bus.messages.versions import PolicyVersion

        await story.say(POLICY, Restored(step=0, version=PolicyVersion(5, 0)))

    whole.tell(again)
    assert "that step was lost with the trainer and done again" in whole.ask("trace", "g1/0")[1]


def test_after_the_run_a_trace_is_told_from_its_file(run, tmp_path):
    write_run_file(run.dir, run=run.name, bus_url=f"unix://{tmp_path}/gone.sock")
    lines = [
        {
            "kind": "step",
            "wall": 5.0,
            "entry": "policy@5-0",
            "step": 3,
            "version": 4,
            "knob_epoch": 0,
            "groups": ["g7"],
        },
        {
            "kind": "sample",
            "wall": 4.0,
            "entry": "events@4-0",
            "step": 2,
            "sample": "g7/1",
            "group": "g7",
            "version": 3,
            "reward": 0.5,
            "label": "2",
            "tokens": 1,
            "finish": "stop",
            "prompt": "1+1=",
            "response": "2\x1b[2J",
        },
        {"kind": "drop", "wall": 6.0, "entry": "verdicts@6-0", "group": "g8", "reason": "zero_std_1"},
    ]
    (run.dir / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = run.ask("trace", "g7/1")[1]
    assert shown.startswith("g7/1: trained in step 3, policy version 4")
    assert "reward 0.5 (label 2) for\n" in shown and "1+1=2\\x1b[2J" in shown and "\x1b" not in shown
    assert run.ask("trace", "g8/0")[1].startswith("g8/0: group dropped by the filter: zero_std_1")
    assert run.ask("trace", "g9/0")[0] == 2


def test_members_of_a_group_that_was_trained_in_parts_are_told_apart(run, tmp_path):
    """Also where every group of a step was trained in as large a part."""
    write_run_file(run.dir, run=run.name, bus_url=f"unix://{tmp_path}/gone.sock")

    def step(number, *samples):
        version = PolicyVersion(number + 1, number)
        done = StepDone(step=number, version=version, trained_on=version, groups=("g7",), samples=samples)
        entry = Entry(id=f"{number}-0", stream=POLICY, readers="", fields={}, body=b"", size=0)
        return records_of(entry, done)

    fields = {"group": "g7", "reason": "outlasted", "members": [3]}
    dropped = {"kind": "drop", "wall": 9.0, "entry": "policy@9-0", **fields}
    lines = [*step(3, "g7/0", "g7/2", "g8/4", "g8/5"), *step(4, "g7/1", "g8/0"), dropped]
    (run.dir / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = [run.ask("trace", f"g7/{i}")[1].splitlines()[0] for i in range(4)]
    trained = [f"g7/{i}: trained in step {n}, policy version {n + 1}" for i, n in ((0, 3), (1, 4), (2, 3))]
    assert [line.partition(", knob")[0] for line in said[:3]] == trained
    assert said[3].startswith("g7/3: group dropped by the trainer: outlasted")


def test_the_whole_life_of_a_trained_sample_is_told_by_the_bus_and_later_by_the_files_alone(run, tmp_path):
    marks = (
        *(Mark("issued", "", 0, 10.0), Mark("begun", "generation-0", 0, 11.0), Mark("parked: drain", "generation-0", 2, 12.0)),
        *(Mark("resumed", "generation-1", 2, 13.0), Mark("ended", "generation-1", 4, 14.0)),
    )
    spans = (VersionSpan(1, 0, 2), VersionSpan(2, 1, 2))
    life = SampleTrained("g1/0", marks, spans, "stop", 2, 3.0, 1.0, "math", 0.5, 15.0, 3, 0.25)

    async def trained(story):
        await story.whole()
        await story.say(TRAINED, SamplesTrained(step=1, samples=(life,)))
        about = {"sample": "g1/1", "group": "g1"}
        await story.say(EVENTS, Event(actor="recorder", kind="sample", text="g1/1", wall=16.0, data=about))
        stop = asyncio.Event()
        stop.set()
        await Recorder(story.bus, run.dir).follow(stop)

    run.tell(trained)
    told = (
        *("issued", "begun by generation-0", "parked: drain by generation-0 with 2 tokens"),
        *("resumed by generation-1 with 2 tokens", "ended by generation-1 with 4 tokens"),
        *("in 2 turns: 2 tokens by version 1, 2 tokens by version 2; stop after 3 s", "scored 1 by math in 0.5 s"),
        *("let go by the filter", "3 tokens with gradient, 25.000% of the weights", "trained in step 1"),
        "in the checkpoint of step 1: final",
    )
    live = run.ask("trace", "g1/0")[1]
    write_run_file(run.dir, run=run.name, bus_url=f"unix://{tmp_path}/gone.sock")
    after = run.ask("trace", "g1/0")[1]
    assert [part for part in told if part not in live] == [part for part in told if part not in after] == []
    assert "recorder: sample" not in live, "a text that was kept is nothing that happened to it"
    assert after.count("issued") == live.count("begun by") == 1  # told by both files and bus, said once
    of_group = run.ask("trace", "g1")[1]
    assert "g1/0 parked: drain" in of_group and "trained in step 1" in of_group and "not on record" not in after + of_group
    (run.dir / TRAINED_FILE).unlink()  # it holds the newest samples only
    assert "trained in step 1, policy version 2, knob epoch 0; how it was made is not on record" in run.ask("trace", "g1/0")[1]


def test_from_another_host_the_whole_life_is_told_by_the_bus_and_by_no_folder_of_a_run_of_that_name(whole, tmp_path, monkeypatch):
    spans = (VersionSpan(1, 0, 3),)
    life = SampleTrained("g1/0", (Mark("issued", "", 0, 10.0),), spans, "stop", 1, 3.0, 1.0, "math", 0.5, 15.0, 3, 0.25)
    whole.tell(lambda story: story.say(TRAINED, SamplesTrained(step=1, samples=(life,))))
    here = tmp_path / "runs" / whole.name  # of this host
    here.mkdir(parents=True)
    other = {"kind": "step", "wall": 5.0, "entry": "policy@5-0", "step": 77, "version": 4, "knob_epoch": 0, "groups": ["g1"]}
    (here / FILE).write_text(json.dumps(other) + "\n")
    monkeypatch.chdir(tmp_path)
    out = whole.ask("trace", "g1/0", "--run", whole.name, "--bus-url", whole.url)[1]
    assert "made: 3 tokens by version 1" in out and "in the batch of step 1" in out, out
    assert "cannot be read" not in out and "not on record" not in out and "step 77" not in out, out
    whole.tell(lambda story: story.bus.trim_log(POLICY, "9999999999999-0"))  # long ago: steps leave that log first
    out = whole.ask("trace", "g1/0", "--run", whole.name, "--bus-url", whole.url)[1]
    assert out.startswith("g1/0: in the batch of step 1: 3 tokens with gradient"), out


@pytest.mark.parametrize("skew_s", [-90.0, 90.0])
def test_a_life_is_told_in_its_order_whatever_the_clock_of_its_worker_says(whole, skew_s):
    now = time.time() - 10.0
    marks = Mark("issued", "", 0, now), Mark("begun", "far", 0, now + 1 + skew_s), Mark("ended", "far", 3, now + 2 + skew_s)
    life = SampleTrained("g1/0", marks, (VersionSpan(1, 0, 3),), "stop", 1, 3.0, 1.0, "math", 0.5, now + 3, 3, 0.25)
    whole.tell(lambda story: story.say(TRAINED, SamplesTrained(step=1, samples=(life,))))
    out = whole.ask("trace", "g1/0", "--run", whole.name, "--bus-url", whole.url)[1]
    parts = "issued", "begun by far", "ended by far", "made: 3 tokens", "let go by the filter", "in the batch of step 1"
    assert sorted(parts, key=out.rindex) == list(parts), out


def test_the_whole_life_of_a_dropped_sample_is_told_too(run, tmp_path):
    """From the filter's verdict; later from the files alone, where what follows does not hide it."""
    marks = (Mark("issued", "", 0, 10.0), Mark("begun", "generation-0", 0, 11.0), Mark("ended", "generation-0", 4, 14.0))
    life = SampleTrained("g5/1", marks, (VersionSpan(1, 0, 4),), "stop", 1, 3.0, 0.0, "math", 0.5, 0.0, 0, -1.0)
    verdict = GroupVerdict(group_id="g5", prompt_id="p", kept=False, reason="zero_std_0", n_samples=2, lives=(life,))
    other = SampleTrained("g1/0", marks, (VersionSpan(1, 0, 4),), "stop", 1, 3.0, 1.0, "math", 0.5, 15.0, 3, 0.25)

    async def told(story):
        await story.whole()
        await story.say(TRAINED, SamplesTrained(step=1, samples=(other,)))
        await story.say(VERDICTS, verdict)
        stop = asyncio.Event()
        stop.set()
        await Recorder(story.bus, run.dir).follow(stop)
        await Recorder(story.bus, run.dir).follow(stop)  # started again, it goes on behind what is on record

    run.tell(told)
    live = run.ask("trace", "g5/1")[1]
    write_run_file(run.dir, run=run.name, bus_url=f"unix://{tmp_path}/gone.sock")
    after = run.ask("trace", "g5/1")[1]
    assert after == live and after.startswith("g5/1: group dropped by the filter: zero_std_0")
    words = ("issued", "begun by generation-0", "ended by generation-0 with 4 tokens", "made: 4 tokens by version 1; stop")
    assert [word for word in (*words, "scored 0 by math in 0.5 s") if after.count(word) != 1] == []
    assert (run.dir / "trained.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("living", [True, False])
def test_a_name_that_no_sample_has_is_refused_in_one_line_that_says_what_there_is(whole, tmp_path, living):
    """g1 was trained, g2 dropped with its samples counted, g3 is open."""
    groups = ["g1", "g2", "g3"] if living else ["g1", "g2"]
    if not living:
        marks = (Mark("issued", "", 0, 10.0), Mark("ended", "generation-0", 4, 14.0))
        rest = (marks, (VersionSpan(1, 0, 4),), "stop", 1, 3.0, 1.0, "math", 0.5, 15.0, 3, 0.25)
        lives = [SampleTrained(name, *rest) for name in ("g1/0", "g1/1")]

        async def recorded(story):
            await story.say(TRAINED, SamplesTrained(step=1, samples=tuple(lives)))
            stop = asyncio.Event()
            stop.set()
            await Recorder(story.bus, whole.dir).follow(stop)

        whole.tell(recorded)
        write_run_file(whole.dir, run=whole.name, bus_url=f"unix://{tmp_path}/gone.sock")
    else:
        (whole.dir / "settings.toml").write_text("[rollout]\nn_samples_per_prompt = 2\n")
    expected = {
        f"{g}/7": f"{g}/7 is not on record: group {g} has 2 samples, {g}/0 to {g}/1. miles-async trace {g} tells the whole group."
        for g in groups
    } | {"g99/0": "nothing on record about g99/0. miles-async bus tail prompts shows names of this run; --run NAME asks another."}
    told = {name: whole.ask("trace", name) for name in expected}
    assert told == {name: (2, "", f"miles-async trace: {line}\n") for name, line in expected.items()}
    for name in ("", "g3/", "/3", "g3/-1", "g3/x", "g 3", "g3/0/1", "g3\n/0"):
        status, out, err = whole.ask("trace", name)
        assert (status, out, err.count("\n"), "names no sample and no group" in err) == (2, "", 1, True), name
    assert [whole.ask("trace", name)[0] for name in ("g1/0", "g1/1", "g2/0", "g1")] == [0] * 4


def test_files_alone_are_asked_only_of_what_has_come_to_an_end_that_holds(tmp_path):
    """A live run's bus is not asked then."""

    def ended(*lines, sample="g1/0", followed=True):
        (tmp_path / FILE).write_bytes(lines_of(lines))
        return settled(tmp_path, sample, followed=followed)

    step = {"kind": "step", "wall": 3.0, "entry": "policy@3-0", "step": 3, "version": 4, "knob_epoch": 0, "groups": ["g1"]}
    saved = {"kind": "checkpoint", "wall": 4.0, "entry": "policy@4-0", "step": 3}
    drop = {"kind": "drop", "wall": 3.0, "entry": "verdicts@3-0", "group": "g1", "reason": "zero_std_1"}
    restored = {"kind": "restored", "wall": 5.0, "entry": "policy@5-0", "step": 0}
    assert ended(step) and not ended(step, restored), "a trainer that died before its checkpoint trains it again"
    assert not ended(step, restored | {"entry": "policy@4-0"}, saved | {"entry": "policy@5-0"})
    assert ended(step, restored, step | {"step": 1, "entry": "policy@6-0"})
    assert not ended(step, followed=False), "the trainer may have been restored since"
    assert ended(step, saved, followed=False) and ended(drop, followed=False)
    assert ended(step, saved) and not ended(step, saved, sample="g1") and not ended(step, saved, sample="g11/0")
    assert ended(drop) and ended(restored | {"wall": 2.0}, drop)
    assert not ended(drop, restored), "a bus that came back as it was long ago may have it again"
    assert not ended(drop | {"entry": "policy@3-1"}), "the trainer took it out of a step that may be lost"
    assert not ended(drop | {"members": [2]}) and ended(drop | {"members": [0]})


def test_what_actors_said_of_a_sample_is_told_once_live_and_after_the_run(run, tmp_path):
    async def lived(story):
        await story.whole()
        stop = asyncio.Event()
        stop.set()
        await Recorder(story.bus, run.dir).follow(stop)
        await story.say(EVENTS, Event(actor="reward", kind="note", text="g3/1 is odd", wall=16.0))  # is on no file
        await story.say(EVENTS, Event(actor="reward", kind="retry", text="g3/1: slow too", wall=17.0, level="warning"))

    run.tell(lived)
    live, other = run.ask("trace", "g2/1")[1], run.ask("trace", "g3/1")[1]
    assert live.count("reward: retry: rollouts g2/1: slow") == 1
    assert other.count("reward: note: g3/1 is odd") == other.count("reward: retry: g3/1: slow too") == 1
    write_run_file(run.dir, run=run.name, bus_url=f"unix://{tmp_path}/gone.sock")
    assert run.ask("trace", "g2/1")[1].count("reward: retry: rollouts g2/1: slow") == 1


def test_a_dead_letter_that_is_tried_again_keeps_what_was_said_before(run):
    async def revived(story):
        await story.begin()
        await story.issue("g4")
        await story.say(EVENTS, Event(actor="generation-0", kind="note", text="g4/0 has no room", wall=16.0))  # on no file
        await story.die("g4/0", PROMPTS, task("g4/0"), error="no room")
        stop = asyncio.Event()
        stop.set()
        await Recorder(story.bus, run.dir).follow(stop)
        [entry] = [one for one in await story.bus.scan(PROMPTS) if one.fields["id"] == "g4/0"]
        await story.bus.link.run("XDEL", story.bus.keys.stream("prompts"), entry.id)
        [letter] = await read_letters(story.bus)
        await retry(story.bus, letter)

    run.tell(revived)
    told = run.ask("trace", "g4/0")[1]
    assert "not delivered yet on prompts" in told and "g4/0 has no room" in told and "became a dead letter on prompts" in told


def test_lines_that_are_damaged_are_left_out_and_counted(run, tmp_path):
    """Cut, changed by hand, of another release: what is whole is told, and no end is taken for certain."""
    write_run_file(run.dir, run=run.name, bus_url=f"unix://{tmp_path}/gone.sock")
    step = {"kind": "step", "wall": 3.0, "entry": "policy@3-0", "step": 3, "version": 4, "knob_epoch": 0, "groups": ["g1"]}
    saved = {"kind": "checkpoint", "wall": 4.0, "entry": "policy@4-0", "step": 3}
    wrong = [
        *({"kind": kind, "wall": 5.0, "entry": f"policy@{n}-1", "about": "g1/0"} for n, kind in enumerate(
            ("step", "drop", "sample", "fault", "dead", "restored", "checkpoint"), 5)),
        *({**step, "entry": f"policy@{n}-0", name: value} for n, (name, value) in enumerate(
            (("wall", "soon"), ("members", [1]), ("entry", "policy@x"), ("wall", 1e999)), 20)),
    ]  # fmt: skip
    (run.dir / FILE).write_bytes(lines_of([step, saved, *wrong]))
    life = {"kind": "trained", "wall": 3.0, "entry": "trained@3-0", "sample": "g1/0", "step": 3}
    (run.dir / TRAINED_FILE).write_bytes(lines_of([life, {**life, "entry": "trained@4-0", "marks": [["issued", 3]]}]))
    status, out, err = run.ask("trace", "g1/0")
    assert (status, err) == (0, "") and out.startswith("g1/0: trained in step 3"), out + err
    assert f"{len(wrong) + 2} lines of the record that may be about it cannot be read and are left out" in out
    assert not settled(run.dir, "g1/0", followed=True)
    assert run.ask("trace", "g9/0")[0] == 2
