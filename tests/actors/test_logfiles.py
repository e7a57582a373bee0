"""A log keeps its beginning and its end, whoever writes to it meanwhile."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from actors.runtime.child import Child
from actors.runtime.logfiles import all_short, keep_short, shorten


def test_a_long_log_loses_its_middle_in_whole_lines_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    lines = [f"line {number:04}\n".encode() for number in range(1000)]
    log.write_bytes(b"".join(lines))
    assert shorten(log, most=10_000, first=95, last=95) == 0 and log.read_bytes() == b"".join(lines)
    left_out = shorten(log, most=9_999, first=95, last=95)
    kept = log.read_bytes().splitlines(keepends=True)
    assert kept[:9] == lines[:9] and kept[10:] == lines[-9:]
    assert kept[9] == b"[%d bytes are left out here: a log has at most 9999]\n" % left_out and left_out == 9_820
    assert shorten(log, most=9_999) == 0


def test_a_log_without_lines_is_cut_where_it_may(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 1000)
    assert shorten(log, most=100, first=10, last=20) == 970
    assert log.read_bytes() == b"x" * 10 + b"[970 bytes are left out here: a log has at most 100]\n" + b"x" * 20


def test_who_writes_goes_on_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"first\n" + b"middle\n" * 1000 + b"last\n")
        shorten(log, most=100, first=8, last=8)
        writer.write(b"more\n")
    told = log.read_bytes()
    assert told.startswith(b"first\n[") and told.endswith(b"last\nmore\n") and len(told) < 100


async def test_the_log_of_a_child_that_prints_without_end_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.runtime.logfiles.LOOK_S", 0.02)
    monkeypatch.setattr(shorten, "__kwdefaults__", {"most": 50_000, "first": 1000, "last": 1000})
    (tmp_path / "logs").mkdir()
    log, child, stop = tmp_path / "logs" / "hook.log", Child(), asyncio.Event()
    flood = "import sys\nprint('the beginning')\nfor n in range(10**6): print('x' * 50, n, flush=n % 999 == 0)\nprint('the end')"
    keeping = asyncio.create_task(keep_short(tmp_path, stop))
    await child.start([sys.executable, "-c", flood], log, dict(os.environ))
    assert await asyncio.wait_for(child.wait(), 60) == 0
    stop.set()
    await keeping
    all_short(tmp_path)
    told = log.read_bytes()
    assert told.startswith(b"the beginning\n") and told.endswith(b"the end\n") and len(told) <= 50_000
    assert b"bytes are left out here" in told and b"\0" not in told
