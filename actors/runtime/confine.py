"""Limits that a process takes upon itself for good before it runs code nobody vouches for: one profile, whoever runs the code.

    confine(Profile(reads=("/data/questions",)))    # all at once, before other threads exist
    confine_files(with_imports(profile, path))      # or in two halves: what the user wrote is imported in between,
    hook = load_hook(path)                          # may start threads, and reads what Python imports
    confine_calls(profile)

Always true after both: no file is opened but the interpreter's, system libraries and `reads`, none for writing; no socket, no
process, no signal to another; in every thread. What the kernel lacks for that is refused (Unconfined), unless `weak` says to go on;
`lacking()` tells it beforehand. Standard library only: the sandbox's own process imports it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from actors.runtime.syscalls import MACHINES, call_filter

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER, _ALL_THREADS = 1, 1
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_ASK_VERSION = 1
_FILE, _FOLDER = 4, 1 | 4 | 8  # Landlock's rights to read files; and folders, and to execute
_NAMES = 8  # to list a folder
_TCP, _ABSTRACT_SOCKETS, _SIGNALS = 3, 1, 2
_RIGHTS = (0, 13, 14, 15, 15, 16)  # how many rights to files the versions of Landlock know, each from the first on

SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/dev/null")
LOG_BYTES = 16 << 20  # that a confined process may add to the file that takes its standard error
NO_LANDLOCK = "limits on which files are opened (Landlock, Linux 5.13 and newer)"

OURS = ("MILES_ASYNC_BUS_PASSWORD", "MILES_ASYNC_ENGINE_TOKEN", "MILES_ASYNC_JUDGE_KEY")
"""Variables that open the run's own doors, and files that hold them."""
# Variables that say where things are and how to compute, and no secret. A value that holds an "@" (a password in an address) is
# kept back all the same.
KEPT = frozenset({
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "XDG_CACHE_HOME", "NLTK_DATA"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "MILES_ASYNC_HOOK_NICE", "MILES_ASYNC_HOOK_ARGS"),
})  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


class Profile(NamedTuple):
    """Limits of one process. `reads`: files and folders beside the interpreter and the system's libraries. `weak`: go on without
    what the kernel lacks."""

    reads: tuple[str, ...] = ()
    memory_bytes: int = 2 << 30
    weak: bool = False


def encoded(profile: Profile) -> str:
    """For a command line."""
    return json.dumps(profile)


def decoded(text: str) -> Profile:
    reads, memory_bytes, weak = json.loads(text)
    return Profile(tuple(reads), int(memory_bytes), bool(weak))


class Unconfined(OSError):
    """The kernel cannot hold a process to its limits; one line that says what it lacks."""


def lacking() -> tuple[str, ...]:
    """What this kernel lacks for the limits; empty: nothing."""
    found = []
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        return (f"a list of system calls for {sys.platform} on {machine}",)
    if _libc.syscall(_SECCOMP[machine], _SET_FILTER, _ALL_THREADS, None) >= 0 or ctypes.get_errno() != errno.EFAULT:
        found.append("a filter of system calls for all threads (seccomp)")
    if landlock_version() < 1:
        found.append(NO_LANDLOCK)
    return tuple(found)


def refusal(what: str, missing: Iterable[str]) -> str:
    """One line for the operator."""
    return (
        f"{what} cannot be confined here: this kernel lacks {' and '.join(missing)}. Use a kernel (or container settings) that has "
        "it, or set --allow-weak-sandbox to run such code without."
    )


def landlock_version() -> int:
    """0: the kernel has none, or it is switched off."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION)))


def confine(profile: Profile) -> None:
    """All limits, at once and for good. Raises Unconfined."""
    confine_files(profile)
    confine_calls(profile)


def confine_files(profile: Profile) -> None:
    """First half: no capability, none to be had again; what may be opened; no signal and no abstract socket beyond this process and
    what it starts, where the kernel knows that (6.12). Called before other threads exist, since it is this thread's and of those
    that it begins. Raises Unconfined."""
    _refuse_unless_weak(profile)
    if sys.platform != "linux":
        return
    if os.path.isdir("/proc/self/task") and len(os.listdir("/proc/self/task")) > 1:
        raise Unconfined(errno.EBUSY, "other threads run already, and would keep their rights")
    give_up_rights()
    if landlock_version():
        limit_files([*system_paths(), *profile.reads])


def confine_calls(profile: Profile) -> None:
    """Second half: memory, and the list of system calls, for all threads. Raises Unconfined."""
    missing = _refuse_unless_weak(profile)
    limit_resources(profile.memory_bytes, file_bytes=_log_size() + LOG_BYTES)
    if not any(one != NO_LANDLOCK for one in missing):
        limit_calls()


def _refuse_unless_weak(profile: Profile) -> tuple[str, ...]:
    missing = lacking()
    if missing and not profile.weak:
        raise Unconfined(errno.ENOTSUP, refusal("code", missing))
    return missing


def with_imports(profile: Profile, path: str = "") -> Profile:
    """The profile, and what `import` reads; `path`: of a hook, which may be `file.py:function`."""
    file = [os.path.abspath(path.rpartition(":")[0])] if ".py:" in path else []
    return profile._replace(reads=(*profile.reads, *importable(), *file))


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for code of the user's that runs with the user's rights: all but what opens the run's own doors."""
    return {name: value for name, value in environment.items() if not name.startswith(OURS)}


