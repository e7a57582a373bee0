"""Stands for a worker of pytest-xdist that was forked elsewhere (workers.py): `python worker.py SOCKET -u -c COMMAND`, which
execnet starts and ends. They end together, with one status. Where nobody answers it runs the command itself, as any worker does."""

import os
import signal
import socket
import sys


def main(path: str, words: list[str]) -> None:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        asking.connect(path)
        socket.send_fds(asking, [b"!"], [0, 1, 2])
    except OSError:
        os.execv(sys.executable, [sys.executable, *words])
    for number in (0, 1, 2):
        os.close(number)  # their ends are the worker's to see
    code = int(asking.recv(64) or 1)
    if code < 0:
        if -code != signal.SIGKILL:  # which none may handle
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main(sys.argv[1], sys.argv[2:])
