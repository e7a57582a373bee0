"""A process that has loaded what processes of runs load, for all runs of a test session: torch and transformers take seconds of a
processor, and each run would load them several times. Nothing else of a run is shared: fork servers, engines and launchers are its
own, each with its environment, and so are all actors. Linux, as fork servers are.

`python -P tests/warm/server.py SOCKET SPACE` ends when its stdin does. The first asked for with a list of modules makes a template,
a process that loads them; it is forked for this one and all that follow. A keeper waits for each, to tell how it ended.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

MOST = 1 << 17  # bytes of a message: an environment
SPACES = ("mnt", "net", "uts")  # as in sitecustomize.py
HANDLES = 3 + len(SPACES)  # stdin, stdout, stderr, and namespaces
OWN = list(sys.path)


def main(path: str) -> None:
    """Pass what comes on to the template of its modules."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    templates: dict[str, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)  # who sees it is answered
    while 0 not in select.select([0, listener], [], [])[0]:
        asking, _ = listener.accept()
        data, handles, _, _ = socket.recv_fds(asking, MOST, HANDLES)
        if len(handles) == HANDLES:
            modules = json.loads(data)["modules"]
            template = templates.get(str(modules))
            if template is None:
                template, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for other in (listener, template, *templates.values()):
                        other.close()
                    first = (json.loads(data), [*handles, asking.detach()])
                    become(serve(inside, modules, *first))
                inside.close()
                templates[str(modules)] = template
            else:
                try:
                    socket.send_fds(template, [data], [*handles, asking.fileno()])
                except OSError:
                    del templates[str(modules)]  # it could not load them; this one sees that nobody answers
        for handle in handles:
            os.close(handle)
        asking.close()


def serve(inside: socket.socket, modules: list[str], told: dict[str, Any], handles: list[int]) -> tuple[dict[str, Any], list[int]]:
    """In a template: for ever. In one forked from it: what it is to be."""
    take_path(told)
    gc.disable()
    from actors.runtime import priority

    priority.lower_to = as_it_is
    for name in modules:
        import_module(name)
    gc.freeze()
    gc.enable()
    while True:
        if os.fork() == 0:
            inside.close()
            return told, handles
        for handle in handles:
            os.close(handle)
        data, handles, _, _ = socket.recv_fds(inside, MOST, HANDLES + 1)
        if not data:
            os._exit(0)
        told = json.loads(data)


def as_it_is(nice: int) -> None:
    """Instead of `lower_to`: a test waits for its whole run, and must not stand behind all that computes beside it. What trains and
    generates would have a tenth of the share of any other session, and on a busy machine hardly a processor."""


def take_path(told: dict[str, Any]) -> None:
    """Theirs before ours."""
    sys.path[:] = [*told["path"], *(entry for entry in OWN if entry not in told["path"])]


def become(what: tuple[dict[str, Any], list[int]]) -> None:
    """What was asked for, as `python -m` would run it."""
    told, (*given, asking) = what
    standard, spaces = given[:3], given[3:]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # the keeper too: a signal to the tests' group must not leave what it keeps alone
    if child := os.fork():
        for space in spaces:
            os.close(space)
        keep(child, asking)
    os.setsid()
    for number, handle in enumerate(standard):
        os.dup2(handle, number)
        os.close(handle)
    try:
        os.write(asking, str(os.getpid()).encode())
    except OSError:
        os._exit(0)  # whoever asked has died
    os.close(asking)
    os.environ.clear()
    os.environ.update(told["env"])
    take_path(told)
    try:
        enter(spaces)
        os.chdir(told["cwd"])
    except OSError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    random.seed()
    sys.argv = list(told["words"])
    from actors.runtime.child import PYTHON
    from actors.runtime.fork_server import rename

    rename([*PYTHON, *sys.argv])
    sys.modules.pop(sys.argv[0], None)
    to_its_end(lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))


def to_its_end(program: Callable[[], object]) -> NoReturn:
    """Run it, and end this process as an interpreter would, but without taking apart, and so copying, what it shares."""
    code: Any = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - it ends with the words that any other would end with
        code = 1
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else code is not None)


def enter(spaces: list[int]) -> None:
    """Be on the host of these namespaces, where that is another one."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for space, name in zip(spaces, SPACES, strict=True):
        if not os.path.sameopenfile(space, own := os.open(f"/proc/self/ns/{name}", os.O_RDONLY)) and libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), f"setns {name}: {os.strerror(ctypes.get_errno())}")
        os.close(own)
        os.close(space)


def keep(child: int, asking: int) -> NoReturn:
    """Wait for the child, and tell its exit status; it is killed when whoever asked, who holds the other end, is no more."""
    if asking in select.select([os.pidfd_open(child), asking], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        os.write(asking, str(os.waitstatus_to_exitcode(status)).encode())
    except OSError:
        pass
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