def kept(environment: Mapping[str, str], names: Iterable[str] = ()) -> dict[str, str]:
    """Variables for a process that runs such code: of a list of harmless ones, and `names`. No password in an address."""
    chosen = set(names)
    return {
        name: value
        for name, value in environment.items()
        if (name in chosen and not name.startswith(OURS))
        or ((name in KEPT or name.startswith(("LC_", "PYTHON")) or name.endswith("_NUM_THREADS")) and "@" not in value)
    }


# -- parts --------------------------------------------------------------------------------------------------------------


def give_up_rights() -> None:
    """No capability, none to be had again: what root started is no root any more."""
    _ask("no_new_privs", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _ask("capset", _libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)))


def system_paths() -> list[str]:
    """The interpreter, with what is installed into it, and the system's libraries."""
    return sorted({sys.prefix, sys.base_prefix, *SYSTEM})


def importable() -> Iterator[str]:
    """What `import` reads outside of the interpreter's own folders: packages and modules on the path, in the current folder, and
    those installed to be edited. Not what else lies beside them: the current folder may be a home."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):
            yield from map(str, getattr(module, "MAPPING", {}).values())
        elif name in ("actors", "bus", "miles_async"):
            yield from module.__path__
    inside = tuple(os.path.join(path, "") for path in (sys.prefix, sys.base_prefix))
    for entry in {os.path.abspath(path) for path in (*sys.path, os.getcwd())}:
        if entry.startswith(inside) or not os.path.isdir(entry):
            continue
        yield entry + os.sep  # its names
        for one in os.scandir(entry):
            if one.name.startswith("."):
                continue
            if one.name.endswith((".py", ".so")) or (one.is_dir() and _holds_modules(one.path)):
                yield one.path


def _holds_modules(folder: str) -> bool:
    try:
        return any(name.endswith((".py", ".so")) for name in os.listdir(folder))
    except OSError:
        return False


def limit_files(paths: Iterable[str]) -> None:
    """Landlock: these files, and all in these folders, are read; of one that ends with a slash the names only. Nothing is written,
    no TCP, no signal, no abstract socket out of here where the kernel can tell."""
    version = landlock_version()
    rights = (1 << _RIGHTS[min(version, 5)]) - 1
    attributes = struct.pack("=QQQ", rights, 0, _ABSTRACT_SOCKETS | _SIGNALS)[: 24 if version >= 6 else 8]
    ruleset = _ask("landlock", _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0))
    for path in paths:
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not there: nothing to be read
        right = (_NAMES if path.endswith(os.sep) else _FOLDER) if stat.S_ISDIR(os.fstat(handle).st_mode) else _FILE
        _ask(f"landlock {path}", _libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", right, handle), 0))
        os.close(handle)
    _ask("landlock", _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def limit_alone() -> None:
    """Landlock: no signal and no abstract socket even to siblings, no TCP; where the kernel can tell (6.12)."""
    if landlock_version() >= 6:
        attributes = struct.pack("=QQQ", 0, _TCP, _ABSTRACT_SOCKETS | _SIGNALS)
        ruleset = _ask("landlock", _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(24), 0))
        _ask("landlock", _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
        os.close(ruleset)


def limit_resources(memory_bytes: int, *, file_bytes: int = 0, files: int = 0, cpu_s: int = 0) -> None:
    """Bytes of address space; most bytes of a file that it writes to; open files and seconds of processor, 0 = as they are."""
    limits = {
        resource.RLIMIT_AS: (memory_bytes, memory_bytes), resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (file_bytes, file_bytes), resource.RLIMIT_MEMLOCK: (0, 0), resource.RLIMIT_MSGQUEUE: (0, 0),
    }  # fmt: skip
    limits |= {resource.RLIMIT_NOFILE: (files, files)} if files else {}
    limits |= {resource.RLIMIT_CPU: (cpu_s, cpu_s + 1)} if cpu_s else {}
    for limit, value in limits.items():
        most = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, value if most == resource.RLIM_INFINITY else (min(value[0], most), min(value[1], most)))


def limit_calls() -> None:
    """seccomp, for all threads."""
    machine = platform.machine()
    program = call_filter(machine, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    left_out = _ask("seccomp", _libc.syscall(_SECCOMP[machine], _SET_FILTER, _ALL_THREADS, header))
    if left_out:
        raise Unconfined(errno.EBUSY, f"thread {left_out} has limits of its own and cannot take ours")


def _log_size() -> int:
    """Of the file that takes its standard error; 0 where that is none."""
    try:
        found = os.fstat(2)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _ask(what: str, result: int) -> int:
    if result < 0:
        raise Unconfined(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
