"""The process that the sandbox forks code from: modules loaded, limits of files taken, and no order of anybody in its memory.

An order comes as descriptors, which only the forked process reads: so code finds nothing of other orders, wherever it looks.
Always true: behind `become`'s limits code opens no socket, starts no process, signals no other, and writes no file; so killing its
one process ends all it did. Standard library only.
"""

from __future__ import annotations

import ast
import ctypes
import json
import linecache
import math
import os
import random
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from actors.runtime import confine, examined, examiner, namespaces, unasked

# Imported once here, free for every piece of code.
PRELOADED = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io", "itertools", "operator"),
    *("re", "statistics", "string", "typing"),
)
RAISED, OUT_OF_MEMORY, UNASKED = 101, 102, 103  # exit codes of ours
MOST_FILES = 64
CHANNEL = 3  # descriptor between a program and its examiner
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
Order = dict[str, Any]


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start(reads: tuple[str, ...], *, calls: bool, walled: bool) -> socket.socket | None:
    """A zygote's line: orders go in, ends come out. `calls`: with the list of system calls. `walled`: in namespaces of its own;
    None where the kernel has none for us. Raises OSError for what it says at its start."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _begin(its, (*confine.system_paths(), *reads), calls=calls, walled=walled)
    its.close()
    said = json.loads(ours.recv(4096) or b'"it ended at once"')
    if said == "no namespaces":
        os.wait()
        return None
    if said != "ready":
        raise OSError(said)
    return ours


def _begin(line: socket.socket, paths: tuple[str, ...], *, calls: bool, walled: bool) -> NoReturn:
    try:
        die_with_parent()
        nothing = os.open("/dev/null", os.O_RDWR)
        for handle in (0, 1):  # the server's orders and answers
            os.dup2(nothing, handle)
        _be_first_to_go()
        if walled:
            try:
                namespaces.enter(paths)
            except OSError:
                line.send(b'"no namespaces"')
                os._exit(0)
            if (inner := os.fork()) != 0:
                line.close()
                os.waitpid(inner, 0)
                os._exit(0)
            die_with_parent()
        confine.give_up_rights()
        if confine.landlock_version():
            confine.limit_files(paths)
        for name in PRELOADED:
            import_module(name)
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        line.send(b'"ready"')
        _serve(line, calls)
    except BaseException as error:  # noqa: BLE001 - a forked process ends here, whatever it is
        try:
            line.send(json.dumps(f"{type(error).__name__}: {error}"[:2000]).encode())
        except OSError:
            pass  # nobody listens any more
    finally:
        os._exit(1)


def _be_first_to_go() -> None:
    """When memory ends, the kernel ends a piece of code, not the run."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # no such file in this container: the kernel chooses by size


def _serve(line: socket.socket, calls: bool) -> None:
    """Until the line ends. Forks one process for each order, and tells its end."""
    running: dict[int, tuple[int, str]] = {}  # descriptor of a process -> (its id, number of the order)
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    zygote = os.getpid()
    while True:
        for handle, _ in waiting.poll():
            if handle != line.fileno():
                waiting.unregister(handle)
                os.close(handle)
                pid, number = running.pop(handle)
                line.send(json.dumps(["ended", number, os.waitpid(pid, 0)[1]]).encode())
                continue
            said, handles, _, _ = socket.recv_fds(line, 64, 4)
            if not said:
                return
            if (pid := os.fork()) == 0:
                become(handles, zygote, calls)
            for one in handles:
                os.close(one)
            handle = os.pidfd_open(pid)
            running[handle] = pid, said.decode()
            waiting.register(handle, select.POLLIN)
            socket.send_fds(line, [json.dumps(["started", said.decode()]).encode()], [handle])


# -- in the process of one piece of code --------------------------------------------------------------------------------


def become(handles: list[int], zygote: int, calls: bool) -> NoReturn:
    """Take on the limits, do what the order says, and end. `handles`: of the order, of both outputs, and of a program's channel."""
    die_with_parent()
    code = 1
    try:
        if os.getppid() not in (zygote, 0):
            os._exit(code)
        with os.fdopen(handles[0], "rb") as file:
            order: Order = json.loads(file.read())
        stdin = os.memfd_create("stdin")
        with os.fdopen(os.dup(stdin), "wb") as file:
            file.write(order.pop("stdin", "").encode(errors="replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        for number, handle in enumerate((stdin, *handles[1:])):
            os.dup2(handle, number)
        os.closerange(len(handles), os.sysconf("SC_OPEN_MAX"))
        _usual_signals()
        confine.limit_alone()
        confine.limit_resources(int(order["memory_bytes"]), files=MOST_FILES, cpu_s=math.ceil(order["deadline_s"]))
        random.seed(0)
        if calls:
            confine.limit_calls()
        code = _MODES[order["mode"]](order)
        sys.stdout.flush()
        sys.stderr.flush()
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - the process ends here; a flush that fails has nobody to tell
        code = RAISED
    finally:
        os._exit(code)


def _usual_signals() -> None:
    for number in range(1, signal.NSIG):
        if signal.getsignal(number) not in (signal.SIG_DFL, None) and number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)


def _run(order: Order) -> int:
    return run_code(order["code"], {"__name__": "__main__"}, echo=order["echo"])


def _answer(order: Order) -> int:
    """A program under examination: runs, then answers what its examiner asks."""
    space: dict[str, Any] = {"__name__": "__main__"}
    code = run_code(order["code"], space)
    if not code:
        examined.answer(CHANNEL, space)
    return code


def _examine(order: Order) -> int:
    """Tests: their text, then what it left for a test runner to call."""
    try:
        tests = unasked.without_solution(order["code"])
        space = examiner.Space(CHANNEL, tests)
        sys.argv, sys.modules["__main__"] = ["tests"], examiner.MainModule(space)
        if code := run_code(tests, space, name="<tests>"):
            return code
        calls = unasked.left_to_call(tests, space)
    except unasked.Unasked as error:
        print(error, file=sys.stderr)
        return UNASKED
    except (examined.ProgramGone, SyntaxError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return RAISED
    return run_code("for one in calls: one()", {"calls": calls}, name="<calls>") if calls else 0


_MODES: dict[str, Callable[[Order], int]] = {"run": _run, "answer": _answer, "examine": _examine}


def run_code(source: str, space: dict[str, Any], *, echo: bool = False, name: str = "<code>") -> int:
    """The exit code. What it raises goes to stderr, as the interpreter would print it. `echo`: print the value of a last line
    that is an expression, as an interactive one does."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space["__builtins__"] = __builtins__
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
