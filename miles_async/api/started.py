"""Start a run from Python: the same settings, checks and launcher as `miles-async train`, in a process of its own.

Reads  settings    Writes  logs/launcher.log in the run's folder, through the launcher    Owns  the launcher's process
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actors.runtime.child import is_alive
from bus.errors import BusUnreachable, MilesAsyncError
from bus.knobs.live import read_history
from bus.private import private_directory
from miles_async.api.opened import Run
from miles_async.api.source import as_file
from miles_async.settings.dump import dump_toml
from miles_async.settings.errors import Refusals, SettingsError
from miles_async.settings.load import config_path, load
from miles_async.settings.runs import RUN_FILE, RunRef, read_run_file

SAYS = "miles-async train: "  # the launcher, before what it refuses
LOOK_S = 0.1
TO_COME = "reward"  # stands for the file of a function until the run has a folder


class RunEnded(MilesAsyncError):
    """A run ended otherwise than done or stopped. `status`: of its launcher."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    reward: str | Callable[..., Any] | None = None,
    wait: bool = True,
    start_s: float = 900.0,
    **settings: Any,
) -> StartedRun:
    """Start (or resume) a run, and wait for its end; with `wait=False` until it can be asked, at most `start_s` seconds.

    `config`: a settings file, the name of one that ships ("quickstart"), or a table of settings. `settings` count over it, each
    under its name in `miles-async train --help`: `run("quickstart", num_rollout=20)`. SettingsError tells all that is wrong, before
    anything runs. `reward`: a function that scores a sample (docs/hooks.md has the signatures, those of TRL and verl among them),
    given to other processes as its source with the imports, constants and functions beside it that it uses; or `FILE.py:NAME`.
    RunEnded when the run fails. What the launcher prints is printed here while somebody waits, and kept in
    logs/launcher.log; the end of this Python does not end the run. An interrupt while it waits drains the run.
    """
    given: dict[str, Any] = {"console": "plain"}
    if isinstance(config, Mapping):
        given |= config
        file = None
    else:
        file = config_path(str(config)) if config is not None else None
    if isinstance(reward, str):
        settings["custom_rm_path"] = reward
    elif reward is not None:
        settings["custom_rm_path"] = f"{TO_COME}.py:{getattr(reward, '__name__', 'reward')}"
    loaded = load(file, values=given | settings)
    if reward is not None and not isinstance(reward, str):
        named = {"custom_rm_path": as_file(reward, loaded.settings.run_dir.absolute()), "name": loaded.settings.launch.name}
        loaded = load(file, values=given | settings | named)
    started = StartedRun(loaded.settings.run_dir, dump_toml(loaded.settings))
    started.until_up(start_s)
    if wait:
        started.wait()
    return started


class StartedRun(Run):
    """A run whose launcher is a child of this process."""

    def __init__(self, run_dir: Path, settings: str) -> None:
        run_dir = run_dir.absolute()  # this program may go to another folder
        self._file = run_dir / RUN_FILE
        self._before = _changed(self._file)
        self.log = run_dir / "logs" / "launcher.log"
        try:
            private_directory(run_dir)
            self.log.parent.mkdir(exist_ok=True)
            with self.log.open("ab") as log:
                self._told = log.tell()
                self._process = _launch(settings, log.fileno())
        except OSError as error:
            why = f"cannot write to {self.log.parent.absolute()}: {(error.strerror or str(error)).lower()}"
            raise SettingsError(why, field="runs_dir", remedy="Choose another runs_dir.") from None
        self._first, self._owner = self._told, os.getpid()
        threading.Thread(target=self._process.wait, name="miles-async launcher", daemon=True).start()  # no zombie is left
        super().__init__(RunRef(run_dir.name, "", run_dir))

    @property
    def running(self) -> bool:
        """Whether the launcher goes on."""
        if os.getpid() != self._owner:  # forked since: it is no child of this process
            return is_alive(self._process.pid)
        return self._process.poll() is None

    def wait(self, timeout_s: float | None = None) -> int:
        """Print what the launcher says until it has ended: 0, done or stopped. RunEnded when it failed, TimeoutError when it
        goes on after `timeout_s` seconds. A process that was forked since hears of the end alone, not of a failure."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._drained():
            while self.running:
                self._tell()
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"run {self.name} goes on after {timeout_s:g} s")
                time.sleep(LOOK_S)
        self._tell()
        self._judge()
        return 0

    def until_up(self, start_s: float) -> None:
        """Wait until it can be asked, or has ended, which is judged; at most `start_s` seconds."""
        until = time.monotonic() + start_s
        with self._drained():
            while self.running and not self._is_up():
                if time.monotonic() > until:
                    self._process.terminate()
                    raise RunEnded(f"run {self.name} did not start within {start_s:g} s; it said: {self._last()}", 1)
                time.sleep(LOOK_S)
        if not self.running:
            self._judge()
        self._ref = read_run_file(self._file)

    def _is_up(self) -> bool:
        """Whether its bus holds its settings: what is asked of it has an answer."""
        if _changed(self._file) == self._before:
            return False
        try:
            return bool(self._ask(read_history, look=False))
        except BusUnreachable:
            return False

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """An interrupt ends the run as Ctrl-C ends the command."""
        try:
            yield
        except KeyboardInterrupt:
            if os.getpid() == self._owner:
                self._process.send_signal(signal.SIGINT)
                self._process.wait()
                self._tell()
            raise

    def _judge(self) -> None:
        """Raise what the launcher ended with."""
        status = self._process.wait() if os.getpid() == self._owner else 0
        if status == 0:
            return
        said = self._said().splitlines()
        refused = Refusals()
        refused.found += [SettingsError(line.removeprefix(SAYS)) for line in said if line.startswith(SAYS)]
        refused.raise_all()
        raise RunEnded(f"run {self.name} ended with status {status}: {self._last()}; see {self.log}", status)

    def _said(self) -> str:
        """All that the launcher has printed since it was started."""
        with self.log.open("rb") as log:
            log.seek(self._first)
            return log.read().decode("utf-8", "replace")

    def _last(self) -> str:
        lines = self._said().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "nothing").removeprefix("miles-async: ")

    def _tell(self) -> None:
        with self.log.open("rb") as log:
            log.seek(self._told)
            text = log.read()
            self._told = log.tell()
        print(text.decode("utf-8", "replace"), end="", flush=True)


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _launch(settings: str, log: int) -> subprocess.Popen[bytes]:
    """A launcher in a session of its own: what is typed at this terminal is not for it."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    env = {**os.environ, "PYTHONPATH": known if root in known.split(os.pathsep) else f"{root}{os.pathsep}{known}"}
    words = [sys.executable, "-m", "miles_async", "train", "/dev/stdin"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=env)
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(settings.encode())
    except BrokenPipeError:
        pass  # it has ended, and its status says why
    return process
