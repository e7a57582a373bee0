"""`miles-async shadow`, as a user meets it: live, by a user who may only look; killed; on a finished run; refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from redis import Redis
from tokenizers import Tokenizer, models

from actors.runtime.prompts import Tokenizer as Words
from actors.runtime.readable import readable
from actors.trainer.record import RecordedBatch, write_record
from bus.client import PASSWORD
from bus.messages.base import pack_ints
from bus.messages.groups import GroupKept
from miles_async.console.report import write_report
from miles_async.console.shadow.results import Results, last_summary
from miles_async.settings.dump import dump_toml
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from miles_async.settings.runs import write_run_file
from tests.actors.house import rollout, scored
from tests.miles_async.console_data import SETTINGS, Story, step_done
from tests.miles_async.shadow_house import OWN, a_user_who_may_only_read

WORDS = ["<eos>", *"0123456789+="]


@pytest.fixture
def settled(run, tmp_path, monkeypatch):
    """The run with its settings and a tokenizer whose first id is a special one."""
    monkeypatch.setenv("MILES_ASYNC_HOOK_NICE", "0")  # the command sets it for its process, which is the tests'
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="="))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(model / "tokenizer.json"))
    values = {**SETTINGS.flat.values, "hf_checkpoint": str(model), "rm_type": "exact_match"}
    values["save_debug_rollout_data"] = str(tmp_path / "batches" / "{rollout_id}.msgpack")
    (run.dir / "settings.toml").write_text(dump_toml(settings_from(**values)))
    return run


def shadow(run, table: str, *words: str):
    """(status, stdout, stderr) of a shadow with this table."""
    file = run.dir.parent / "other.toml"
    file.write_text(f"[shadow]\n{table}")
    return run.ask("shadow", str(file), "--run", run.name, *words)


@pytest.fixture
def living(settled):
    """The run, at work: each group of two gets rewards of 1, every other group is dropped."""
    settled.tell(Story.begin)
    over = threading.Event()

    async def groups(story):
        k = 0
        while not over.is_set():
            await story.issue(f"g{k}")
            await story.generate()
            await story.score()
            await story.judge(f"g{k}", "" if k % 2 else "zero_std_1")
            k += 1

    life = threading.Thread(target=settled.tell, args=(groups,))
    life.start()
    yield settled
    over.set()
    life.join()


LIVE = 'what = "reward"\nrm_type = "f1"\nshare = 0.9\nlabel = "overlap"\n'


def test_a_shadow_of_a_live_run_compares_sample_by_sample_and_is_in_the_report(living, monkeypatch) -> None:
    write_run_file(living.dir, run=living.name, bus_url=asyncio.run(a_user_who_may_only_read(living.url)))
    monkeypatch.setenv(PASSWORD, "secret")
    status, out, err = shadow(living, f"{LIVE}groups = 5")
    assert (status, err) == (0, "")
    assert "reward overlap, run" in out and "5 groups, 10 pairs" in out
    pairs = [line for line in lines_of(living) if "sample" in line]
    assert len(pairs) == 10 and {pair["run"] for pair in pairs} == {1.0} and {pair["shadow"] for pair in pairs} == {0.5}
    found = last_summary(living.dir / "shadow-overlap.jsonl")
    assert found is not None
    assert (found["groups"], found["difference"], found["low"], found["high"]) == (5, -0.5, -0.5, -0.5)
    for words in (("status",), ("bus", "tail", "verdicts", "--no-follow")):
        status, out, err = living.ask(*words, "--run", living.name)
        assert (status, err) == (0, "") and out, "this user may look with these too"
    page = write_report(living.dir).read_text()
    assert "Shadow reward overlap" in page and "difference -0.5 (95 %: -0.5 to -0.5)" in page


def test_ctrl_c_ends_a_shadow_with_its_summary_and_kill_9_leaves_nothing(living) -> None:
    file = living.dir / "shadow-overlap.jsonl"

    def when_it_has_compared(then) -> threading.Thread:
        def wait() -> None:
            until_s = time.monotonic() + 40
            while time.monotonic() < until_s and not (file.exists() and file.read_bytes().count(b'"sample"') >= 4):
                time.sleep(0.02)
            then()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    config = living.dir.parent / "other.toml"
    config.write_text(f"[shadow]\n{LIVE}groups = 0")
    words = [
        sys.executable,
        "-m",
        "miles_async",
        "shadow",
        str(config),
        "--run",
        living.name,
        "--runs-dir",
        str(living.runs_dir),
    ]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    when_it_has_compared(child.kill).join()
    assert child.wait() == -signal.SIGKILL
    with Redis.from_url(living.url) as client:
        keys = {key.decode().partition("}:")[2].partition(":")[0] for key in client.keys(f"ma:{{{living.name}}}:*")}
        groups = {row["name"] for row in client.xinfo_groups(f"ma:{{{living.name}}}:scored")}
    assert keys <= OWN and groups == {b"filter"}
    file.unlink()
    asking = when_it_has_compared(lambda: os.kill(os.getpid(), signal.SIGINT))
    status, out, err = shadow(living, f"{LIVE}groups = 0", "--json")
    asking.join()
    assert (status, err) == (0, "") and json.loads(out)["groups"] >= 2 and json.loads(out)["error"] == ""
    assert lines_of(living)[-1]["kind"] == "summary"


def lines_of(run):
    """The shadow's file."""
    return [json.loads(line) for line in (run.dir / "shadow-overlap.jsonl").read_text().splitlines()]


def test_of_a_finished_run_batches_or_texts_are_compared(settled, tmp_path) -> None:
    write_run_file(settled.dir, run=settled.name, bus_url=settled.url, finished=3)
    good, bad = (
        msgspec.structs.replace(scored(1, i, reward), rollout=_said(i, said)) for i, reward, said in ((0, 1.0, "7"), (1, 0.0, "8"))
    )
    texts = [readable(one, Words(str(tmp_path / "model")).decode) | {"step": 1} for one in (good, bad)]
    assert "<eos>" in texts[0]["response"], "as the recorder keeps it"
    (settled.dir / "samples.jsonl").write_bytes(b"".join(msgspec.json.encode(text) + b"\n" for text in texts))
    status, out, err = shadow(settled, 'what = "reward"\nrm_type = "exact_match"')
    assert (status, err) == (0, "") and "samples.jsonl" in out and "2 of 2 pairs equal" in out
    status, _, err = shadow(settled, 'what = "filter"\ndynamic_sampling_filter_path = "no_truncation"')
    assert status == 2 and "has no recorded batch. Train with --save-debug-rollout-data" in err
    group = GroupKept(group_id="g1", prompt_id="p1", samples=(good, bad))
    write_record(
        str(tmp_path / "batches" / "{rollout_id}.msgpack"),
        RecordedBatch(done=step_done(1, ["g1"]), groups=(group,), knobs={}),
    )
    for table, said in (
        ('what = "reward"\nreward_key = "x"', "2 of 2 pairs equal"),
        ('what = "filter"\ndynamic_sampling_filter_path = "none"', "by both 1"),
    ):
        status, out, err = shadow(settled, table)
        assert (status, err) == (0, "") and "1 recorded batches" in out and said in out


def test_what_stands_behind_the_run_for_cores_has_more_time_than_the_run_gives_its_own(settled, tmp_path) -> None:
    write_run_file(settled.dir, run=settled.name, bus_url=settled.url, finished=3)
    text = readable(scored(1, 0, 1.0), Words(str(tmp_path / "model")).decode) | {"step": 1}
    (settled.dir / "samples.jsonl").write_bytes(msgspec.json.encode(text) + b"\n")
    (tmp_path / "slow_rewards.py").write_text("import time\n\ndef slow(sample):\n    time.sleep(0.4)\n    return 1.0\n")
    file = settled.dir / "settings.toml"
    file.write_text(re.sub(r"reward_timeout_s = \S+", "reward_timeout_s = 0.3", file.read_text()))
    status, out, err = shadow(settled, f'what = "reward"\ncustom_rm_path = "{tmp_path}/slow_rewards.py:slow"')
    assert (status, err) == (0, "") and "1 of 1 pair equal" in out and "late" not in out


def _said(index: int, word: str):
    made = rollout(1, index, tokens=2)
    return msgspec.structs.replace(made, response=msgspec.structs.replace(made.response, tokens=pack_ints([WORDS.index(word), 0])))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", "what = (unset)"),
        ('what = "rewards"\nrm_type = "f1"', "must be reward, filter or loss"),
        ('what = "reward"', "differs from the run. Set one of custom_rm_path, rm_type"),
        ('what = "reward"\nrm_typ = "f1"', "rm_typ is not a setting. Did you mean rm_type?"),
        ('what = "reward"\nlr = 1.0', "lr is nothing in which a shadow reward can differ"),
        ('what = "reward"\nrm_type = "f2"', "no such name. It must be"),
        ('what = "reward"\nrm_type = "f1"\nshare = 0', "share = 0: must be above 0"),
        ('what = "reward"\nrm_type = "f1"\ngroups = -1', "groups = -1"),
        ('what = "reward"\nrm_type = "f1"\nlabel = "../x"', "label = '../x'"),
        ('what = "reward"\nrm_type = "remote_rm"', "rm_url = (unset): rm_type remote_rm asks a service"),
        ('what = "loss"\neps_clip = 2.0', "eps_clip"),
        ('what = "filter"\ndynamic_sampling_filter_path = "json.nothing"', "cannot be loaded"),
        ("what = ", "is not valid TOML"),
    ],
)
def test_a_table_that_will_not_do_is_refused_in_one_line_with_status_2(settled, table: str, said: str) -> None:
    status, out, err = shadow(settled, table)
    assert (status, out, len(err.splitlines())) == (2, "", 1) and said in err
    assert not list(settled.dir.glob("shadow-*"))


def test_two_shadows_of_one_label_do_not_write_into_one_file(tmp_path) -> None:
    with Results(tmp_path, "a"), pytest.raises(SettingsError, match="another shadow writes"):
        Results(tmp_path, "a")
    with Results(tmp_path, "a"):
        pass
