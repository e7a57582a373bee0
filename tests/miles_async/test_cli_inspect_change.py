"""The commands that change something: dead letters, knobs, stop; and the doctor that asks for it."""

import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from redis import Redis

from actors.recorder.history import History
from bus.identity import Identity, write_identity
from bus.knobs.live import read_history
from bus.messages.control import Event
from bus.topology import DEAD, EVENTS, POLICY, PROMPTS, SCORED
from miles_async.cli.stop import certain_launcher
from miles_async.console import attach
from miles_async.console.lines import plain_line
from miles_async.launcher.lock import LOCK
from miles_async.settings.runs import RunRef, list_runs
from tests.miles_async.conftest import Run
from tests.miles_async.console_data import ROOMS, Story, task, vitals

DEADLINE_S = 20.0


# -- dead letters -------------------------------------------------------------------------------------------------------


async def letters(story):
    return len(await story.bus.scan_all(DEAD))


def test_a_letter_of_an_open_group_goes_back_as_it_was(whole):
    whole.tell(lambda story: story.die("g4/0", PROMPTS, task("g4/0")))
    assert "g4/0" in whole.ask("bus", "dead", "list")[1]
    status, out, _ = whole.ask("bus", "dead", "retry", "g4/0")
    assert status == 0
    assert out.startswith("g4/0 is back on prompts as ")

    async def check(story):
        entry = (await story.bus.last(PROMPTS))[0]
        return (
            entry.fields["id"],
            entry.fields["type"],
            (await story.bus.message(entry)).prompt_id,
            await letters(story),
        )

    assert whole.tell(check) == ("g4/0", "sample.task", "p-g4", 0)


def test_a_letter_of_a_closed_group_starts_its_prompt_again(whole):
    whole.tell(lambda story: story.die("g2/1"))
    status, out, _ = whole.ask("bus", "dead", "retry", "g2/1")
    assert (status, out.strip()) == (0, "group g2 was closed without g2/1; prompt p-g2 starts again as a new group")

    async def check(story):
        message = await story.bus.message((await story.bus.last(POLICY))[0])
        return message.prompts, message.reissue, message.groups, await letters(story)

    assert whole.tell(check) == (("p-g2",), True, (), 0)


def test_a_letter_whose_group_is_being_closed_waits(whole):
    async def marker(story):
        from bus import Out
        from bus.messages.samples import RolloutLost

        await story.die("g3/1")
        lost = RolloutLost(sample_id="g3/1", group_id="g3", n_samples=2, reason="poison")
        await story.bus.append([Out(SCORED, lost)])

    whole.tell(marker)
    status, _, err = whole.ask("bus", "dead", "retry", "g3/1")
    assert status == 1
    assert "is being closed without g3/1. Try again in some seconds." in err
    assert whole.tell(letters) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"body": b""}, "lay in a blob that is gone"),
        ({"body": b"\xc1junk"}, "would die again"),
        ({"body": b"", "fields": {"blob": "file:gone:9"}}, "would die again"),
        ({"stream": "events"}, "cannot be retried"),
        ({"stream": "nonsense"}, "cannot be retried"),
    ],
)
def test_a_letter_that_cannot_live_again_says_why_and_stays(run, change, said):
    async def put(story):
        import msgspec

        await story.die("g2/1")
        entry = (await story.bus.last(DEAD))[0]
        letter = msgspec.structs.replace(await story.bus.message(entry), **change)
        await story.bus.link.run("XDEL", story.bus.keys.stream("dead"), entry.id)
        await story.say(DEAD, letter)

    run.tell(put)
    status, _, err = run.ask("bus", "dead", "retry", "g2/1")
    assert status == 1
    assert said in err
    assert run.tell(letters) == 1


def test_an_evaluation_sample_is_not_put_back(run):
    run.tell(lambda story: story.die("e5/3", PROMPTS, task("e5/3", eval_name="held_out")))
    status, _, err = run.ask("bus", "dead", "retry", "e5/3")
    assert status == 1
    assert "counted as lost in its evaluation" in err


def test_dropping_a_letter_forgets_it_and_a_second_time_says_so(run):
    run.tell(lambda story: story.die("g2/1"))
    [letter] = run.ask_json("bus", "dead", "list")[1]
    assert (letter["sample"], letter["deliveries"], letter["traceback"]) == ("g2/1", 5, "Traceback: boom")
    assert run.ask("bus", "dead", "drop", letter["id"])[0] == 0
    assert run.tell(letters) == 0
    assert run.ask("bus", "dead", "drop", letter["id"])[0] == 1
    assert run.ask("bus", "dead", "list")[1] == "no dead letters\n"


