"""What is forked is like what is started: same command line, own session, own log, own end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from actors.runtime.child import PYTHON, Child, ended, is_alive
from actors.runtime.fork_server import ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
PROGRAM = """
import json, os, sys, time
print(json.dumps([sys.argv[1:], os.environ["GIVEN"], "json.decoder" in sys.modules]), flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that every server here can run."""
    (tmp_path / "a_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
    return tmp_path


async def started(server: ForkServer, program: Path, word: str) -> Child:
    forked = await server.start(["a_program", word], program / f"{word}.log", {"GIVEN": "x"})
    assert forked is not None
    child = Child(outlives=True)
    child.adopt(*forked)
    return child


async def test_a_child_runs_its_order_and_its_exit_status_comes_back(program: Path) -> None:
    server = ForkServer(["json"])
    try:
        children = [await started(server, program, word) for word in ("0", "70")]
        assert [await asyncio.wait_for(child.wait(), 20) for child in children] == [0, 70]
        assert (program / "70.log").read_text() == '[["70"], "x", true]\n'
    finally:
        await server.close()


async def test_the_end_of_a_child_is_known_also_when_it_is_read_together_with_its_start(program: Path) -> None:
    server, log = ForkServer([]), program / "3.log"
    try:
        starting = asyncio.create_task(started(server, program, "3"))
        await asyncio.sleep(0.01)  # the order is written
        while not log.exists() or not log.read_text():
            time.sleep(0.01)  # noqa: ASYNC251 - the loop stands still, as on a busy host
        time.sleep(0.3)  # noqa: ASYNC251 - and the child ends meanwhile
        assert await asyncio.wait_for((await starting).wait(), 20) == 3
    finally:
        await server.close()


async def test_a_child_is_found_as_if_it_had_been_started_by_hand(program: Path) -> None:
    server = ForkServer([])
    try:
        child = await started(server, program, "wait")
        process = psutil.Process(child.pid)
        async with asyncio.timeout(20):
            while "a_program" not in process.cmdline():  # noqa: ASYNC110 - what another process does
                await asyncio.sleep(0.01)
        assert [word for word in process.cmdline() if word] == [*PYTHON, "a_program", "wait"]
        assert os.getsid(child.pid) == child.pid
        pid, waiting = child.pid, asyncio.create_task(child.wait())
        await asyncio.sleep(0)
        assert await child.stop(10)
        assert await asyncio.wait_for(waiting, 20) == -signal.SIGTERM
        assert not is_alive(pid)
    finally:
        await server.close()


async def test_children_outlive_their_server_and_are_watched_all_the_same(program: Path) -> None:
    server = ForkServer([])
    child = await started(server, program, "wait")
    psutil.Process(child.pid).parent().kill()
    waiting = asyncio.create_task(child.wait())
    assert await server.start(["a_program", "0"], program / "late.log", {}) is None, "the caller starts it by itself"
    assert child.alive and not waiting.done()
    os.kill(child.pid, signal.SIGKILL)
    assert await asyncio.wait_for(waiting, 20) is None
    await server.close()


async def test_a_server_that_cannot_load_serves_nobody(program: Path) -> None:
    server = ForkServer(["no_such_module"])
    assert await server.start(["a_program", "0"], program / "0.log", {}) is None
    await server.close()


async def test_the_end_of_a_strange_process_is_noticed_and_awaited_no_longer_than_asked() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    assert not await ended(process.pid, 0.05)
    process.kill()
    assert await ended(process.pid, 20)
    await process.wait()


async def test_a_server_that_does_not_answer_is_given_up_and_starts_nothing_later(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program / "a_slow_one.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("actors.runtime.fork_server.ANSWER_S", 0.2)
    server = ForkServer(["a_slow_one"])
    try:
        assert await server.start(["a_program", "0"], program / "0.log", {"GIVEN": "x"}) is None
        assert not (program / "0.log").exists()
    finally:
        await server.close()


ORDERER = """
import asyncio, sys
from pathlib import Path
from actors.runtime.fork_server import ForkServer

async def order():
    server = ForkServer(["a_gate"])
    asyncio.get_running_loop().call_later(0.5, lambda: print("ordered", server._process.pid, flush=True))
    await server.start(["a_program", "0"], Path(sys.argv[1]), {"GIVEN": "x"})
    print("answered", flush=True)
    await asyncio.sleep(60)

asyncio.run(order())
"""
GATE = """
import os, time
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("dies", [True, False])
async def test_an_order_that_lay_there_while_its_orderer_died_is_carried_out_by_nobody(
    program: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """The server loads for as long as the gate is closed."""
    gate, log = program / "open", program / "0.log"
    (program / "a_gate.py").write_text(GATE)
    monkeypatch.setenv("GATE", str(gate))
    words = (sys.executable, "-c", ORDERER, str(log))
    orderer = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    assert orderer.stdout is not None
    said, server = (await asyncio.wait_for(orderer.stdout.readline(), 60)).split()
    assert said == b"ordered"
    if dies:
        orderer.kill()
        await orderer.wait()
    gate.touch()
    if dies:
        assert await ended(int(server), 60)
        assert not log.exists()
    else:
        assert await asyncio.wait_for(orderer.stdout.readline(), 60) == b"answered\n"
        orderer.kill()
        await orderer.wait()


@pytest.mark.parametrize("dies", [True, False])
async def test_a_fork_can_be_found_before_it_asks_whether_its_orderer_lives(
    program: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setenv("MILES_ASYNC_FAULT", "wait:renamed:1:STOP")
    monkeypatch.setenv("GATE", str(program))
    (program / "a_gate.py").write_text(GATE)
    log = program / "wait.log"
    source = ORDERER.replace('["a_program", "0"]', '["a_program", "wait"]')
    orderer = await asyncio.create_subprocess_exec(sys.executable, "-c", source, str(log), stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        while not (found := _standing("a_program", "wait")):  # noqa: ASYNC110 - what another process does
            await asyncio.sleep(0.05)
    [fork] = found
    if dies:
        orderer.kill()
        await orderer.wait()
    os.kill(fork.pid, signal.SIGCONT)
    if dies:
        assert await ended(fork.pid, 60) and not log.exists()
        return
    async with asyncio.timeout(60):
        while not log.exists():  # noqa: ASYNC110 - what another process does
            await asyncio.sleep(0.01)
    orderer.kill()
    await orderer.wait()
    assert is_alive(fork.pid), "it began while its orderer lived, and stays"
    fork.kill()


def _standing(*words: str) -> list[psutil.Process]:
    """Stopped processes whose command line ends with these words."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        said = [word for word in process.info["cmdline"] or () if word]
        if said[-len(words) :] == list(words) and process.info["status"] == psutil.STATUS_STOPPED:
            found.append(process)
    return found
