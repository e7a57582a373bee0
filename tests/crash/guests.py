"""Workers that join a run by hand, and leave it or die: `miles-async worker` beside the run."""

from __future__ import annotations

import signal
import subprocess
from random import Random

from tests.crash.house import Run, until
from tests.warm.launched import Warmed

MOST = 2
PATHS = ("custom_generate_function_path", "custom_agent_function_path")
AWAY = (
    *("does not say what it is", "did not answer", "has no bus yet", "is not running", "loading the dataset"),
    *("has finished", "was stopped"),
)
OTHER = "makes its samples by"  # the run was started again with another program
LEAVE_S = 120.0


class Guests:
    """Those of one run. What they print is in `<name>.log` in the run's home."""

    def __init__(self, run: Run, chance: Random) -> None:
        self._run, self._chance = run, chance
        self._here: dict[str, subprocess.Popen[bytes] | Warmed] = {}
        self._n = 0

    def join(self) -> None:
        """One more, at most MOST."""
        if len(self._here) >= MOST:
            return
        self._n += 1
        words = ["worker", "--name", f"guest-{self._n}", "--run", self._run.dir.name]
        for name in PATHS:
            if path := self._run.given("rollout", name):
                words += [f"--{name.replace('_', '-')}", path]
        self._here[f"guest-{self._n}"] = self._run.beside(*words, log=f"guest-{self._n}.log")

    def leave(self, number: signal.Signals) -> None:
        """One of them drains or dies."""
        if not self._here:
            return
        name = self._chance.choice(sorted(self._here))
        guest = self._here.pop(name)
        guest.send_signal(number)
        self._met(name, guest, asked=number)

    def tend(self) -> None:
        """Look at those that ended; a run without workers of its own has one of these at all times."""
        for name in [name for name, guest in self._here.items() if guest.poll() is not None]:
            self._met(name, self._here.pop(name))
        if not self._here and not self._run.setting("sglang", "num_generation_workers") and self._run.listens():
            self.join()

    def end(self) -> None:
        """The run has finished, and so do they, but for those that lost its bus before they heard."""
        until(f"{[*self._here]} to end", lambda: all(map(self._leaves, self._here)), seconds=LEAVE_S)
        for name, guest in self._here.items():
            asked = None if guest.poll() is not None else signal.SIGTERM
            guest.send_signal(signal.SIGTERM)
            self._met(name, guest, asked=asked)
        self._here.clear()

    def kill(self) -> None:
        """None is left."""
        for guest in self._here.values():
            guest.kill()
            guest.wait(30)
        self._here.clear()

    def said(self, name: str) -> str:
        return (self._run.home / f"{name}.log").read_text(errors="replace")

    def _leaves(self, name: str) -> bool:
        """It has ended, or tries to join a run that has, and has an engine and a bus deadline of minutes."""
        said = self.said(name)
        waits = "joined:" not in said or "the bus is away" in said.strip().rpartition("\n")[2]
        return self._here[name].poll() is not None or waits

    def _met(self, name: str, guest: subprocess.Popen[bytes] | Warmed, asked: signal.Signals | None = None) -> None:
        code, said = guest.wait(LEAVE_S), self.said(name)
        assert "Traceback" not in said, f"{name} raised: {said[-3000:]}"
        killed = code == -signal.SIGKILL  # by us, also as one of all processes of the run
        early = asked == signal.SIGTERM and code in (-signal.SIGTERM, 1, 130)  # before it had joined
        without = "joined:" not in said or "last vitals not sent" in said  # a bus, which was killed at the end
        late = "did not drain" in said and without
        right = code == 0 or killed or early or late or any(word in said for word in (*AWAY, OTHER))
        assert right, f"{name} ended with exit status {code}, asked by {asked}: {said[-3000:]}"
