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

from actors.runtime.confine import NO_LANDLOCK, lacking
from actors.runtime.sandbox import PROGRAM, Sandbox, SandboxUnavailable

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


async def test_it_sees_no_file_of_ours(box: Sandbox, tmp_path: Path) -> None:
    if not box.confined:
        pytest.skip("this kernel has neither Landlock nor namespaces for us")
    (tmp_path / "secret").write_text("token")
    for path in (tmp_path / "secret", Path("/proc/self/environ"), Path("/etc/passwd"), Path(__file__)):
        assert "Error: [Errno" in (await box.run(f"open({str(path)!r}).read()")).stderr


async def test_behind_the_second_wall_nothing_else_has_a_name(box: Sandbox, tmp_path: Path) -> None:
    if not box.walled:
        pytest.skip("this kernel has no namespaces for us")
    ran = await box.run(f"import os; print(os.getppid(), os.path.exists({str(tmp_path)!r}), os.path.exists('/etc/passwd'))")
    assert ran.stdout == "1 False False\n"
    assert "Errno 3" in (await box.run(f"import os; os.sched_getaffinity({os.getpid()})")).stderr or ran.cause == "ok"


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


async def test_what_one_piece_of_code_does_to_the_server_is_no_others_loss(box: Sandbox) -> None:
    """The code that ended it runs again too, alone; here it is innocent as well: the end came from outside."""
    async with Sandbox(width=4, deadline_s=20.0) as other:
        running = [asyncio.create_task(other.run(f"import time; time.sleep(0.5); print({i})")) for i in range(4)]
        server = psutil.Process(server_of(other))
        async with asyncio.timeout(10.0):
            while len(server.children(recursive=True)) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        os.kill(server.children(recursive=True)[0].pid, signal.SIGKILL)
        assert [ran.stdout for ran in await asyncio.gather(*running)] == [f"{i}\n" for i in range(4)]


async def test_code_that_ends_every_server_is_lost_and_no_other() -> None:
    async with Sandbox(width=4) as other:
        other._limits["output_bytes"] = "none"  # no server takes such an order
        ran = await other.run("1")
        other._limits["output_bytes"] = 1000
        fine = await other.run("print(2)")
    assert (ran.cause, fine.stdout) == ("lost", "2\n")


async def test_code_finds_nothing_of_other_code(box: Sandbox) -> None:
    """Neither in frames nor among all objects that are collected."""
    look = """
import ctypes, gc, sys
word, found = lambda: "".join(reversed("gnissorcarbez")), []
for one in gc.get_objects():
    if isinstance(one, (dict, list, tuple)) and len(one) < 1000:
        found += [type(one)] * (word() in repr(one))
frame = sys._getframe()
while frame := frame.f_back:
    found += [name for name, value in frame.f_locals.items() if word() in repr(value)]
print(found)
"""
    running = asyncio.create_task(box.run("import time; hidden = 'zebracrossing'; time.sleep(1)", stdin="zebracrossing"))
    await asyncio.sleep(0.2)
    seen = await box.run(look)
    assert seen.stdout == "[]\n", seen
    await running


HALF = "\ud800"  # of a pair of surrogates: JSON can say it, no text can hold it


@pytest.mark.parametrize("code", [f"print({HALF!r})", f"'{HALF}'", f"# {HALF}", "open(1, 'wb').write(bytes([200]))"])
async def test_what_is_no_text_becomes_text(box: Sandbox, code: str) -> None:
    ran = await box.run(code, stdin=HALF, echo=True)
    (ran.stdout + ran.stderr).encode()
    assert ran.cause in ("ok", "raised") and ran.stdout + ran.stderr


async def test_a_kernel_that_lacks_a_part_is_refused_unless_it_is_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the sandbox's own process finds it."""
    lacks = "from actors.runtime import confine, namespaces; confine.lacking = lambda: (confine.NO_LANDLOCK,); "
    lacks += "confine.landlock_version = lambda: 0; namespaces.enter = lambda paths: (_ for _ in ()).throw(OSError(1, 'no')); "
    program = PROGRAM.replace("from actors.runtime.sandbox_child", lacks + "from actors.runtime.sandbox_child")
    monkeypatch.setattr("actors.runtime.sandbox.PROGRAM", program)
    with pytest.raises(SandboxUnavailable, match=r"lacks limits on which files .* --allow-weak-sandbox .* No code was run"):
        await Sandbox().__aenter__()
    async with Sandbox(weak=True) as box:
        assert box.missing == (NO_LANDLOCK,) and not box.confined and (await box.run("print(1)")).stdout == "1\n"
        assert "Error: [Errno" in (await box.run("import os; os.fork()")).stderr, "what the kernel has holds"


async def test_this_kernel_lacks_nothing_or_says_what() -> None:
    async with Sandbox(weak=True) as box:
        assert box.missing == lacking()


async def test_a_host_that_cannot_hold_it_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.runtime.sandbox.PROGRAM", "raise SystemExit(3)")
    with pytest.raises(SandboxUnavailable, match="did not start"):
        async with Sandbox():
            raise AssertionError
