"""A process that has loaded what fork servers load, for all runs of a test session: torch and transformers take seconds of a
processor, and each run would load them anew. Nothing else of a run is shared: fork servers are its own, with its environment, and
so are all actors. Linux, as fork servers are.

`python -P tests/warm/server.py SOCKET SPACE` ends when its stdin does. The first fork server with a list of modules makes a
template, a process that loads them; it is forked for this one and all that follow.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from importlib import import_module
from typing import Any

MODULE = "actors.runtime.fork_server"
MOST = 1 << 17  # bytes of a message: an environment


def main(path: str) -> None:
    """Pass what comes on to the template of its modules."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    templates: dict[str, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    while 0 not in select.select([0, listener], [], [])[0]:
        asking, _ = listener.accept()
        data, handles, _, _ = socket.recv_fds(asking, MOST, 3)
        if len(handles) == 3:
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
                socket.send_fds(template, [data], [*handles, asking.fileno()])
        for handle in handles:
            os.close(handle)
        asking.close()


def serve(inside: socket.socket, modules: list[str], told: dict[str, Any], handles: list[int]) -> tuple[dict[str, Any], list[int]]:
    """In a template: for ever. In one forked from it: what it is to be."""
    sys.path[:] = told["path"]
    gc.disable()
    for name in (*modules, MODULE):
        import_module(name)
    gc.freeze()
    gc.enable()
    while True:
        if os.fork() == 0:
            inside.close()
            return told, handles
        for handle in handles:
            os.close(handle)
        data, handles, _, _ = socket.recv_fds(inside, MOST, 4)
        if not data:
            os._exit(0)
        told = json.loads(data)


def become(what: tuple[dict[str, Any], list[int]]) -> None:
    """The fork server that was asked for."""
    told, (*standard, asking) = what
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, handle in enumerate(standard):
        os.dup2(handle, number)
        os.close(handle)
    # Whoever asked holds the other end; at its death the kernel sends SIGIO, which ends this one too.
    fcntl.fcntl(asking, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(asking, fcntl.F_SETFL, fcntl.fcntl(asking, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([asking], [], [], 0)[0]:
        os._exit(0)  # it died before
    os.environ.clear()
    os.environ.update(told["env"])
    sys.path[:] = told["path"]
    os.chdir(told["cwd"])
    sys.argv = [MODULE, *told["modules"], ""]
    del sys.modules[MODULE]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
