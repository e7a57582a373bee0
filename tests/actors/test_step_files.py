"""Files beside training: one that cannot be written is told and ends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.trainer.checkpoint import write_durably
from actors.trainer.step_files import StepFiles
from bus.topology import EVENTS
from tests.actors.house import messages, open_bus
from tests.actors.test_trainer_parts import SPLIT, trainer_of


async def test_a_batch_that_cannot_be_recorded_is_told_of_once_until_one_is_again(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    """A full disk for --save-debug-rollout-data ended the run, and each restart lost the steps since the checkpoint."""
    (tmp_path / "file").touch()
    good, bad = tmp_path / "good", tmp_path / "file" / "bad"
    async with open_bus(redis_url, run_name, knobs=SPLIT) as bus, trainer_of(bus) as trainer:
        context = trainer.context
        files = StepFiles(context)
        for step, target in enumerate((bad, bad, good, bad), 1):
            await files.write("batch", step, target, write_durably, target, b"data")
        for step, missing in enumerate((2, 1, 0)):  # ranks that could not write theirs
            await files.wrote("train_data", step, bad, missing)
        said = [m.text for m in await messages(bus, EVENTS) if m.kind == "not written"]
    assert [text[:15] for text in said] == ["batch of step 1", "batch of step 4", "train_data of s"] and str(bad) in said[0]
    assert context.counters["not_written/batch"] == context.counters["not_written/train_data"] == 3 and good.read_bytes() == b"data"


def test_half_a_file_does_not_stay_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []
