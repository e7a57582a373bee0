"""Launchers come and go: a closed terminal, a killed launcher, a stop without one. The record is complete in all of them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from bus.topology import POLICY
from tests.crash.conftest import Launch
from tests.crash.house import Run, Tables, merged, until
from tests.crash.judge import judge

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

LONG: Tables = {"rollout": {"num_rollout": 100_000}}


def recorded(run: Run) -> list[int]:
    """Steps in metrics.jsonl, in its order."""
    lines = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "step"]


def trained(run: Run) -> list[int]:
    """Steps as the trainer said them on the bus."""

    async def steps(bus) -> list[int]:
        entries = await bus.scan_all(POLICY)
        return [int(e.fields["id"].removeprefix("step")) for e in entries if e.fields["type"] == "policy.step"]

    return run.ask(steps)


def assert_complete(run: Run) -> None:
    """Every step of the trainer is in the file, once."""
    wanted = trained(run)
    until("the record to have caught up", lambda: len(recorded(run)) >= len(wanted))
    found = recorded(run)[: len(wanted)]
    assert found == wanted and max(Counter(found).values()) == 1


def go_on(run: Run, steps: int = 5) -> None:
    """Wait for more steps, whoever keeps the actors."""
    wanted = run.step() + steps
    until(f"step {wanted}", lambda: run.step() >= wanted)


@pytest.mark.takes(30)
def test_a_closed_terminal_ends_the_view_and_a_killed_launcher_the_restarts_and_neither_the_run(run_of: Launch) -> None:
    """First SIGHUP, then SIGKILL; then stop ends the actors, and the same command goes on."""
    run = run_of(merged(LONG, {"launch": {"console": "plain"}}))
    run.start()
    run.until_step(2)
    assert run.launcher is not None
    run.launcher.send_signal(signal.SIGHUP)
    log = run.dir / "logs" / "launcher.log"
    until("its word", lambda: log.exists() and "miles-async top" in log.read_text())
    go_on(run)
    shown = run.output().count("\nstep ")
    pid = run.kill("filter")
    until("the filter to be started again", lambda: run.pids("filter") not in ([], [pid]))
    go_on(run)
    assert run.output().count("\nstep ") == shown
    assert_complete(run)
    assert run.command("doctor").stdout.count("no launcher") == 0

    run.launcher.kill()
    run.launcher.wait(10)
    go_on(run)
    assert_complete(run)
    until("the doctor to miss the launcher", lambda: "error    no launcher: pid" in run.command("doctor").stdout)
    stopped = run.command("stop", "--wait", "60")
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.strip() == "r has stopped. The same miles-async train command with --name r resumes it."
    assert not run.processes()
    assert not Path(run.dir / "redis.sock").exists() or subprocess.call(["pgrep", "-F", run.dir / "redis" / "redis.pid"]) == 1
    assert_ended_run_can_be_asked(run)
    last = recorded(run)[-1]
    assert last == run.saved(), "the recorder is the last to go"
    run.start(flags=("--num-rollout", str(last + 2)))
    run.finish()
    assert recorded(run) == list(range(1, last + 3))
    judge(run, steps=last + 2)


ENDED = re.compile(r"run r (is not running|has finished)")


def assert_ended_run_can_be_asked(run: Run) -> None:
    """All that look at a run look at an ended one too, and change nothing of what it left."""
    before = contents(run.dir / "redis")
    status = run.command("status")
    assert status.returncode == 0 and "trainer" in status.stdout, status.stderr
    assert ENDED.search(status.stderr) and status.stderr.count("\n") == 1
    assert run.command("ledger", "--check").returncode == 0
    assert "initial values" in run.command("tune", "--log").stdout
    assert "no dead letters" in run.command("bus", "dead", "list").stdout
    assert "trained in step 1" in run.command("trace", first_group(run)).stdout
    assert run.command("report").returncode == 0
    refused = run.command("tune", "lr=1e-4")
    assert refused.returncode == 2 and ENDED.search(refused.stderr)
    assert contents(run.dir / "redis") == before


def first_group(run: Run) -> str:
    lines = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
    return next(line["groups"][0] for line in lines if line["kind"] == "step")


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in directory.rglob("*") if f.is_file()}


@pytest.mark.slow
@pytest.mark.takes(60)
def test_a_view_from_elsewhere_shows_the_run_to_its_end(run_of: Launch) -> None:
    run = run_of({"rollout": {"num_rollout": 12}})
    run.start(fault="trainer:before_step:2:STOP")  # it goes on when there is somebody who looks
    run.until("the trainer to stop", lambda: run.struck)
    file = run.home / "view.log"
    view = run.beside("top", "r", "--plain", log=file.name)
    try:
        run.until("the view to show something", lambda: bool(file.read_text()))  # that the trainer is stopped
        run.kill("trainer", signal.SIGCONT)
        run.finish()
        assert view.wait(60) == 0
    finally:
        view.kill()
        view.wait()
    shown = file.read_text()
    assert "step 12/12" in shown and "run r has ended\n" in shown
