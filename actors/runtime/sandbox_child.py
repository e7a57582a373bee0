"""The sandbox's own process: forks one process for each piece of code, holds it to its limits, and answers how it ended.

Started by `sandbox.py` as a script, isolated from our packages and our environment; standard library only. Orders come on stdin and
answers go to stdout, JSON behind a 4-byte little-endian length. Always true, by a list of the system calls that are allowed
(seccomp): code that runs here opens no socket, starts no process, signals no other, and writes no file; so killing its one process
ends all it did. Where the kernel has Landlock, it reads the interpreter and system libraries only.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import json
import linecache
import math
import os
import platform
import random
import resource
import selectors
import signal
import struct
import sys
import time
import traceback
from importlib import import_module
from typing import Any

# Imported once here, free for every piece of code.
PRELOADED = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io", "itertools", "operator"),
    *("re", "statistics", "string", "typing"),
)
RAISED, OUT_OF_MEMORY = 101, 102  # exit codes of ours
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_FILTER = 1, 38, 22, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_ONLY = 1 | 4 | 8  # Landlock's rights to execute (map libraries), to read files, to read folders
ALL_OF_ABI_1 = (1 << 13) - 1
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # what seccomp does
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # its instructions
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16  # of struct seccomp_data
CLONE_THREAD = 0x10000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)

# System calls by number: (x86_64, aarch64). What Python and numerical libraries need to compute, read and print.
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED = {
    "x86_64": (
        *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 32, 33, 35, 37, 38),
        *(39, 44, 45, 46, 47, 53, 60, 63, 72, 79, 89, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 111, 124, 128, 131, 158, 186),
        *(202, 204, 217, 218, 219, 228, 229, 230, 231, 232, 233, 262, 267, 269, 270, 271, 273, 281, 290, 291, 292, 293, 318, 324),
        *(332, 334, 439),
    ),
    "aarch64": (
        *(17, 19, 20, 21, 22, 23, 24, 25, 29, 48, 57, 59, 61, 62, 63, 64, 65, 66, 67, 72, 73, 78, 79, 80, 93, 94, 96, 98, 99, 101),
        *(103, 113, 114, 115, 123, 124, 128, 132, 134, 135, 137, 139, 153, 156, 160, 163, 165, 169, 172, 173, 174, 175, 176, 177),
        *(178, 179, 199, 206, 207, 211, 212, 214, 215, 216, 222, 226, 227, 232, 233, 278, 283, 291, 293, 439),
    ),
}
OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}  # (number, which argument has the flags)
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
SIGNALS = {"x86_64": (62, 234), "aarch64": (129, 131)}  # kill, tgkill: to itself
PRLIMIT = {"x86_64": 302, "aarch64": 261}

libc = ctypes.CDLL(None, use_errno=True)
Answer = dict[str, Any]


def _ask_kernel(what: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def give_up_rights() -> None:
    """No capability, none to be had again: a sandbox started by root is no root."""
    _ask_kernel("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _ask_kernel("capset", libc.capset(header, nothing))


def confine_reads() -> bool:
    """Only the interpreter and system libraries can be opened from now on; False where the kernel has no Landlock."""
    handled = ctypes.c_uint64(ALL_OF_ABI_1)
    ruleset = libc.syscall(LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    readable = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/dev/null"}
    for path in filter(os.path.exists, readable):
        rights = READ_ONLY if os.path.isdir(path) else 4
        handle = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", rights, handle)
        _ask_kernel(f"landlock {path}", libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(handle)
    _ask_kernel("landlock", libc.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)
    return True


def call_filter(machine: str, pid: int) -> bytes:
    """The program that judges each system call of process `pid`."""

    def when(number: int, argument: int, test: int, value: int, then: int, otherwise: int) -> list[tuple[int, int, int, int]]:
        return [
            (EQUAL, 0, 4, number),
            (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument),
            (test, 0, 1, value),
            (RETURN, 0, 0, then),
            (RETURN, 0, 0, otherwise),
        ]

    refuse = ERRNO | errno.EPERM
    program = [(LOAD, 0, 0, ARCH_AT), (EQUAL, 1, 0, ARCHES[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
    for number in ALLOWED[machine]:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for number, flags in OPENS[machine]:
        program += when(number, flags, ANY_BIT, WRITES, ERRNO | errno.EROFS, ALLOW)
    program += when(CLONE[machine], 0, ANY_BIT, CLONE_THREAD, ALLOW, refuse)
    for number in SIGNALS[machine]:
        program += when(number, 0, EQUAL, pid, ALLOW, refuse)
    program += when(PRLIMIT[machine], 0, EQUAL, 0, ALLOW, refuse)
    program += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]  # then the C library asks by clone
    program.append((RETURN, 0, 0, refuse))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def restrict_calls() -> None:
    program = call_filter(platform.machine(), os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    _ask_kernel("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, header, 0, 0))


# -- in the process of one piece of code --------------------------------------------------------------------------------


def become(order: dict[str, Any], server: int, out: int, err: int) -> None:
    """Run the order's code in this process, and end."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    code = 1
    try:
        if os.getppid() != server:
            return
        stdin = os.memfd_create("stdin")
        with os.fdopen(os.dup(stdin), "wb") as file:
            file.write(order["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        for number, handle in enumerate((stdin, out, err)):
            os.dup2(handle, number)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        for number in range(1, signal.NSIG):
            if signal.getsignal(number) not in (signal.SIG_DFL, None) and number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        cpu_s = math.ceil(order["deadline_s"])
        for limit, value in (
            (resource.RLIMIT_AS, order["memory_bytes"]),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        random.seed(0)
        restrict_calls()
        code = run_code(order["code"], echo=order["echo"])
        sys.stdout.flush()
        sys.stderr.flush()
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - the process ends here; a flush that fails has nobody to tell
        code = RAISED
    finally:
        os._exit(code)


def run_code(source: str, *, echo: bool) -> int:
    """The exit code. What it raises goes to stderr, as the interpreter would print it. `echo`: print the value of a last line
    that is an expression, as an interactive one does."""
    name = "<code>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if echo and tree.body else None
        exec(compile(tree, name, "exec"), space)
        if last is not None:
            exec(compile(ast.Interactive([last]), name, "single"), space)
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except MemoryError:
        space.clear()
        return OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001 - it is the result
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace is not None else None)
        return RAISED


# -- in the server ------------------------------------------------------------------------------------------------------


class Job:
    """One running piece of code. `over`: why the server ended it, empty = it did not."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.began = time.monotonic()
        self.over = ""
        self.texts = [bytearray(), bytearray()]  # of stdout and stderr
        pipes = os.pipe(), os.pipe()
        server = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            become(order, server, pipes[0][1], pipes[1][1])
        self.ends = [pipe[0] for pipe in pipes]
        for end, inside in pipes:
            os.close(inside)
            os.set_blocking(end, False)
        self.handle = os.pidfd_open(self.pid)

    @property
    def ends_at(self) -> float:
        return self.began + float(self.order["deadline_s"])

    def kill(self, over: str) -> None:
        if not self.over:
            self.over = over
            os.kill(self.pid, signal.SIGKILL)

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
        _, status = os.waitpid(self.pid, 0)
        for which in (0, 1):
            while self.ends[which] and self._more(which):
                pass
            os.close(self.ends[which])
        os.close(self.handle)
        code = os.waitstatus_to_exitcode(status)
        cause = self.over or {0: "ok", RAISED: "raised", OUT_OF_MEMORY: "memory", -signal.SIGXCPU: "cpu"}.get(code, "")
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


def say(answer: Answer) -> None:
    body = json.dumps(answer).encode()
    data = memoryview(len(body).to_bytes(4, "little") + body)
    while data:
        data = data[os.write(1, data) :]


def serve() -> None:
    """Until stdin ends; then all that runs ends with this process."""
    chosen = selectors.DefaultSelector()
    chosen.register(0, selectors.EVENT_READ)
    jobs: dict[int, Job] = {}
    pending = bytearray()
    while True:
        nearest = min((job.ends_at for job in jobs.values() if not job.over), default=None)
        wait_s = None if nearest is None else max(0.0, nearest - time.monotonic())
        for key, _ in chosen.select(wait_s):
            job = key.data
            if job is None:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                pending += data
                while len(pending) >= 4 and len(pending) >= 4 + (size := int.from_bytes(pending[:4], "little")):
                    started = Job(json.loads(bytes(pending[4 : 4 + size])))
                    del pending[: 4 + size]
                    jobs[started.pid] = started
                    for handle in (started.handle, *started.ends):
                        chosen.register(handle, selectors.EVENT_READ, started)
            elif key.fd in job.ends:
                if job.pid in jobs and not job.read(job.ends.index(key.fd)):
                    chosen.unregister(key.fd)
            elif job.pid in jobs:
                del jobs[job.pid]
                for handle in (job.handle, *job.ends):
                    if handle in chosen.get_map():
                        chosen.unregister(handle)
                say(job.answer())
        now = time.monotonic()
        for job in jobs.values():
            if job.ends_at <= now:
                job.kill("deadline")


def main() -> None:
    """Say whether we can serve, then serve."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if platform.machine() not in ALLOWED:
            raise OSError(errno.ENOTSUP, f"no list of system calls for {platform.machine()}")
        give_up_rights()
        confined = confine_reads()
        child = os.fork()
        if child == 0:
            try:
                restrict_calls()
            except OSError as error:
                os._exit(error.errno or 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise OSError(code, f"seccomp: {os.strerror(code)}")
    except OSError as error:
        say({"refused": str(error)})
        return
    for name in PRELOADED:
        import_module(name)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    say({"confined": confined})
    serve()


if __name__ == "__main__":
    main()