# -- tune ---------------------------------------------------------------------------------------------------------------


def test_tune_lists_applies_logs_and_reverts(whole):
    status, out, _ = whole.ask("tune")
    assert status == 0
    assert "next group issued" in next(line for line in out.splitlines() if line.startswith("rollout_temperature"))
    status, out, _ = whole.ask("tune", "over-sampling-batch-size=8", "max_weight_staleness=3", "--reason", "more overlap")
    assert status == 0
    assert out.startswith("epoch 1\n")
    assert "2 -> 8" in out
    _, found = whole.ask_json("tune")
    assert (found["epoch"], found["knobs"]["over_sampling_batch_size"]["value"]) == (1, 8)
    assert found["knobs"]["over_sampling_batch_size"]["changed_at"] == 1
    assert "more overlap" in whole.ask("tune", "--log")[1]
    assert whole.ask("tune", "--revert", "0")[0] == 0
    _, found = whole.ask_json("tune")
    assert (found["epoch"], found["knobs"]["over_sampling_batch_size"]["value"]) == (2, 2)
    assert len(whole.ask_json("tune", "--log")[1]) == 3


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (["lr=-1"], "must be a number >= 0"),
        (["lr=fast"], "must be a number >= 0"),
        (["learning_rat=1"], "no live setting has this name"),
        (["over_sampling_batch_size=1"], "smaller than rollout_batch_size = 2"),
        (["lr=0.5", "staleness_policy=guess"], "must be one of auto"),
        (["--revert", "7"], "known epochs are 0 to 0"),
    ],
)
def test_a_refused_patch_changes_nothing_and_says_why(whole, patch, said):
    status, out, err = whole.ask("tune", *patch)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert len(whole.tell(lambda story: read_history(story.bus))) == 1


def test_tune_plans_for_a_step_shows_what_waits_and_cancels(whole):
    asked = ("tune", "--at-step", "3", "lr=0.5", "max_weight_staleness=2", "--reason", "warm")
    status, out, _ = whole.ask(*asked)
    assert status == 0
    assert "step 3 exactly (trainer)" in out
    assert "when step 3 begins (sampler)" in out
    _, found = whole.ask_json("tune")
    [plan] = found["planned"]
    assert (plan["epoch"], plan["at_step"], plan["reason"]) == (1, 3, "warm")
    assert plan["values"] == {"lr": 0.5, "max_weight_staleness": 2}
    assert found["knobs"]["lr"]["value"] != 0.5
    assert "planned for step 3 by " in whole.ask("tune")[1]
    assert "planned for step 3: max_weight_staleness=2, lr=0.5" in whole.ask("tune", "--log")[1]
    assert whole.ask("tune", "--cancel", "1")[:2] == (0, "epoch 2\nthe plan of epoch 1 is cancelled\n")
    assert whole.ask_json("tune")[1]["planned"] == []
    assert "plan of epoch 1 ended" in whole.ask("tune", "--log")[1]


