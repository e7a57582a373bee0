"""In every interpreter of a run under test: a fork server that finds a warm one (tests/warm/server.py) hands its place over to it,
and is from then on only what its starter holds: when it ends, so does the one at work."""

import os
import sys

WARM = "MILES_ASYNC_TEST_WARM"  # path of the warm server's socket
MODULE = "actors.runtime.fork_server"


def hand_over(path: str) -> None:
    import json
    import socket

    words = sys.orig_argv[sys.orig_argv.index(MODULE) + 1 : -1]
    told = {"modules": words, "env": dict(os.environ), "path": sys.path, "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as warm:
        try:
            warm.connect(path)
            socket.send_fds(warm, [json.dumps(told).encode()], [0, 1, 2])
        except OSError:
            return  # it starts as it would anywhere else
        for number in (0, 1, 2):
            os.close(number)  # their ends are the other's to see
        warm.recv(1)  # until the other has gone
        os._exit(0)


if WARM in os.environ and MODULE in sys.orig_argv:
    hand_over(os.environ[WARM])
