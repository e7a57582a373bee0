"""The warm server (server.py) of a test session, and commands of ours in processes that it forks."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from tests.warm.sitecustomize import WARM, ask

HERE = Path(__file__).parent


@contextmanager
def warm_server() -> Iterator[Path | None]:
    """Its socket; None where there can be none. It loads nothing before it is asked."""
    if sys.platform != "linux":
        yield None
        return
    with TemporaryDirectory(prefix="ma-warm-") as directory:
        socket = Path(directory) / "socket"
        skew = clock_of(Path(directory))
        words = [sys.executable, "-P", str(HERE / "server.py"), str(socket), "-" * 2000]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1]), "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"LD_PRELOAD": str(skew)} if skew.exists() else {}
        with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE) as server:  # it ends when its stdin does
            end = time.monotonic() + 60
            while not socket.exists():
                assert server.poll() is None and time.monotonic() < end, "the warm server does not start"
                time.sleep(0.02)
            yield socket
            server.communicate(timeout=30)


def clock_of(folder: Path) -> Path:
    """A library under which a process has the wall clock of its host (tests/hosts/skew.c), as the warm server has it for those that
    it forks. Made where there can be hosts."""
    made = folder / "skew.so"
    if not made.exists() and os.geteuid() == 0 and shutil.which("cc") is not None:
        source = HERE.parent / "hosts" / "skew.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(made), str(source), "-ldl"], check=True)
    return made


def warmed(socket: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an interpreter whose fork servers and engines, and itself if it is one, are to be warm."""
    found = [str(HERE), environment.get("PYTHONPATH") or str(HERE.parents[1])]
    return {**environment, WARM: str(socket), "PYTHONPATH": os.pathsep.join(found)}


class Warmed:
    """`python -m words`, with its output in files. It ends with this process."""

    def __init__(
        self,
        socket: Path,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: IO[Any],
        stderr: IO[Any],
        like: int | None = None,
    ) -> None:
        """`like`: a process on whose host it is to be (tests/hosts/net.py); None: on this one."""
        self.args, self.returncode = list(words), None
        told = warmed(socket, env)
        with open(os.devnull) as null:
            held = ask(
                str(socket),
                self.args,
                env=told,
                paths=[str(cwd), *told["PYTHONPATH"].split(os.pathsep)],
                cwd=str(cwd),
                handles=[null.fileno(), stdout.fileno(), stderr.fileno()],
                like=like or "self",
            )
        assert held is not None, "the warm server is gone"
        self._held = held
        self.pid = int(held.recv(64) or 0)
        if not self.pid:
            held.close()
            raise AssertionError("the warm server could not load what it was to run; see its stderr")

    returncode: int | None

    def poll(self) -> int | None:
        """Its exit status, negative: of a signal; None while it lives."""
        if self.returncode is None and select.select([self._held], [], [], 0)[0]:
            self.returncode = int(self._held.recv(64))
            self._held.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same, when it has ended."""
        if self.returncode is None and not select.select([self._held], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def open_warm(
    socket: Path | None, words: Sequence[str], printed: Path, env: Mapping[str, str] = os.environ
) -> Iterator[Warmed | subprocess.Popen[bytes]]:
    """`python -m words` meanwhile, warm where that can be. What it prints is in the file, and shown when a test fails."""
    with printed.open("wb") as out:
        process: Warmed | subprocess.Popen[bytes]
        if socket is not None:
            process = Warmed(socket, words, env=env, cwd=printed.parent, stdout=out, stderr=out)
        else:
            process = subprocess.Popen([sys.executable, "-m", *words], env=env, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)
            print(printed.read_text(errors="replace"))
