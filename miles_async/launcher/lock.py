"""One launcher per run directory: a lock that the kernel drops with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_async.settings.errors import refusal

LOCK = "launcher.lock"


@contextmanager
def only_launcher(run_dir: Path, name: str) -> Iterator[None]:
    """Hold `<run_dir>/launcher.lock` while the body runs; SettingsError when a living launcher holds it."""
    handle = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 20).decode("ascii", "replace").strip() or "unknown"
            why = f"run {name} has a launcher on this host already, process {holder}"
            remedy = "Look at it with miles-async status, end it with miles-async stop, or choose another --name."
            raise refusal("name", name, why, remedy) from None
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


def is_kept(run_dir: Path) -> bool:
    """Whether a living launcher of this host holds this folder, and not one of which it is a copy."""
    try:
        handle = os.open(run_dir / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
