"""In every interpreter of a run under test: a fork server, an engine, a rank or a trial of hooks that finds a warm one
(tests/warm/server.py) hands its place over to it. From then on it is what its starter holds: it passes on the request to end, and
they end together, with one status."""

import os
import sys

WARM = "MILES_ASYNC_TEST_WARM"  # path of the warm server's socket
SPACES = ("mnt", "net", "uts")  # what makes a host; the namespace of users and others are the same on all
FORK_SERVER = "actors.runtime.fork_server"
TRAINER = ("actors.trainer.actor", "actors.trainer.torch_backend.core")  # as the launcher's fork server of trainers: one template
ROUTER = ("sglang_router.launch_router", "actors.router.launch")  # either way of its start
ENGINE = "actors.generation.engines.embedded"
HAND_OVER = (FORK_SERVER, ENGINE, "actors.trainer.follower", "actors.trainer.dry_run", *ROUTER)
LOADS = {  # what is loaded before a program of ours is started, where that is more than the program
    FORK_SERVER: (),  # its flags, which name them
    ENGINE: (f"{ENGINE}.scheduler", f"{ENGINE}.server"),
    **dict.fromkeys(ROUTER, ("sglang_router.launch_router",)),
    **dict.fromkeys((*HAND_OVER[2:4], "tests.crash.toy", "tests.engine.inside_peer", "tests.trainer.broadcast_peer"), TRAINER),
    "miles_async": ("miles_async.cli.train", "miles_async.launcher.run"),
}
LATER = {  # what a room of a fork server would load in every run, once it is one
    "actors.evaluator.actor": ("numpy",),
    "actors.recorder.actor": ("tensorboard.summary.writer.event_file_writer", "tensorboard.compat.proto.event_pb2"),
}


def ask(path, words, *, env, paths, cwd, handles, like="self"):
    """Have it run `python -m *words` on the host (tests/hosts) on which the process `like` is. A connection that says first its pid
    and then its exit status, and ends it when it is closed; None when nobody is there."""
    import json
    import socket

    modules = [FORK_SERVER, *(words[1:-1] if words[0] == FORK_SERVER else LOADS.get(words[0], words[:1]))]
    modules += [later for name in modules for later in LATER.get(name, ())]
    told = {"modules": modules, "words": words, "env": env, "path": paths, "cwd": cwd}
    warm = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    spaces = []
    try:
        spaces += [os.open(f"/proc/{like}/ns/{space}", os.O_RDONLY | os.O_CLOEXEC) for space in SPACES]
        warm.connect(path)
        socket.send_fds(warm, [json.dumps(told).encode()], [*handles, *spaces])
    except OSError:
        warm.close()
        return None  # it starts as it would anywhere else
    finally:
        for space in spaces:
            os.close(space)
    return warm


def forget_words():
    """Processes are found by their command lines: it has none from now on."""
    import ctypes

    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    ctypes.memset(begin, 0, end - begin)


def hand_over(words):
    import signal

    warm = ask(os.environ[WARM], words, env=dict(os.environ), paths=sys.path, cwd=os.getcwd(), handles=[0, 1, 2])
    if warm is None:
        return
    for number in (0, 1, 2):
        os.close(number)  # their ends are the other's to see
    forget_words()
    pid = int(warm.recv(64) or 0)
    signal.signal(signal.SIGTERM, lambda *_: pid and os.kill(pid, signal.SIGTERM))
    code = int(warm.recv(64) or 1)
    if code < 0:
        if -code != signal.SIGKILL:  # which none may handle
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if WARM in os.environ and "-m" in sys.orig_argv:
    hand_over_for = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
    if hand_over_for and hand_over_for[0] in HAND_OVER:
        hand_over(hand_over_for)