def test_views_tell_a_change_a_plan_and_its_end():
    head = {"kind": "knob", "epoch": 4, "author": "governor", "reason": "idle: 30%", "values": {}}
    said = [
        plain_line(head | more, History(), total_steps=9)
        for more in ({"values": {"lr": 0.5}}, {"planned": {"lr": 0.5}, "at_step": 7}, {"plan": 3})
    ]
    assert said == [
        "knob epoch 4: lr=0.5 (governor: idle: 30%)",
        "knob epoch 4: planned for step 7: lr=0.5 (governor: idle: 30%)",
        "knob epoch 4: plan of epoch 3 ended (governor: idle: 30%)",
    ]
    anew = {"values": {"lr": 0.5, "seed": 1}, "author": "launcher", "reason": "initial"}  # restored from a checkpoint of epoch 4
    said_anew = plain_line(head | anew, History(), total_steps=9)
    assert said_anew == "knob epoch 4: all 2 settings, on a bus made anew (launcher: initial)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at-step", "1", "lr=0.5"], "--at-step = 1: 1 steps are done and step 2 may be under way. Give 3 or more"),
        (["--at-step", "2", "lr=0.5"], "Give 3 or more"),
        (["--at-step", "3"], "--at-step = 3: nothing is planned. Add name=value"),
        (["--at-step", "3", "lr=fast"], "must be a number >= 0"),
        (["--at-step", "5000000", "lr=0.5"], "the run ends at step"),
        (["--cancel", "7"], "no plan of this epoch waits; plans: none"),
        (["--cancel", "7", "lr=0.5"], "exclude each other"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(whole, words, said):
    status, out, err = whole.ask("tune", *words)
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert len(whole.tell(lambda story: read_history(story.bus))) == 1


# -- doctor -------------------------------------------------------------------------------------------------------------


def test_the_doctor_fails_when_something_is_wrong(whole):
    status, out, _ = whole.ask("doctor")
    assert (status, out.splitlines()[-1]) == (0, "nothing is wrong")
    whole.tell(lambda story: story.alive(vitals("filter", state="failed", note="KeyError: 'x'")))
    status, out, _ = whole.ask("doctor")
    assert status == 1
    assert "error    filter failed: KeyError: 'x'" in out
    assert out.splitlines()[-1] == "2 things are wrong"
    status, found = whole.ask_json("doctor")
    assert (status, found["well"]) == (1, False)
    assert {f["rule"] for f in found["findings"] if f["level"] == "error"} == {"actor failed", "no actor"}


# -- stop ---------------------------------------------------------------------------------------------------------------

LAUNCHER = """
import fcntl, signal, sys, time
lock = open(sys.argv[2], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("miles launcher", flush=True)
time.sleep(60)
"""


@contextmanager
def launcher_of(run, tmp_path):
    """A process that holds the run's folder as a launcher does, and ends when it is asked."""
    script = tmp_path / "miles-async"
    script.write_text(LAUNCHER)
    words = [sys.executable, str(script), "train", str(run.dir / LOCK)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "miles launcher"
        (run.dir / "launcher.pid").write_text(f"{child.pid}\n")
        yield child
    finally:
        child.kill()
        child.communicate()


def test_stop_ends_the_launcher_of_this_host_and_waits_for_it(whole, tmp_path):
    with launcher_of(whole, tmp_path) as child:
        whole.tell(lambda story: write_identity(story.bus, Identity(run=whole.name, run_dir=str(whole.dir))))
        copy = whole.dir.with_name("copy")
        shutil.copytree(whole.dir, copy)
        status, _, err = whole.ask("stop", "--run", "copy", "--wait", "5")
        assert status == 2 and f"that one is kept in {whole.dir}, and this folder is a copy" in err
        assert certain_launcher(RunRef(whole.name, whole.url, copy)) is None and child.poll() is None
        assert list_runs(whole.runs_dir) == [whole.name, "copy"], "the newest run is not a copy of it"
        status, out, err = whole.ask("stop", "--wait", "20")
        assert status == 0
        assert "has stopped" in out
        assert f"launcher {child.pid} was asked to stop" in err
        assert child.wait(DEADLINE_S) == 0

    async def wish(story):
        events = [await story.bus.message(e) for e in await story.bus.last(EVENTS, 3)]
        return [e.kind for e in events if isinstance(e, Event)]

    assert "stop requested" in whole.tell(wish)


def test_stop_needs_no_bus_that_takes_writes_where_the_launcher_is(private_redis, tmp_path, capsys, monkeypatch):
    """A disk that is full is a reason to stop the run."""
    monkeypatch.setattr(attach, "ANSWER_DEADLINE_S", 0.3)
    run = Run(private_redis.url, "full", tmp_path, capsys)
    run.tell(Story.begin)
    with Redis.from_url(private_redis.url) as server, launcher_of(run, tmp_path) as child:
        server.config_set("maxmemory", 1)
        status, out, _ = run.ask("stop", "--wait", "20")
        assert status == 0 and "has stopped" in out and child.wait(DEADLINE_S) == 0


def test_stop_touches_no_process_that_is_not_certainly_the_launcher(whole):
    words = ["import time; time.sleep(60)", "/home/me/miles_async"]
    other = subprocess.Popen([sys.executable, "-c", *words])
    try:
        (whole.dir / "launcher.pid").write_text(f"{other.pid}\n")
        status, _, err = whole.ask("stop", "--wait", "0.3")
        assert other.poll() is None
        assert status == 1
        assert "has not stopped within 0.3 s; still there: sampler" in err
    finally:
        other.kill()
        other.wait(DEADLINE_S)


def test_stop_without_a_launcher_here_waits_for_the_actors(whole):
    async def all_stopped(story):
        for name in ROOMS:
            await story.alive(vitals(name, state="stopped"))
        for name in ("generation-0", "generation-1"):
            await story.alive(vitals(name, "generation", state="stopped"))

    whole.tell(all_stopped)
    status, out, err = whole.ask("stop", "--wait", "5")
    assert (status, out) == (
        0,
        f"{whole.name} has stopped. The same miles-async train command with --name {whole.name} resumes it.\n",
    )
    assert "no launcher of it on this host" in err
    _, _, err = whole.ask("stop", "--wait", "5", "--bus-url", whole.url, "--run", whole.name)
    assert "its launcher and actors were asked to stop" in err, "by its address alone it is not known where that is"
