"""A process that has collected the tests, for all workers of pytest-xdist: each is forked from it. To load what the tests load
takes ten seconds of a processor, and every worker would load it for itself. A worker still collects by itself, from modules that
are there.

`python tests/warm/workers.py WHAT` (JSON) ends when its stdin does. `worker.py` asks for a worker, and stands for it before the
controller; where nobody answers it is one itself. Linux only.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
ALONE = ("-n", "0", "--dist", "no", "-q", "--collect-only")  # after the controller's own arguments


@contextmanager
def collected(arguments: Sequence[str]) -> Iterator[str]:
    """The command of a worker, as execnet takes it. `arguments`: the controller's. A worker begins when the tests are collected."""
    with (
        TemporaryDirectory(prefix="ma-workers-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = f"{directory}/socket"
        listener.bind(path)
        listener.listen(64)
        told = json.dumps({"listener": listener.fileno(), "path": sys.path, "arguments": [*arguments, *ALONE]})
        words = [sys.executable, __file__, told]
        nowhere = subprocess.DEVNULL  # what is wrong with the tests, the workers say
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, pass_fds=[listener.fileno()])
        listener.close()  # when that process is no more, nobody listens
        with process:
            yield shlex.join([sys.executable, "-I", "-S", str(HERE / "worker.py"), path])
            process.communicate()


class Wrong:
    """A plugin of pytest: files that could not be loaded. Their modules would be there for the workers, with no tests and no error:
    they are forgotten, so that each worker loads them itself, and says what is wrong."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._root = Path()

    def pytest_configure(self, config: Any) -> None:
        self._root = config.rootpath

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._files.add(str(self._root / report.nodeid.partition("::")[0]))

    def forget(self) -> None:
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) in self._files:
                del sys.modules[name]


def main(what: str) -> None:
    """Collect, then fork a worker for each that asks."""
    told = json.loads(what)
    sys.path[:] = told["path"]
    import pytest

    from tests.warm.server import keep

    wrong = Wrong()
    pytest.main(told["arguments"], plugins=[wrong])
    wrong.forget()
    gc.collect()
    gc.freeze()  # a worker would copy what its collector looks at
    listener = socket.socket(fileno=told["listener"])
    while 0 not in select.select([0, listener], [], [])[0]:
        asking, _ = listener.accept()
        _, handles, _, _ = socket.recv_fds(asking, 1, 3)
        if len(handles) == 3 and os.fork() == 0:
            listener.close()
            if child := os.fork():
                for number in (0, 1, 2, *handles):
                    os.close(number)
                keep(child, asking.fileno())
            asking.close()
            work(handles)
        for handle in handles:
            os.close(handle)
        asking.close()
    listener.close()
    try:
        while True:
            os.wait()  # their processor time counts as this one's
    except ChildProcessError:
        pass


def work(handles: Sequence[int]) -> NoReturn:
    """Be what `python -u -c COMMAND` would be, with these for stdin, stdout and stderr."""
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    gc.disable()  # as tests/conftest.py does when it is loaded: it is enabled when the tests are there
    sys.argv = ["-c"]
    sys.modules["__main__"] = ModuleType("__main__")
    from tests.warm.server import to_its_end

    to_its_end(lambda: exec("import sys; exec(eval(sys.stdin.readline()))", sys.modules["__main__"].__dict__))


if __name__ == "__main__":
    main(sys.argv[1])
