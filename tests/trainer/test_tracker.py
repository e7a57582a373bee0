"""A checkpoint's tracker is replaced whole, so that a power cut leaves the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path

from actors.trainer.checkpoint import TRACKER, bus_state_file, finish
from tests.actors.test_checkpoint import save, state


def test_whoever_reads_the_tracker_sees_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """A second name for the old file shows whether it was written into: then a cut in between leaves a damaged one."""
    save(tmp_path, 1)
    for name in (TRACKER, bus_state_file(Path(), 1)):
        os.link(tmp_path / name, tmp_path / f"old-{Path(name).name}")
    before = bus_state_file(tmp_path, 1).read_bytes()
    finish(tmp_path, state(2), keep_last=0)
    assert (tmp_path / TRACKER).read_text() == "2\n" and (tmp_path / f"old-{TRACKER}").read_text() == "1\n"
    finish(tmp_path, state(1, metrics={"x": 1.0}), keep_last=0)
    assert (tmp_path / f"old-{bus_state_file(Path(), 1).name}").read_bytes() == before
