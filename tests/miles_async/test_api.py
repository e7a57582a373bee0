"""The library in Python: the code of docs/python.md on a real run, and a run opened from elsewhere."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy
import pandas
import pytest

import miles_async
from bus import Bus
from bus.errors import BusRefused, BusUnreachable
from miles_async import api
from miles_async.api import started
from miles_async.settings.load import load
from miles_async.settings.runs import write_run_file
from tests.crash.toy import make_toy
from tests.floors.tree import ROOT
from tests.miles_async.console_data import Story, config
from tests.miles_async.web_house import beat
from tests.tls import tls_before
from tests.warm.launched import warmed

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
SMALL = {
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "over_sampling_batch_size": 2,
    "dynamic_sampling_filter_path": "none",
    "eval_interval": 1000,
    "num_generation_workers": 1,
    "report": False,
}


async def test_the_documentations_code_runs_in_a_running_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], warm: Path | None
) -> None:
    """The last block resumes the run to its end, which is nearer here."""
    monkeypatch.chdir(tmp_path)
    if warm is not None:
        for name, value in warmed(warm, {"PYTHONPATH": str(ROOT)}).items():
            monkeypatch.setenv(name, value)
    rows = (ROOT / "configs" / "data" / "arithmetic_held_out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(rows[:4]))
    held_out = {"eval_prompt_data": ["held_out", "few.jsonl"]}
    settings = {**SMALL, **held_out, "hf_checkpoint": make_toy(tmp_path / "toy") / "model"}
    monkeypatch.setattr(miles_async, "run", lambda config, **given: api.run(config, **{**settings, **given}), raising=False)
    space: dict[str, object] = {}
    for block in BLOCKS[:4]:
        exec(block, space)
    run = space["run"]
    assert isinstance(run, api.StartedRun) and not run.running and run.name == "first"
    said = capsys.readouterr().out
    assert "num_rollout = -1: must be a whole number >= 1." in said and "learning_rate is not a setting" in said
    assert "0.0002 next step (trainer)" in said and "a first look" in said and "first has stopped" in said
    with pytest.raises(BusUnreachable, match="run first is not running"):
        run.knobs.set(lr=1e-3)
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir("/")
        done = len(run.metrics())
        assert run.log.exists() and run.wait() == 0
    assert run.knobs.get()["max_weight_staleness"] == 1 and 0 < done < 200

    exec(BLOCKS[4], space)
    found = space["metrics"]
    assert isinstance(found, pandas.DataFrame) and list(found["step"]) == list(range(1, done + 1))
    assert "held_out" in capsys.readouterr().out
    exec(BLOCKS[5], space)
    said = capsys.readouterr().out
    assert "['first'" in said and str(tmp_path / "runs/first/report.html") in said
    opened = space["run"]
    assert isinstance(opened, api.Run) and opened.settings["rollout_batch_size"] == 2
    assert max(opened.checkpoints) == done and all(path.is_dir() for path in opened.checkpoints.values())
    best = opened.best("held_out")
    assert best["eval/held_out"] == opened.evals()["eval/held_out"].max()
    with pytest.raises(miles_async.SettingsError, match=r"no evaluation of this set. Give one of held_out"):
        opened.best("another")
    assert opened.doctor()["run"] == "first" and "first" in opened._repr_html_() and "runs" in dir(miles_async)
    trained = opened.samples()["sample"].iloc[0]
    assert opened.trace(trained)["sample"] == trained
    assert miles_async.runs(tmp_path / "nowhere") == []
    exec(BLOCKS[6].replace("num_rollout=200", f"num_rollout={done + 2}"), space)
    assert f"finished at step {done + 2}" in capsys.readouterr().out
    monkeypatch.setattr("miles_async.api.opened.find_spec", lambda _: None)
    again = miles_async.open_run()
    assert not again.running
    with pytest.raises(BusUnreachable, match=f"run first has finished, with step {done + 2}. A higher --num-rollout continues it"):
        again.knobs.set(lr=1e-3)
    last = again.metrics()[-1]
    assert isinstance(last, dict) and last["step"] == done + 2, "without pandas, a list of dicts"
    assert len(BLOCKS) == 7


@pytest.mark.timeout(300)  # a run begins cold and is drained
def test_what_the_launcher_refuses_is_raised_and_an_interrupt_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = partial(miles_async.run, "quickstart", runs_dir=tmp_path / "runs", **SMALL)
    with pytest.raises(miles_async.SettingsError, match=r"^hf_checkpoint = 'gone': no such directory.*Give a downloaded"):
        start(hf_checkpoint="gone")
    (tmp_path / "file").write_text("")
    with pytest.raises(BusRefused, match=r"cannot use .*Choose another folder"):
        miles_async.run("quickstart", runs_dir=tmp_path / "file")

    log = tmp_path / "runs" / "quickstart" / "logs" / "launcher.log"

    def interrupt() -> None:
        until = time.monotonic() + 60
        while log.read_text().count("checking model") < 2 and time.monotonic() < until:
            time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    model = make_toy(tmp_path / "toy") / "model"
    # What a shell starts in the background, these tests perhaps, ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            start(hf_checkpoint=model, num_rollout=10_000)
    finally:
        signal.signal(signal.SIGINT, before)
    assert re.search(
        r"interrupted$|run quickstart stopped; the same command with --name quickstart goes on", log.read_text().rstrip()
    ), "by its time"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_hears_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "input()"]
    monkeypatch.setattr(started, "_launch", lambda _, log: subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log))
    run, context = started.StartedRun(tmp_path / "r", ""), multiprocessing.get_context("fork")
    answers = context.Queue()

    def ask() -> None:
        answers.put(run.running)
        answers.put((run.wait(60), run.running))

    child = context.Process(target=ask)
    child.start()
    try:
        assert answers.get(timeout=60) is True
        assert run._process.stdin is not None
        run._process.stdin.write(b"\n")
        run._process.stdin.close()
        assert answers.get(timeout=60) == (0, False) and run.wait(60) == 0
    finally:
        child.kill()
        child.join(60)


async def test_a_run_is_opened_by_address_also_over_tls(whole, redis_url: str, tmp_path: Path) -> None:
    """From a host that has no folder of the run, out of its logs; and its live settings are changed from there."""
    async with tls_before(Path(redis_url.removeprefix("unix://")), tmp_path) as (port, certificate):
        run = miles_async.open_run(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}", run=whole.name)

        def look() -> None:
            metrics = run.metrics()
            assert list(metrics["step"]) == [1] and metrics["rollout/raw_reward"][0] == 0.5
            assert list(run.evals()["eval/held_out"]) == [0.625] and set(run.events("drop")["reason"]) == {"zero_std_0"}
            assert run.ledger()["samples"]["trained"] == 2 and run.status()["policy"]["step"] == 1
            assert run.folder is None and run.name == whole.name and len(run.samples()) == 0
            assert run.knobs.set("from afar", tis_clip=numpy.int64(3)) == {"tis_clip": 3.0}
            assert run.knobs["tis_clip"] == 3.0 and list(run.knobs.log()["reason"])[-1] == "from afar"
            with pytest.raises(miles_async.SettingsError, match=r"tis_clip = -1.*Nothing was changed"):
                run.knobs.set(tis_clip=-1)
            with pytest.raises(miles_async.SettingsError, match="Did you mean tis_clip"):
                run.knobs["tis_clap"]

        await asyncio.to_thread(look)  # the server of this test lives on this loop


async def test_an_opened_run_says_whether_it_goes_on(redis_url: str, run_name: str, tmp_path: Path) -> None:
    write_run_file(tmp_path / run_name, run=run_name, bus_url=redis_url)
    run, stop = miles_async.open_run(run_name, runs_dir=tmp_path), asyncio.Event()
    async with Bus(config(redis_url, run_name)) as bus:
        await Story(bus).begin()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(beat(bus, stop))
            assert await asyncio.to_thread(lambda: run.running)
            stop.set()
    write_run_file(tmp_path / run_name, run=run_name, bus_url=f"unix://{tmp_path}/gone.sock")
    assert not await asyncio.to_thread(lambda: run.running)


async def test_a_run_is_found_from_any_folder_and_by_its_own(
    whole, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / whole.name
    write_run_file(folder, run=whole.name, bus_url=redis_url)
    (folder / "metrics.jsonl").write_text('{"kind": "checkpoint", "step": 3, "wall": 1.0}\n')
    runs = [miles_async.open_run(name) for name in (None, whole.name, folder, str(folder), folder.absolute())]
    monkeypatch.chdir("/")

    def look() -> None:
        for run in runs:
            assert run.folder == tmp_path / folder and len(run.events("checkpoint")) == 1
            assert run.status()["policy"]["step"] == 1

    await asyncio.to_thread(look)
    with pytest.raises(miles_async.SettingsError, match=r"name_or_url = 5: not a text"):
        miles_async.open_run(5)  # type: ignore[arg-type]


def test_a_program_gives_the_numbers_that_it_has() -> None:
    base = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math"}
    given = {
        "lr": numpy.float64(2e-4),
        "num_rollout": numpy.int64(4),
        "normalize_advantages": numpy.bool_(True),
        "rollout_stop_token_ids": numpy.array([1, 2]),
        "eval_prompt_data": ("a", Path("b.jsonl")),
    }
    s = load(None, values={**base, **given}).settings.flat
    assert (s.lr, s.num_rollout, s.normalize_advantages) == (2e-4, 4, True)
    assert (tuple(s.rollout_stop_token_ids), tuple(s.eval_prompt_data)) == ((1, 2), ("a", "b.jsonl"))
    assert type(s.lr) is float and type(s.num_rollout) is int and type(s.normalize_advantages) is bool
    with pytest.raises(miles_async.SettingsError) as caught:
        load(None, values={**base, "lr": numpy.float64("nan"), "custom_rm_path": len, "train_env_vars": {"A": "1"}, 5: 6})
    for said in ("lr = nan: must be", "save it in a file, and write FILE.py:NAME", "a table as JSON", "5 is not a setting"):
        assert said in str(caught.value)


def test_settings_are_given_by_name_as_a_table_or_as_tables() -> None:
    flat = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": Path("x.jsonl"), "num_rollout": 3, "rm_type": "math"}
    tables = {"model": {"hf_checkpoint": "builtin:arithmetic"}, "rollout": {k: flat[k] for k in list(flat)[1:]}}
    flat, tables = flat | {"name": "r"}, tables | {"launch": {"name": "r"}}  # else each is named after its moment
    assert load(None, values=flat).settings == load(None, values=tables).settings
    with pytest.raises(miles_async.SettingsError) as caught:
        load(None, values={**flat, "lr": "fast", "lrr": 1, "rollout": {"num_rollot": 4}})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["lr", "settings:", "settings:"]
