"""The commands that look at a running run, as a user meets them, on a real bus."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest

from bus import Bus
from bus.topology import PROMPTS, STREAMS
from miles_async.cli import app
from miles_async.cli.bus_verbs import tail
from miles_async.settings.runs import write_run_file
from tests.miles_async.console_data import Story, config, vitals

COME = "return redis.call('XADD', KEYS[1], '*', 'id', ARGV[1])"
COME_AND_GO = "return redis.call('XDEL', KEYS[1], redis.call('XADD', KEYS[1], '*', 'id', ARGV[1]))"
ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0


# -- status, bus ls, lag ------------------------------------------------------------------------------------------------


def test_status_shows_every_actor_and_the_streams(whole):
    async def waits(story):
        now = time.time()
        await story.alive(vitals("trainer", waits_for="2 of 2 groups of step 2 on groups", waits_since=now - 50.5, version=2))
        await story.alive(vitals("reward", pid=2**22 + 1, wall=now - 100))

    whole.tell(waits)
    status, out, _ = whole.ask("status")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"run {whole.name}, step 1, version 2 announced")
    assert "held_out 62.5% at step 1" in lines[0]
    assert lines[1] == "ledger: issued 8 = trained 2 + dropped 2 + pending 4"
    row = next(line for line in lines if line.startswith("trainer"))
    assert f"{os.getpid()}" in row
    assert "v2" in row
    assert "2 of 2 groups of step 2 on groups 5" in row
    assert "DEAD for 1:4" in next(line for line in lines if line.startswith("reward"))
    assert next(line.split() for line in lines if line.startswith("prompts"))[1:4] == ["3", "1", "2"]


def test_status_as_json_names_role_pid_host_state_version_and_wait(whole):
    status, found = whole.ask_json("status")
    assert status == 0
    actor = next(a for a in found["actors"] if a["actor"] == "generation-0")
    assert {k: actor[k] for k in ("role", "pid", "state", "life", "version", "waits_for")} == {
        "role": "generation", "pid": os.getpid(), "state": "running", "life": "alive", "version": 1, "waits_for": "",
    }  # fmt: skip
    assert actor["host"]
    assert found["ledger"] == {"issued": 8, "trained": 2, "dropped": {"zero_std_0": 2}, "pending": 4}
    assert found["streams"]["prompts"]["lag"] == 2
    assert found["policy"]["step"] == 1


def test_samples_that_meet_a_condition_are_found_and_nothing_is_taken(whole, tmp_path):
    def held():
        names = ("stream", "pending", "lag", "consumers", "oldest_deliveries")
        return [[row[name] for name in names] for row in whole.ask_json("bus", "lag")[1]]

    before = held()
    status, out, _ = whole.ask("bus", "tail", "scored", "--no-follow", "--where", "reward >= 0 and tokens == 4", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and rows and all(row["tokens"] == 4 and row["stream"] == "scored" for row in rows)
    _, out, _ = whole.ask("bus", "tail", "scored", "--no-follow", "--where", f"sample == '{rows[0]['sample']}'")
    assert len(out.splitlines()) == 1 and f"sample={rows[0]['sample']}" in out
    _, out, _ = whole.ask("bus", "tail", "events", "--no-follow", "--where", "level != 'info' and actor")
    assert "level=" in out
    for form in ("jsonl", "parquet"):
        file = tmp_path / f"found.{form}"
        status, out, _ = whole.ask("bus", "export", "scored", "--out", str(file), "--where", "tokens > 0")
        assert status == 0 and out.split()[0].isdigit() and int(out.split()[0]) > 0
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert pyarrow.parquet.read_table(tmp_path / "found.parquet")["sample"].to_pylist() == [row["sample"] for row in lines]
    assert held() == before
    status, _, err = whole.ask("bus", "export", "groups", "--out", "found.csv")
    assert status == 2 and "--out" in err and len(err.splitlines()) == 1


def test_an_entry_is_found_by_its_sample_alone(whole):
    status, out, _ = whole.ask("bus", "show", "g3/0")
    assert status == 0 and out.startswith("scored ")


def test_bus_ls_lists_every_stream(whole):
    status, out, _ = whole.ask("bus", "ls")
    assert (status, len(out.splitlines())) == (0, len(STREAMS) + 1)
    status, found = whole.ask_json("bus", "ls")
    assert found["streams"]["scored"]["readers"][0]["oldest_owner"] == "filter"


def test_bus_lag_tells_who_holds_what(whole):
    status, out, _ = whole.ask("bus", "lag")
    assert status == 0
    assert "generation-1 1" in next(line for line in out.splitlines() if line.startswith("prompts"))
    assert out.splitlines()[-1] == "2 entries not delivered, 2 held"
    _, found = whole.ask_json("bus", "lag")
    prompts = next(row for row in found if row["stream"] == "prompts")
    assert (prompts["pending"], prompts["lag"]) == (1, 2)
    assert {c["name"]: c["pending"] for c in prompts["by"]} == {"generation-0": 0, "generation-1": 1}


# -- tail, show ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "doctor", "ledger", "samples", "top"])
def test_a_command_that_looks_takes_the_runs_name_as_its_first_word(whole, command):
    more = ["--plain"] if command == "top" else []
    status, _, refused = whole.ask(command, "not-a-run", *more)
    assert status == 2 and "--run = 'not-a-run': no such run" in refused, refused


def test_tail_prints_readable_fields(whole):
    status, out, _ = whole.ask("bus", "tail", "prompts", "-n", "2", "--no-follow")
    assert status == 0
    assert [line.split(" id=")[1].split()[0] for line in out.splitlines()] == ["g4/0", "g4/1"]
    assert "body=" not in out


def listen_to_ctrl_c():
    """As in a terminal: what a shell starts in the background, these tests perhaps, ignores it, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def test_tail_shows_entries_that_are_gone_a_moment_after_they_came_and_counts_those_it_missed(
    redis_url, run_name, capsys, monkeypatch
):
    monkeypatch.setattr("miles_async.cli.bus_verbs.LOOK_S", 0.0)
    monkeypatch.setattr("miles_async.cli.bus_verbs.FOLLOW_S", 0.1)
    shown, said = [], ""
    async with Bus(config(redis_url, run_name)) as bus:
        key = bus.keys.stream(PROMPTS.name)
        followed = asyncio.create_task(tail(bus, PROMPTS, n=1, follow=True, as_json=True))
        try:
            async with asyncio.timeout(DEADLINE_S):
                for number in range(20):
                    while (await bus.server_info())["blocked_clients"] != "1":  # noqa: ASYNC110 - it waits for an entry
                        await asyncio.sleep(0.01)
                    await bus.link.run("EVAL", COME, 1, key, f"g1/{number}")
                    await bus.link.run("XTRIM", key, "MAXLEN", 0)
                await bus.link.run("EVAL", COME_AND_GO, 1, key, "g2/0")
                while "so far 1 entry" not in said:
                    await asyncio.sleep(0.05)
                    out, err = capsys.readouterr()
                    shown, said = shown + out.splitlines(), said + err
        finally:
            followed.cancel()
            await asyncio.gather(followed, return_exceptions=True)
    assert [json.loads(line)["id"] for line in shown] == [f"g1/{n}" for n in range(20)]


