"""What code of the user's starts in a session of its own ends with its actor, or with the next one after `kill -9`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from actors.runtime.child import ended, is_alive
from actors.runtime.leftovers import MARK, end_marked, end_orphans, new_mark
from actors.runtime.run import EXIT_DONE
from bus import BusConfig
from tests.declared import actor_of

ACTOR = f"""
import os, signal, subprocess, sys
from actors.runtime import run
async def body(spec, room, body):
    print(int(subprocess.check_output(["setsid", "sh", "-c", "sleep 900 >&- & echo $!"])), flush=True)
    if spec.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return {EXIT_DONE}
run.run_actor = body
run.main(dict, None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="found by their environment, which is read on Linux")
@pytest.mark.parametrize("name", ["done", "killed"])
async def test_what_an_agent_sent_into_a_session_of_its_own_ends_with_its_worker(name: str, tmp_path: Path) -> None:
    spec = tmp_path / "actor.json"
    actor_spec = actor_of(name=name, role="generation", bus=BusConfig(url="redis://none", run="r"), room={})
    spec.write_bytes(msgspec.json.encode(actor_spec))
    stranger = await asyncio.create_subprocess_exec("sleep", "900")
    try:
        actor = await asyncio.create_subprocess_exec(sys.executable, "-c", ACTOR, str(spec), stdout=subprocess.PIPE)
        said, _ = await actor.communicate()
        helper = int(said)
        if name == "killed":
            assert actor.returncode == -9 and is_alive(helper)
            assert end_orphans() >= 1
        else:
            assert actor.returncode == EXIT_DONE
        assert await ended(helper, 20.0), "it is killed, which takes the kernel a moment"
        assert is_alive(stranger.pid) and is_alive(os.getpid())
    finally:
        stranger.kill()
        await stranger.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="found by their environment, which is read on Linux")
async def test_what_a_container_runs_is_no_orphan_from_outside_whose_process_ids_are_others() -> None:
    here, _, rest = new_mark().partition(":")
    gone = rest.replace(str(os.getpid()), "4194305", 1)  # an id that nobody has here
    mark = f"{here}0:{gone}"
    inside = await asyncio.create_subprocess_exec("sleep", "900", env=os.environ | {MARK: mark})
    orphan = await asyncio.create_subprocess_exec("sleep", "900", env=os.environ | {MARK: f"{here}:{gone}"})
    try:
        end_orphans()
        assert not is_alive(orphan.pid), "it is gone by then, and not only killed"
        assert await orphan.wait() == -9
        assert inside.returncode is None and is_alive(inside.pid)
        assert end_marked(mark) == 1, "who started it ends it by its whole mark"
    finally:
        inside.kill()
        await inside.wait()
