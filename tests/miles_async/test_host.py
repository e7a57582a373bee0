"""A host on which a run cannot be is refused at once, in one line; a full disk is named with what to do."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from actors.runtime.run import disk_text
from miles_async.launcher.prepare import free_weights, shared_memory, weights_dir

ROOT = Path(__file__).parents[2]
Usage = namedtuple("Usage", "total used free")


def train(shell: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a shell that was prepared so; it must end by itself."""
    words = [sys.executable, "-m", "miles_async", "train", str(ROOT / "configs" / "quickstart.toml"), *flags]
    return subprocess.run(
        ["bash", "-c", f'{shell} exec "$@"', "-", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_too_few_open_files_are_refused_with_the_number_and_the_remedy(tmp_path: Path) -> None:
    done = train("ulimit -n 64;", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "64 files open" in done.stderr and "ulimit -n 4096" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    done = train("", "--runs-dir", str(tmp_path / "taken"), cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{tmp_path / 'taken'} is a file, not a folder" in done.stderr and "--runs-dir" in done.stderr


def test_weights_go_elsewhere_when_shared_memory_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    run_dir = tmp_path / "run"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(5000, 1000, 4000))
    assert weights_dir(run_dir, tmp_path) == (shared_memory(run_dir), "")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(5000, 1001, 3999))
    directory, note = weights_dir(run_dir, tmp_path)
    assert directory == run_dir / "weights" and "--shm-size" in note
    (shared_memory(run_dir) / "v1").mkdir(parents=True)
    free_weights(shared_memory(run_dir))
    shared = shared_memory(run_dir).parent  # makes it anew
    assert list(shared.iterdir()) == []
    (kept := shared / "of a worker").touch()
    free_weights(shared / "weights")
    assert kept.exists()
    kept.unlink()
    free_weights(shared / "weights")
    assert not shared.exists()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device", "/dev/shm"), RuntimeError("write failed: No space left on device")],
    ids=["the system's", "a library's"],
)
def test_a_full_disk_is_named(error: Exception, tmp_path: Path) -> None:
    text = disk_text(error, (str(tmp_path),))
    assert "no space left" in text and f"{tmp_path} has " in text and "--shm-size" in text
    assert disk_text(ValueError("other"), ()) == ""