def test_tail_follows_until_ctrl_c(whole):
    words = [sys.executable, "-u", "-m", "miles_async", "bus", "tail", "verdicts", "-n", "1", "--follow", "--json"]
    words += ["--runs-dir", str(whole.runs_dir)]
    child = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_ctrl_c
    )
    try:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["group"] == "g2"

        async def more(story):
            await story.generate(who="generation-1", wanted="g3/1")
            await story.score()
            await story.judge("g3", "zero_std_1")

        whole.tell(more)
        line = json.loads(child.stdout.readline())
        assert (line["group"], line["note"]) == ("g3", "dropped: zero_std_1")
        child.send_signal(signal.SIGINT)
        assert child.wait(DEADLINE_S) == 0
        assert child.stderr is not None
        assert child.stderr.read() == ""
    finally:
        child.kill()
        child.communicate()


def test_show_decodes_one_entry_by_sample_or_entry_id(whole):
    status, out, _ = whole.ask("bus", "show", "scored", "g3/0")
    assert status == 0
    assert "      logprobs: -0.5 -0.5 -0.5 -0.5" in out
    assert "  reward: 1" in out
    _, found = whole.ask_json("bus", "show", "scored", out.split()[1].rstrip(","))
    assert found["message"]["rollout"]["response"]["tokens"] == [0, 1, 2, 3]
    assert found["fields"]["id"] == "g3/0"


def test_show_of_bytes_that_are_no_message_shows_them_as_data(run):
    evil = b"\x80\x04\x95cos\nsystem\n(S'true'\ntR."  # a pickle

    async def put(story):
        await story.bus.link.run("XADD", story.bus.keys.stream("scored"), "*", "id", "g9/0", "body", evil)

    run.tell(put)
    status, out, _ = run.ask("bus", "show", "scored", "g9/0")
    assert status == 0
    assert "undecodable" in out
    assert "cos\\nsystem" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bus", "show", "scored", "nobody/0"], "no entry 'nobody/0' on scored"),
        (["bus", "tail", "promts"], "Did you mean prompts?"),
        (["bus", "dead", "retry", "1-1"], "no dead letter '1-1'"),
        (["bus"], "See miles-async bus --help."),
        (["trace", "nobody/0"], "nothing on record about nobody/0"),
        (["tune", "lr"], "'lr' is not name=value. Write for example lr=2e-6, without spaces; a run is named by --run"),
        (["tune", "lr=1", "lr=2"], "lr is given twice"),
        (["tune", "lr=1", "--log"], "exclude each other"),
        (["ledger", "--by", "colour"], "colour"),
    ],
)
def test_what_cannot_be_found_is_one_line(whole, words, said):
    status, out, err = whole.ask(*words) if words != ["bus"] else (app.main(words), "", whole._capsys.readouterr().err)
    assert status in (1, 2)
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


# -- ledger -------------------------------------------------------------------------------------------------------------


def test_the_ledger_closes_and_says_by_reason_version_and_worker(whole):
    status, out, _ = whole.ask("ledger")
    assert status == 0
    assert out.splitlines()[-1] == "issued 8 = trained 2 + dropped 2 + pending 4 · closes"
    assert next(line for line in out.splitlines() if line.startswith("dropped: zero_std_0")).split()[-2:] == ["2", "8"]
    assert whole.ask_json("ledger", "--by", "worker")[1]["by_worker"] == {
        "generation-0": {"generated": 16},
        "generation-1": {"generated": 4},
    }
    assert whole.ask_json("ledger", "--by", "version")[1]["by_version"]["1"]["generated"] == 20


def test_the_ledger_says_what_is_trained_and_not_yet_in_a_checkpoint(whole):
    async def another_step(story):
        await story.issue("g5")
        await story.generate(wanted="g5/0")
        await story.generate(wanted="g5/1")
        await story.score()
        await story.judge("g5")
        await story.train(2, "g5", durable=False)

    assert "count as trained" not in whole.ask("ledger")[1]
    whole.tell(another_step)
    assert "2 of them are trained and count as trained once a checkpoint holds their step" in whole.ask("ledger")[1]


def test_a_ledger_that_does_not_close_names_the_ids_and_fails(whole):
    async def lose(story):
        entry = next(e for e in await story.bus.scan_all(PROMPTS) if e.fields["id"] == "g4/1")
        await story.bus.link.run("XDEL", story.bus.keys.stream("prompts"), entry.id)

    whole.tell(lose)
    status, out, _ = whole.ask("ledger", "--check")
    assert status == 1
    assert "DOES NOT CLOSE · 1 in no stream: g4/1" in out
    assert whole.ask_json("ledger")[1]["missing"] == ["g4/1"]


# -- finding the run ----------------------------------------------------------------------------------------------------

LOOKING = (["status"], ["bus", "ls"], ["ledger"], ["trace", "g1/0"], ["doctor"], ["tune"], ["stop"])


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
def test_a_run_that_has_ended_is_told_in_one_line_with_the_remedy(run, tmp_path, words):
    write_run_file(run.dir, run=run.name, bus_url=f"unix://{tmp_path}/gone.sock")
    status, out, err = run.ask(*words)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "is not running" in err
    assert "The same miles-async train command with --name" in err


def test_a_bus_url_alone_finds_its_run_or_asks_which(redis_url, whole, capsys):
    capsys.readouterr()
    assert app.main(["status", "--bus-url", redis_url, "--run", whole.name]) == 0
    capsys.readouterr()
    assert app.main(["status", "--bus-url", redis_url, "--run", whole.name + "x"]) == 2
    assert f"Did you mean {whole.name}?" in capsys.readouterr().err


def test_an_only_run_needs_no_name(private_redis, capsys):
    async def go():
        async with Bus(config(private_redis.url, "lonely")) as bus:
            await Story(bus).begin()

    assert app.main(["status", "--bus-url", private_redis.url]) == 2
    assert "no run on the bus" in capsys.readouterr().err
    asyncio.run(go())
    assert app.main(["status", "--bus-url", private_redis.url]) == 0
    assert capsys.readouterr().out.startswith("run lonely, step 0")


def test_a_password_never_appears_in_a_message(capsys):
    assert app.main(["status", "--bus-url", "redis://user:hunter2@127.0.0.1:1/0"]) == 2
    err = capsys.readouterr().err
    assert "hunter2" not in err
    assert "connection refused" in err


# -- help ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["status"], ["bus"], ["bus", "dead"], ["ledger"], ["trace"], ["stop"], ["tune"], ["doctor"]])
def test_help_answers_without_the_heavy_parts(words):
    code = (
        "import sys; from miles_async.cli.app import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = [n for n in ('torch', 'redis', 'rich', 'matplotlib', 'numpy') if n in sys.modules]\n"
        "print(heavy, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "usage: miles-async" in done.stdout
