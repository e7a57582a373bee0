"""What a launcher makes of an actor's end: another start, or the run's."""

from __future__ import annotations

import errno
import shutil
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from actors.runtime.child import log_tail
from actors.runtime.run import EXIT_BUS_GONE, EXIT_DONE, EXIT_DRAINED, EXIT_REFUSED
from bus import BusConfig, SystemClock
from miles_async.launcher.local import LocalPlacer
from miles_async.launcher.restart import FIRST_PAUSE_S, LONGEST_PAUSE_S, QUICK_S, Ending, Verdict, judge_exit
from miles_async.launcher.supervisor import End, RunFailed, Supervisor, last_words
from tests.declared import actor_of

CRASHED, KILLED, BUS_GONE = 70, -9, 75
BUDGET = 3


def lives(ends: list[tuple[float, int | None, int]], name: str = "trainer") -> list[Verdict]:
    """The verdict after each (seconds lived, exit status, furthest step of the run)."""
    now, former, verdicts = 0.0, [], []
    for lived_s, code, furthest in ends:
        now += lived_s
        ending = Ending(now, code, furthest)
        verdicts.append(judge_exit(name, ending, former, BUDGET, steps=name == "trainer"))
        former.append(ending)
    return verdicts


def test_quick_failures_of_any_kind_use_up_the_budget_and_wait_longer_each_time() -> None:
    found = lives([(1.0, code, 0) for code in (CRASHED, KILLED, BUS_GONE, KILLED)], "sampler")
    assert [v.action for v in found] == ["restart"] * BUDGET + ["give_up"]
    assert found[-1].reason == "sampler failed 4 times within 60 s"
    waits = [v.after_s for v in found[:BUDGET]]
    assert waits == sorted(set(waits)) and waits[0] == 0.0


def test_a_trainer_that_crashes_again_and_again_before_the_same_step_ends_the_run() -> None:
    slow = 10 * QUICK_S  # a large model takes its time to load, and then does not fit
    found = lives([(slow, CRASHED, 7)] * (BUDGET + 1))
    assert [v.action for v in found] == ["restart"] * BUDGET + ["give_up"]
    assert found[-1].reason == "trainer crashed 4 times before step 8"


@pytest.mark.parametrize(
    "ends",
    [
        [(CRASHED, step) for step in range(1, 20)],  # it gets on in between
        [(KILLED, 7)] * 20,  # not its own doing
        [(BUS_GONE, 7)] * 20,
        [(None, 7)] * 20,
    ],
    ids=["progress", "killed", "no bus", "unknown"],
)
def test_a_trainer_that_gets_on_or_is_ended_by_others_is_kept(ends: list[tuple[int | None, int]]) -> None:
    assert {v.action for v in lives([(2 * QUICK_S, code, step) for code, step in ends])} == {"restart"}


def test_steps_say_nothing_of_other_actors() -> None:
    assert {v.action for v in lives([(2 * QUICK_S, CRASHED, 7)] * 20, "generation-0")} == {"restart"}


@pytest.mark.parametrize(
    ("code", "action", "reason"),
    [
        (10, "done", ""),
        (2, "give_up", "w refused to start"),
        (65, "give_up", "w cannot go on"),
        (76, "give_up", "the bus was lost"),
    ],
)
def test_what_a_restart_would_not_change_is_final(code: int, action: str, reason: str) -> None:
    verdict = judge_exit("w", Ending(0.0, code, 0), (), BUDGET)
    assert (verdict.action, verdict.reason) == (action, reason)


def test_the_status_of_any_program_that_ends_is_not_that_of_an_actor_whose_work_is_done() -> None:
    """A filter of a user's that called sys.exit() left its run standing for ever."""
    assert judge_exit("filter", Ending(0.0, 0, 0), (), BUDGET).action == "restart"


