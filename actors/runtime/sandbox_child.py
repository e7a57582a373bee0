"""The sandbox's server: starts one process for each piece of code, ends it at its limits, and answers how it ended.

Started by `sandbox.py`, isolated from our packages and our environment. Orders come on stdin, answers go to stdout, JSON behind a
4-byte little-endian length. It runs no code itself and forks none: the zygote does (`zygote.py`), which never sees an order. Always
true: nothing that a piece of code does reaches this process; it ends with its parent, and all that runs in it with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

from actors.runtime import confine, zygote

Answer = dict[str, Any]
CAUSES = {0: "ok", zygote.RAISED: "raised", zygote.OUT_OF_MEMORY: "memory", zygote.UNASKED: "unasked", -signal.SIGXCPU: "cpu"}


class Gone(Exception):
    """The zygote has ended: this server has too."""


class SandboxProcess:
    """One process of an order. `status`: None while it runs."""

    def __init__(self) -> None:
        self.handle = -1
        self.status: int | None = None


class Zygote:
    """Its line: starts processes and tells which have ended."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self._of: dict[str, SandboxProcess] = {}
        self._n = 0

    def start(self, order: dict[str, Any], *handles: int) -> SandboxProcess:
        """Waits until it runs. `handles`: of its outputs, and of its channel."""
        self._n += 1
        number = str(self._n)
        process = self._of[number] = SandboxProcess()
        paper = os.memfd_create("order")
        with os.fdopen(os.dup(paper), "wb") as file:
            file.write(json.dumps(order).encode())
        os.lseek(paper, 0, os.SEEK_SET)
        try:
            socket.send_fds(self.line, [number.encode()], [paper, *handles])
        except OSError as error:
            raise Gone from error
        finally:
            os.close(paper)
        while process.handle < 0:
            self.hear()
        return process

    def hear(self) -> None:
        """One word from it: some process has started, or ended."""
        said, handles, _, _ = socket.recv_fds(self.line, 4096, 1)
        if not said:
            raise Gone
        word = json.loads(said)
        if not isinstance(word, list):
            raise Gone
        if word[0] == "started":
            self._of[word[1]].handle = handles[0]
        else:
            self._of.pop(word[1]).status = word[2]


class SandboxJob:
    """One order at work: a process, or a program and its examiner, whose end counts. `over`: why we ended it; empty: we did not."""

    def __init__(self, order: dict[str, Any], line: Zygote) -> None:
        self.order = order
        self.began = time.monotonic()
        self.over = ""
        self.texts = [bytearray(), bytearray()]  # of stdout and stderr
        pipes = os.pipe(), os.pipe()
        inside = [end for _, end in pipes]
        limits = {name: order[name] for name in ("deadline_s", "memory_bytes")}
        run = {"code": order["code"], "stdin": order["stdin"], "echo": order["echo"], **limits}
        if order["tests"]:
            ends = socket.socketpair()
            program = line.start({"mode": "answer", **run}, *inside, ends[0].fileno())
            examiner = line.start({"mode": "examine", "code": order["tests"], **limits}, *inside, ends[1].fileno())
            self.processes = [examiner, program]
            for end in ends:
                end.close()
        else:
            self.processes = [line.start({"mode": "run", **run}, *inside)]
        for handle in inside:
            os.close(handle)
        self.ends = [end for end, _ in pipes]
        for handle in self.ends:
            os.set_blocking(handle, False)

    @property
    def ends_at(self) -> float:
        return self.began + float(self.order["deadline_s"])

    @property
    def over_now(self) -> bool:
        """Whether all its processes have ended. Those beside the one that counts end with it."""
        if self.processes[0].status is not None:
            for other in self.processes[1:]:
                _kill(other)
        return all(process.status is not None for process in self.processes)

    def kill(self, over: str) -> None:
        if not self.over:
            self.over = over
            for process in self.processes:
                _kill(process)

    def read(self, which: int) -> bool:
        """What has come on one of its outputs; False at its end."""
        try:
            data = os.read(self.ends[which], 65536)
        except BlockingIOError:
            return True
        room = self.order["output_bytes"] - sum(map(len, self.texts))
        self.texts[which] += data[: max(0, room)]
        if len(data) > room:
            self.kill("output")
        return bool(data)

    def answer(self) -> Answer:
        """How it ended; only when it has."""
        for which in (0, 1):
            while self._more(which):
                pass
            os.close(self.ends[which])
        for process in self.processes:
            os.close(process.handle)
        status = self.processes[0].status
        assert status is not None
        code = os.waitstatus_to_exitcode(status)
        cause = self.over or CAUSES.get(code, "")
        if cause == "unasked" and not self.order["tests"]:
            cause = "exit"  # a program's own `sys.exit(103)`
        if not cause:
            cause = "exit" if code > 0 else "cpu" if code == -signal.SIGKILL else "crash"
        out, err = (bytes(text).decode(errors="replace") for text in self.texts)
        return {
            "number": self.order["number"], "cause": cause, "code": code, "stdout": out, "stderr": err,
            "seconds": time.monotonic() - self.began,
        }  # fmt: skip

    def _more(self, which: int) -> bool:
        before = len(self.texts[which])
        return self.read(which) and len(self.texts[which]) > before


