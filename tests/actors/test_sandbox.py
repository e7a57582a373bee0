"""Code that nobody vouches for: whatever it does, one result with its cause, and the caller goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from actors.runtime.sandbox import Sandbox, SandboxUnavailable
from actors.runtime.sandbox_child import ALLOWED, ARCHES, call_filter

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(width=4, memory_bytes=512 << 20, output_bytes=10_000, deadline_s=10.0) as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("code", "cause", "said"),
    [
        ("print(input()[::-1])", "ok", "dnuos\n"),
        ("1 / 0", "raised", "ZeroDivisionError: division by zero\n"),
        ("def f(:", "raised", "SyntaxError: invalid syntax\n"),
        ("import sys; print('told'); sys.exit(3)", "exit", "told\n"),
        ("import sys; sys.exit('why')", "exit", "why\n"),
        ("def f(): f()\nf()", "raised", "RecursionError: maximum recursion depth exceeded\n"),
        ("bytearray(10**12)", "memory", ""),
        ("held = []\nwhile True: held.append(bytearray(10**7))", "memory", ""),
        ("import ctypes; ctypes.string_at(0)", "crash", ""),
        ("import os; os.abort()", "crash", ""),
        ("import os; os.write(1, bytes([255, 0, 65]))", "ok", "\ufffd\0A"),
        ("print('x', end='')\nimport os; os._exit(0)", "ok", ""),
    ],
)
async def test_each_end_has_its_cause(box: Sandbox, code: str, cause: str, said: str) -> None:
    ran = await box.run(code, stdin="sound\n")
    assert (ran.cause, (ran.stdout + ran.stderr).endswith(said)) == (cause, True), ran


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(600)", "import os; os.close(1); os.close(2)\nwhile 1: 0"]
)
async def test_what_hangs_is_ended_at_its_deadline(box: Sandbox, code: str) -> None:
    assert (await box.run(code, deadline_s=0.2)).cause == "deadline"


async def test_a_flood_is_cut_off_at_the_limit(box: Sandbox) -> None:
    ran = await box.run("print('x' * 100_000_000)")
    assert (ran.cause, ran.stdout) == ("output", "x" * 10_000)


@pytest.mark.parametrize(
    "code",
    [
        "os.fork()",
        "subprocess.Popen(['true'])",
        "os.execv(sys.executable, ['python'])",
        "socket.socket()",
        "os.kill(os.getppid(), 0)",
        "os.kill(1, 0)",
        "open('{scratch}/new', 'w')",
        "open('{scratch}/old', 'r+')",
        "os.unlink('{scratch}/old')",
        "os.chmod('{scratch}/old', 0)",
        "os.truncate('{scratch}/old', 0)",
        "ctypes.CDLL(None, use_errno=True).syscall(425, 8, 0) < 0 and 1 / 0",  # io_uring_setup
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    ],
)
async def test_what_would_reach_out_of_it_is_refused(box: Sandbox, code: str, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("kept")
    ran = await box.run("import ctypes, os, resource, socket, subprocess, sys\n" + code.replace("{scratch}", str(tmp_path)))
    assert ran.cause == "raised", ran
    assert [p.name for p in tmp_path.iterdir()] == ["old"] and old.read_text() == "kept" and old.stat().st_mode & 0o600


async def test_it_sees_no_file_of_ours_and_no_variable(box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not box.confined:
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "secret").write_text("token")
    for path in (tmp_path / "secret", Path("/proc/self/environ"), Path("/etc/passwd"), Path(__file__)):
        assert "PermissionError" in (await box.run(f"open({str(path)!r}).read()")).stderr
    monkeypatch.setenv("MILES_ASYNC_BUS_PASSWORD", "secret")
    async with Sandbox() as other:
        assert "MILES" not in (await other.run("import os; print(os.environ)")).stdout


async def test_equal_code_draws_equal_numbers_and_libraries_work(box: Sandbox) -> None:
    code = "import random, asyncio, numpy\nasyncio.run(asyncio.sleep(0))\n"
    code += "print(random.random(), hash('a'), numpy.ones(9) @ numpy.ones(9))"
    first, second = await asyncio.gather(box.run(code), box.run(code))
    assert first.cause == "ok" and first.stdout == second.stdout


async def test_many_callers_each_get_their_own_answer_and_a_last_value_is_shown_when_asked_for(box: Sandbox) -> None:
    answers = await asyncio.gather(*(box.run(f"{i} * 2", echo=True) for i in range(50)))
    assert [ran.stdout for ran in answers] == [f"{i * 2}\n" for i in range(50)]
    assert (await box.run("3 * 4")).stdout == ""


async def test_a_server_that_dies_is_replaced_and_its_code_run_again() -> None:
    async with Sandbox(deadline_s=20.0) as box:
        running = asyncio.create_task(box.run("import time; time.sleep(0.5); print('done')"))
        server = psutil.Process(server_of(box))
        async with asyncio.timeout(10.0):
            while not (jobs := server.children()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
        assert (await running).stdout == "done\n"
        assert all(not job.is_running() or job.status() == psutil.STATUS_ZOMBIE for job in jobs)


def server_of(box: Sandbox) -> int:
    assert box._server is not None
    return box._server._process.pid


async def test_a_host_that_cannot_hold_it_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.runtime.sandbox.SCRIPT", Path(__file__).with_name("no_such_file.py"))
    with pytest.raises(SandboxUnavailable, match="did not start"):
        async with Sandbox():
            raise AssertionError


async def test_the_filter_of_every_machine_lets_no_path_end_open() -> None:
    """Each jump stays in the program, and the last word is a refusal."""
    for machine in ALLOWED:
        program = call_filter(machine, pid=77)
        steps = [program[at : at + 8] for at in range(0, len(program), 8)]
        assert machine in ARCHES and steps[-1][0] == 0x06 and steps[-1][4:] != (0x7FFF0000).to_bytes(4, "little")
        for index, step in enumerate(steps):
            assert step[0] == 0x06 or index + 1 + max(step[2], step[3]) < len(steps)