class Scripted:
    """A placer whose processes have ended with these statuses, one after the other."""

    def __init__(self, codes: list[int]) -> None:
        self.codes, self.starts = codes, 0
        self.words: dict[int, str] = {}
        self.notes: list[tuple[str, str]] = []

    def add(self, spec: Any) -> None: ...

    async def place(self, spec: Any) -> None: ...

    async def start(self, spec: Any) -> Any:
        self.starts += 1

    async def end_of(self, spec: Any, process: Any) -> End:
        code = self.codes.pop(0)
        return End(code, [self.words.get(code, "its last words")], "a.log")


async def test_an_actor_that_somebody_asked_to_end_starts_again_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often: a drained actor has not failed. One whose work is done stays away."""
    monkeypatch.setattr("miles_async.launcher.supervisor.AGAIN_S", 0.0)
    placer = Scripted([EXIT_DRAINED] * 9 + [EXIT_DONE])
    supervisor = Supervisor(cast(Any, placer), SystemClock(), budget=BUDGET, furthest=cast(Any, None))
    supervisor.add(actor_of(name="filter", role="filter", bus=BusConfig(url="redis://nowhere", run="r")))
    await supervisor.watch(supervisor.kept["filter"])
    assert placer.starts == 10 and len(placer.notes) == 9
    assert placer.notes[0] == ("restart", "filter was asked to end (SIGTERM), and drained; the run goes on: restarting")


@pytest.mark.parametrize(
    ("codes", "before"),
    [
        ([CRASHED, EXIT_REFUSED], r" Before that it ended with status 70: step 2 does not fit\."),
        ([CRASHED, EXIT_DRAINED, EXIT_REFUSED], ""),  # the life before this one did not fail
        ([EXIT_REFUSED], ""),
    ],
)
async def test_who_refuses_to_start_again_is_told_with_what_ended_it(
    codes: list[int], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checkpoints a trainer that ran out of memory could only say that its weights were lost."""
    monkeypatch.setattr("miles_async.launcher.supervisor.AGAIN_S", 0.0)
    placer = Scripted(list(codes))
    placer.words = {CRASHED: "step 2 does not fit", EXIT_REFUSED: "its weights are lost."}

    async def furthest() -> int:
        return 1

    supervisor = Supervisor(cast(Any, placer), SystemClock(), budget=BUDGET, furthest=furthest)
    supervisor.add(actor_of(name="trainer", role="trainer", bus=BusConfig(url="redis://nowhere", run="r")))
    with pytest.raises(RunFailed, match=rf"^trainer refused to start: its weights are lost\.{before} Log: a\.log$"):
        await supervisor.watch(supervisor.kept["trainer"])


def test_an_actor_that_others_stand_in_for_is_tried_again_after_growing_pauses() -> None:
    now, former, waits = 0.0, [], []
    for _ in range(BUDGET + 8):
        now += 1.0
        ending = Ending(now, CRASHED, 0)
        verdict = judge_exit("generation-1", ending, former, BUDGET, spared=True)
        paused = verdict.after_s if verdict.action == "pause" else 0.0
        former.append(replace(ending, pause_s=paused))
        now += verdict.after_s
        waits.append((verdict.action, verdict.after_s))
    assert [action for action, _ in waits] == ["restart"] * BUDGET + ["pause"] * 8
    pauses = [s for _, s in waits[BUDGET:]]
    assert pauses[0] == FIRST_PAUSE_S and pauses[-1] == pauses[-2] == LONGEST_PAUSE_S
    assert all(b == min(2 * a, LONGEST_PAUSE_S) for a, b in pairwise(pauses))


def test_an_actor_that_worked_well_after_a_pause_starts_afresh() -> None:
    former = [Ending(0.0, CRASHED, 0, pause_s=LONGEST_PAUSE_S)]
    ending = Ending(LONGEST_PAUSE_S + 2 * QUICK_S, CRASHED, 0)
    assert judge_exit("generation-1", ending, former, BUDGET, spared=True) == Verdict("restart")