def _kill(process: SandboxProcess) -> None:
    if process.status is None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.handle, signal.SIGKILL)


def say(answer: Answer) -> None:
    body = json.dumps(answer).encode()
    data = memoryview(len(body).to_bytes(4, "little") + body)
    while data:
        data = data[os.write(1, data) :]


def serve(line: Zygote) -> None:
    """Until stdin ends, or the zygote; then all that runs ends with this process."""
    chosen = selectors.DefaultSelector()
    chosen.register(0, selectors.EVENT_READ)
    chosen.register(line.line, selectors.EVENT_READ)
    jobs: list[SandboxJob] = []
    pending = bytearray()
    while True:
        nearest = min((job.ends_at for job in jobs if not job.over), default=None)
        wait_s = None if nearest is None else max(0.0, nearest - time.monotonic())
        for key, _ in chosen.select(wait_s):
            job = key.data
            if key.fd == 0:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                pending += data
                while len(pending) >= 4 and len(pending) >= 4 + (size := int.from_bytes(pending[:4], "little")):
                    job = SandboxJob(json.loads(bytes(pending[4 : 4 + size])), line)
                    del pending[: 4 + size]
                    jobs.append(job)
                    for handle in job.ends:
                        chosen.register(handle, selectors.EVENT_READ, job)
            elif job is None:
                line.hear()
            elif not job.read(job.ends.index(key.fd)):
                chosen.unregister(key.fd)
        now = time.monotonic()
        for job in jobs[:]:
            if job.ends_at <= now:
                job.kill("deadline")
            if job.over_now:
                jobs.remove(job)
                for handle in job.ends:
                    if handle in chosen.get_map():
                        chosen.unregister(handle)
                say(job.answer())


def main() -> None:
    """Say whether we can serve, then serve."""
    zygote.die_with_parent()
    told = json.loads(sys.argv[1])
    missing = confine.lacking()
    calls = not any(one != confine.NO_LANDLOCK for one in missing)
    try:
        line = zygote.start(tuple(told["reads"]), calls=calls, walled=True)
        walled = line is not None
        if missing and not told["weak"] and not (walled and calls):  # the tree of the second wall holds no other file
            say({"refused": confine.refusal("code that a model wrote", missing)})
            return
        line = line or zygote.start(tuple(told["reads"]), calls=calls, walled=False)
        assert line is not None
        confine.give_up_rights()
    except OSError as error:
        say({"refused": f"code that a model wrote cannot be confined here: {error}"})
        return
    say({"confined": walled or confine.NO_LANDLOCK not in missing, "walled": walled, "missing": missing})
    with contextlib.suppress(Gone):
        serve(Zygote(line))
