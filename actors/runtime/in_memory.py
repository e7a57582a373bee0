"""Folders in shared memory, where versions of the weights lie: who uses one holds a lock in it, which the kernel takes back from
what was killed. So what nobody uses is known, also across containers that share the memory and do not see each other's processes.

Always true: a folder is taken away by who holds its lock alone, and who takes the lock afterwards has it in a folder that is there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from actors.runtime.host import SHARED
from bus.private import is_private, private_directory

USERS = ".users"  # file of a folder: who uses that holds its lock
NAME = "miles_async-{}-{}"  # user, run; in SHARED
LEFT_S = 600.0  # what nobody has touched for so long, and nobody uses, is of processes that were killed


def named(run: str) -> Path:
    """The folder of a run, made or touched: a start that has not yet taken the lock is not taken for a leftover."""
    folder = private_directory(SHARED / NAME.format(os.getuid(), run))
    with suppress(OSError):
        os.utime(folder)
    return folder


def use(folder: Path) -> int:
    """Whoever uses it holds this lock, until the handle is closed or the process ends."""
    while True:
        private_directory(folder)
        try:
            handle = os.open(folder / USERS, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # taken away this instant
            continue
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(folder / USERS)):
                return handle
        os.close(handle)  # it was taken away while we waited


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """First what killed runs left in memory goes. Of a folder there the last user takes it away, unless more than the lock is in
    it; others need no lock."""
    sweep_left([folder])
    if folder.parent != SHARED:
        yield
        return
    handle = use(folder)
    try:
        yield
    finally:
        os.close(handle)
        let_go(folder)


def let_go(folder: Path) -> None:
    """Take it away where nobody uses it and nothing is in it."""
    with suppress(OSError):
        if set(os.listdir(folder)) <= {USERS}:
            delete_unused(folder)


def delete_unused(folder: Path) -> None:
    """With all that is in it, unless a process uses it. One without a lock was made only to be named: it goes if
    it is empty."""
    with suppress(OSError):
        try:
            file = (folder / USERS).open("r+")
        except FileNotFoundError:
            folder.rmdir()
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def sweep_left(ours: Collection[Path]) -> None:
    """Take away what killed runs of this user left in memory, if none came after them."""
    for home in set(SHARED.glob(NAME.format(os.getuid(), "*"))) - set(ours):
        with suppress(OSError):  # its last user takes it away
            if is_private(home) and time.time() - home.stat().st_mtime > LEFT_S:
                delete_unused(home)