async def test_a_folder_that_was_removed_is_made_anew_and_a_run_without_its_own_ends_in_one_line(tmp_path: Path) -> None:
    home = tmp_path / "r"
    home.mkdir()
    placer = LocalPlacer(home, threads={}, servers={})
    supervisor = Supervisor(placer, SystemClock(), budget=BUDGET, furthest=cast(Any, None))
    bus = BusConfig(url=f"unix://{home}/none.sock", run="r", deadline_s=0.1)
    spec = actor_of(name="p", role="partial", bus=bus, run_dir=str(home))
    supervisor.add(spec)
    for folder in ("actors", "logs"):
        shutil.rmtree(home / folder)
    end = await placer.end_of(spec, await placer.start(spec))
    assert end.code == EXIT_BUS_GONE and "did not answer" in last_words(end.lines, "p")
    shutil.rmtree(home)
    said = r"^p cannot be started: No such file or directory: .*/r/actors\. Put back what is missing\.$"
    with pytest.raises(RunFailed, match=said):
        await supervisor.watch(supervisor.kept["p"])


class Full(Scripted):
    """A placer on a disk that is full for so many starts."""

    def __init__(self, times: int) -> None:
        super().__init__([EXIT_DONE])
        self.times = times

    async def start(self, spec: Any) -> Any:
        await super().start(spec)
        if self.starts <= self.times:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("role", "start_s", "times"), [("sampler", 600.0, 3), ("recorder", 0.0, 3)])
async def test_an_actor_is_started_when_a_full_disk_has_space_again(
    role: str, start_s: float, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was full for a quarter of a minute ended the run. Without a recorder it goes on for as long as it takes."""
    monkeypatch.setattr("miles_async.launcher.supervisor.FULL_S", 0.0)
    monkeypatch.setattr("miles_async.launcher.supervisor.START_S", start_s)
    placer = Full(times)
    supervisor = Supervisor(cast(Any, placer), SystemClock(), budget=BUDGET, furthest=cast(Any, None))
    supervisor.add(actor_of(name=role, role=role, bus=BusConfig(url="redis://nowhere", run="r"), run_dir=str(tmp_path)))
    await supervisor.watch(supervisor.kept[role])
    [(kind, text)] = placer.notes
    assert placer.starts == times + 1 and kind == "restart"
    assert text.startswith(f"{role} cannot be started, and is tried again until there is space: no space left: {tmp_path} has ")


async def test_a_disk_that_stays_full_ends_the_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_async.launcher.supervisor.START_S", 0.0)
    supervisor = Supervisor(cast(Any, Full(9)), SystemClock(), budget=BUDGET, furthest=cast(Any, None))
    supervisor.add(actor_of(name="trainer", role="trainer", bus=BusConfig(url="redis://nowhere", run="r"), run_dir=str(tmp_path)))
    with pytest.raises(RunFailed, match=rf"^trainer cannot be started: no space left: {tmp_path} has \d+ MB free"):
        await supervisor.watch(supervisor.kept["trainer"])


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = LocalPlacer(tmp_path, threads={}, servers={}).log_file("sampler")
    assert last_words(log_tail(log)) == "no log line"
    with log.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, 2)
        file.write(b"\n2026-01-01 00:00:00,000 sampler ERROR ValueError: the last word\nTraceback\n  File\n")
    tracemalloc.start()
    try:
        assert last_words(log_tail(log)) == "the last word"
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_error_an_actor_told_counts_and_not_what_libraries_say_while_its_process_goes_down() -> None:
    told = "2026-01-01 00:00:00,000 trainer ERROR RunEnds: step 1 cannot be trained: no room"
    noise = "[rank0]:[W1 ProcessGroupNCCL.cpp:1] Warning: destroy_process_group"
    lines = ["2026-01-01 00:00:00,000 trainer ERROR older", told, noise]
    assert last_words(lines, "trainer") == "step 1 cannot be trained: no room"
    assert last_words(lines) == lines[-1]  # killed by a signal: the last it said
