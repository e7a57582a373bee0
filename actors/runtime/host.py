"""What tells hosts apart, and which address of this one others can use."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from actors.runtime.child import is_alive
from bus.messages.control import Vitals

SHARED = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
SILENT_BEATS = 5  # heartbeats without a word of a process on another host; then it is taken for dead


@cache
def shared_memory_name() -> str:
    """Equal for processes that see the same files in shared memory, and for no others: containers of one machine, or of one
    name, may see different ones."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}-{os.stat(SHARED).st_dev:x}"
    except OSError:
        return socket.gethostname()


@cache
def processes_name() -> str:
    """Equal for processes that see each other by their ids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return socket.gethostname()


def lives(vitals: Vitals) -> bool | None:
    """Whether the process that said this lives; None where it cannot be seen from here."""
    return is_alive(vitals.pid) if vitals.processes == processes_name() else None


def is_stopped(vitals: Vitals) -> bool:
    """Whether the process that said this was stopped, by SIGSTOP or a debugger; False where it cannot be seen from here."""
    try:
        return vitals.processes == processes_name() and psutil.Process(vitals.pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


class Folder:
    """A folder as it is now, told from one that has its name later: it is held open, so that its number is not given again."""

    def __init__(self, path: str) -> None:
        self._path, self._handle = path, -1
        with suppress(OSError):  # it is on another host
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, self._handle)

    def is_gone(self) -> bool:
        """Whether it was removed, or another stands in its place; False where it was not here."""
        try:
            return self._handle >= 0 and not os.path.samestat(os.fstat(self._handle), os.stat(self._path))
        except FileNotFoundError:
            return True
        except OSError:
            return False


def room_left(folder: str) -> dict[str, float]:
    """Free bytes on the disk of `folder` and in this host's memory, and that memory's free share; of a container, its own."""
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    try:
        limit = int((CGROUP / "memory.max").read_text())
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()).get("inactive_file", "0")
        free, total = min(free, limit - int((CGROUP / "memory.current").read_text()) + int(cached)), min(total, limit)
    except (OSError, ValueError):
        pass  # no container, or one without a limit
    found = {"free/memory": float(free), "free/memory_share": free / total}
    try:
        found["free/disk"] = float(shutil.disk_usage(folder).free)
    except OSError:
        pass  # it is somebody else's folder
    return found


def place(given: str, own: str) -> tuple[str, str, int]:
    """(host to say, address to bind, port) from the setting `HOST[:PORT]`, or from our own address on the bus.

    A host that reaches the bus by loopback has no address there that others could use. It is on the bus's host then, and says
    nothing: whoever reads that takes the address by which it reaches the bus itself.
    """
    if given:
        host, colon, port = given.rpartition(":")
        if not colon or not port.isdecimal() or (":" in host and not host.startswith("[")):
            host, port = given, "0"
        return host.strip("[]"), "", int(port)
    if not own:
        return "", "127.0.0.1", 0
    return ("", "", 0) if ipaddress.ip_address(own).is_loopback else (own, own, 0)
