"""Acts as another user of the host: a fork of the test gives its rights away, as others may not read our interpreter."""

from __future__ import annotations

import codecs
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


def as_nobody(act: Callable[[], Any]) -> Any:
    """What `act` returns, or the exception that it raises (returned, too). It imports nothing new."""
    codecs.lookup("idna")  # what names of hosts are written in: a module that this user may be unable to read
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, when other threads run
        pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            try:
                result = act()
            except Exception as error:  # noqa: BLE001 - it is the answer
                result = error
            os.write(writing, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(answer)  # noqa: S301 - our own fork wrote it
