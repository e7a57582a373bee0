"""Workers of pytest-xdist are forked from a process that has collected the tests (tests/warm/workers.py)."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm.workers import collected

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a file descriptor of a process is Linux's")
TELL = (
    "import json, os, sys; there = [name for name in ('test_little', 'test_wrong') if name in sys.modules]; "
    "print(json.dumps([os.getpid(), there, sys.argv])); sys.stdout.flush(); "
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_little.py").write_text("def test_nothing(): ...\n")
    (folder / "test_wrong.py").write_text("import there_is_no_such_module\n")
    own = [
        "--import-mode=importlib",
        "--rootdir",
        str(folder),
        "-c",
        "/dev/null",
        "-p",
        "no:cacheprovider",
    ]  # as pyproject.toml has it
    with collected([str(folder), *own]) as found:
        yield shlex.split(found)


def started(command: list[str]) -> subprocess.Popen[str]:
    """As execnet starts one."""
    words = [*command, "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_worker_has_what_was_collected_and_ends_with_its_status(command: list[str]) -> None:
    """Also where another file cannot be collected: its module is not there, so that the workers say what is wrong with it."""
    pids = set()
    for status, end in (
        (0, ""),
        (3, "sys.exit(3)"),
        (1, "raise ValueError('seen')"),
        (-signal.SIGKILL, "os.kill(os.getpid(), 9)"),
    ):
        with started(command) as worker:
            said, errors = worker.communicate(repr(TELL + end) + "\n", timeout=100)
        pid, there, words = json.loads(said)
        assert (worker.returncode, there, words) == (status, ["test_little"], ["-c"])
        assert ("ValueError: seen" in errors) == (status == 1), errors
        pids.add(pid)
    assert len(pids) == 4


def test_a_worker_ends_with_the_process_that_stands_for_it(command: list[str]) -> None:
    with started(command) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(repr(TELL + "import time; time.sleep(3600)") + "\n")
        worker.stdin.flush()
        assert json.loads(worker.stdout.readline())[0] != worker.pid
        worker.kill()
        assert worker.stdout.read() == "", "nobody holds its other end"


def test_where_nobody_answers_it_is_a_worker_itself(command: list[str], tmp_path: Path) -> None:
    with started([*command[:-1], str(tmp_path / "nobody")]) as worker:
        said, _ = worker.communicate(repr(TELL + "sys.exit(3)") + "\n", timeout=100)
    assert json.loads(said) == [worker.pid, [], ["-c"]]
    assert worker.returncode == 3
