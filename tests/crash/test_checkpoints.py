"""Checkpoints that were cut short, damaged, foreign or had no room: one line says what is intact, and that is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.crash.conftest import Launch
from tests.crash.house import Run, until
from tests.crash.judge import judge

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]


def trained(run: Run) -> Run:
    """The run, at its end, with checkpoints 2, 4 and 6."""
    run.start()
    run.finish()
    assert run.saved() == run.steps
    return run


def refused(run: Run, *words: str) -> None:
    """The next start ends with status 2 and one line that says these words."""
    before = len(run.output())
    run.start(flags=("--num-rollout", "8"))
    assert run.join() == 2, run.story()
    said = run.output()[before:].strip().splitlines()
    line = said[-1]
    assert "Traceback" not in run.output()
    for word in words:
        assert word in line, f"{word!r} is not in {line!r}"


@pytest.mark.slow
def test_a_checkpoint_cut_short_is_never_chosen(run_of: Launch) -> None:
    run = run_of()
    run.start(fault="trainer:checkpoint_half:2:STOP")
    run.until("the second checkpoint to be half written", lambda: run.struck)
    run.kill_all()
    assert (run.checkpoints / "iter_0000004").exists()
    assert run.saved() == 2
    run.start()
    run.finish()
    restored = (run.dir / "logs" / "trainer.log").read_text()
    assert "at step 2" in restored
    judge(run)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_the_intact_ones_are_named(run_of: Launch) -> None:
    run = trained(run_of())
    newest = max((run.checkpoints / "iter_0000006").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    newest.write_bytes(bytes(content))
    refused(run, "6", "Intact", "2, 4", "latest_checkpointed_iteration.txt")
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("4\n")
    run.start()
    run.finish()
    assert "the bus goes back" in run.output()
    judge(run, whole_policy=False)


@pytest.mark.slow
def test_a_checkpoint_with_a_part_damaged_is_refused(run_of: Launch) -> None:
    run = trained(run_of())
    state = run.checkpoints / "rollout" / "bus_state_0000006.msgpack"
    tracker = run.checkpoints / "latest_checkpointed_iteration.txt"
    for file, damaged in ((state, b"\x81"), (tracker, b"latest\n")):
        sound = file.read_bytes()
        file.write_bytes(damaged)
        refused(run, "2, 4")
        file.write_bytes(sound)
    shutil.rmtree(run.checkpoints / "iter_0000006")
    refused(run, "2, 4")


@pytest.mark.slow
def test_a_checkpoint_of_another_data_set_is_refused(run_of: Launch) -> None:
    run = trained(run_of())
    other = Path(run.home / "other.jsonl")
    other.write_text(Path(str(run.setting("rollout", "prompt_data"))).read_text())
    shutil.rmtree(run.dir / "redis")
    before = len(run.output())
    run.start(flags=("--prompt-data", str(other)))
    assert run.join() == 2
    *_, note, said = run.output()[before:].strip().splitlines()
    assert note.startswith("note: prompt_data was ") and note.endswith(f"and is {str(other)!r}")
    assert "other data or group settings" in said
    assert "Nothing was changed" in said


@pytest.mark.slow
def test_a_bus_that_holds_a_run_of_other_data_is_refused(run_of: Launch) -> None:
    run = trained(run_of())
    other = Path(run.home / "other.jsonl")
    other.write_text(Path(str(run.setting("rollout", "prompt_data"))).read_text())
    shutil.rmtree(run.checkpoints)
    before = len(run.output())
    run.start(flags=("--prompt-data", str(other)))
    assert run.join() == 2
    said = run.output()[before:].strip().splitlines()[-1]
    assert "there is a run of this name" in said
    assert "Nothing was changed" in said


@pytest.mark.slow
def test_no_room_for_a_checkpoint_keeps_the_former_one(run_of: Launch) -> None:
    """The trainer may write no file above a size that only its checkpoint exceeds; the run goes on, and ends failed."""
    run = run_of({"rollout": {"num_rollout": 100_000}})
    run.start()
    run.until("the first checkpoint", lambda: run.saved() >= 2)
    weights = (run.checkpoints / f"iter_{run.saved():07d}").rglob("model.safetensors")
    run.limit_file_size("trainer", 3 * max(file.stat().st_size for file in weights) // 2)
    log = run.dir / "logs" / "trainer.log"
    until("the failed checkpoint", lambda: "checkpoint failed" in log.read_text())
    step, saved = run.step(), run.saved()
    run.until_step(step + 1)
    assert "intact" in log.read_text()
    assert run.saved() == saved
    run.limit_file_size("trainer", -1)
    run.until("the next checkpoint", lambda: run.saved() > saved)
    run.drain()
    judge(run, steps=run.saved())
