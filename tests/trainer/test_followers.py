"""Ranks that somebody else starts."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from actors.trainer.followers import Followers
from tests.warm.launched import open_warm

CONNECT = """
from datetime import timedelta
from actors.trainer.training import ranks
ranks.STEP_DEADLINE = timedelta(seconds=1)
ranks.Ranks(1, 2).connect()
"""


async def test_ranks_that_others_start_meet_where_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "9")
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))  # nobody listens there, and nobody will: rank 0 is rank 1 of somebody else's
        followers = Followers(2, str(tmp_path), f"127.0.0.1:{port.getsockname()[1]}")
        await followers.start()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("0", "2", "127.0.0.1")
        assert not list(tmp_path.iterdir()), "no process of ours"
        # In a process of its own: torch does not survive a second start of its default group after one that failed.
        done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", CONNECT], capture_output=True, text=True, timeout=60)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode and re.search(r"RanksApart: rank 1 of the trainer's 2 found not all of them at 127\.0\.0\.1:\d+", said)


def test_a_follower_alone_refuses_to_run(warm: Path | None, tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    with open_warm(warm, ["actors.trainer.follower"], printed, {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}) as follower:
        assert follower.wait(60) == 2
    assert "is no follower" in printed.read_text() and "Traceback" not in printed.read_text()
