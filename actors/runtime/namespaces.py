"""A second wall for the sandbox, where the kernel lets a user have it: namespaces of its own for processes, network and files.

Inside, no process but the sandbox's own can be named, there is no network, and nothing but `paths` is in the tree, all of it
read-only. Needs no right beforehand (user namespaces); where they are switched off, as in many containers, the first wall
(`confine.py`) stands alone. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping

_USER, _FILES, _PROCESSES, _NETWORK, _IPC, _NAMES, _CGROUPS = (
    0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000,
)  # fmt: skip
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV = 4096, 16384, 1 << 18, 2, 4
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY = 442, 0x8000, 1

_libc = ctypes.CDLL(None, use_errno=True)


def enter(paths: Iterable[str]) -> None:
    """This process's next child is the first of a process namespace; this one keeps its old one. OSError where the kernel does not
    let us; the process is to be given up then, since part of it may have happened."""
    user, group = os.getuid(), os.getgid()
    shown = {target: os.path.realpath(path) for path in paths for target in (path, os.path.realpath(path)) if os.path.exists(path)}
    _ask(_libc.unshare(_USER | _FILES | _PROCESSES | _NETWORK | _IPC | _NAMES | _CGROUPS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _only(shown)


def _only(shown: Mapping[str, str]) -> None:
    """A root folder that holds these paths and no other. `shown`: where -> what of the old tree, without links."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("none", "/proc", "tmpfs", _NOSUID | _NODEV)  # a folder that every host has
    os.mkdir("/proc/old", 0o700)
    _ask(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b"/proc", b"/proc/old"))
    os.chdir("/")
    for target, source in sorted(shown.items()):  # a folder before what is in it
        if not os.path.lexists(target):
            _show(f"/old{source}", target)
    _ask(_libc.umount2(b"/old", _DETACH))
    os.rmdir("/old")
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    _ask(_libc.syscall(_MOUNT_SETATTR, -100, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(ctypes.sizeof(attributes))))


def _show(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source, target, None, _BIND | _RECURSIVE)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    what, how = (None if text is None else os.fsencode(text) for text in (source, kind))
    _ask(_libc.mount(what, os.fsencode(target), how, ctypes.c_ulong(flags), None))


def _ask(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
