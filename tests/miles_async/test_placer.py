"""What runs on this host already: adopted with the same settings, else ended; told by the process table alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import psutil
import pytest

from actors.runtime.child import Child, is_alive
from actors.runtime.context import ActorSpec
from bus import BusConfig
from miles_async.launcher.local import LocalPlacer, mark_of, running
from tests.declared import actor_of

SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """All that a test starts; none is left."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(30)


def spec_of(run_dir: Path, name: str = "partial") -> ActorSpec:
    config = BusConfig(url=f"unix://{run_dir}/none.sock", run="r", deadline_s=0.2)
    return actor_of(name=name, role="partial", bus=config, run_dir=str(run_dir), drain_timeout_s=1.0)


def lives(processes: list[subprocess.Popen[bytes]], run_dir: Path, *marks: str, name: str = "partial") -> int:
    """A process with the command line of an actor; its pid."""
    return begun(processes, "-m", "actors.partial", *marks, f"{run_dir.resolve()}/actors/{name}.json")


def begun(processes: list[subprocess.Popen[bytes]], *words: str) -> int:
    """A process that says these words; its pid."""
    processes.append(subprocess.Popen([sys.executable, "-c", SLEEPS, *words], start_new_session=True))
    until = time.monotonic() + 60.0
    while psutil.Process(processes[-1].pid).cmdline()[-1:] != [words[-1]]:  # exec has begun when Popen returns, and may not be done
        assert time.monotonic() < until
        time.sleep(0.01)
    return processes[-1].pid


async def test_what_runs_with_the_same_settings_is_adopted_once(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    placer, spec = LocalPlacer(tmp_path, threads={}, servers={}), spec_of(tmp_path)
    placer.add(spec)
    pids = {lives(processes, tmp_path, mark_of(spec)) for _ in range(2)}
    other = lives(processes, tmp_path / "other", mark_of(spec))
    (kept,) = {cast(Child, await placer.start(spec)).pid}
    assert kept in pids and is_alive(kept) and is_alive(other)
    assert [pid for pid, _ in running(tmp_path)["partial"]] == [kept], "the other one was one too many"
    assert sorted(kind for kind, _ in placer.notes) == ["adopted", "replaced"]


@pytest.mark.parametrize("marked", [True, False])
async def test_what_runs_with_other_settings_is_replaced(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], marked: bool
) -> None:
    placer, spec = LocalPlacer(tmp_path, threads={}, servers={}), spec_of(tmp_path)
    placer.add(spec)
    before = msgspec.structs.replace(spec, run_seed=spec.run_seed + 1)
    old = lives(processes, tmp_path, *([mark_of(before)] if marked else []))
    process = cast(Child, await placer.start(spec))
    assert not is_alive(old) and process.pid != old
    assert [kind for kind, _ in placer.notes] == ["replaced"]
    end = await placer.end_of(spec, process)
    assert end.code is not None and "partial" in end.log


async def test_an_actor_that_was_started_is_found_by_its_mark(tmp_path: Path) -> None:
    placer, spec = LocalPlacer(tmp_path, threads={}, servers={}), spec_of(tmp_path)
    spec = msgspec.structs.replace(spec, bus=msgspec.structs.replace(spec.bus, deadline_s=60.0))
    placer.add(spec)
    process = cast(Child, await placer.start(spec))
    while not (found := running(tmp_path)):  # between fork and exec it has our command line
        pass
    assert found == {"partial": [(process.pid, mark_of(spec))]}
    await process.stop(0.0)


async def test_what_is_not_in_the_settings_any_more_ends(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    placer, spec = LocalPlacer(tmp_path, threads={}, servers={}), spec_of(tmp_path)
    placer.add(spec)
    kept, other = lives(processes, tmp_path, mark_of(spec)), lives(processes, tmp_path, name="generation-7")
    strangers = [lives(processes, tmp_path / "r2", name="generation-7")]
    strangers.append(begun(processes, "cat", f"{tmp_path}/actors/generation-7.json"))
    await placer.open()
    assert not is_alive(other) and is_alive(kept) and all(map(is_alive, strangers))
    assert [text.partition(" (")[0] for _, text in placer.notes] == ["generation-7"]


def test_a_process_of_another_user_is_none_of_ours(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may have such a command line."""
    pid = lives(processes, tmp_path)
    assert [found for found, _ in running(tmp_path)["partial"]] == [pid] and psutil.Process(pid).is_running()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert running(tmp_path) == {}
