"""Ctrl-C at any moment of a loop's life ends its body once, and says nothing but KeyboardInterrupt."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from actors.runtime.loop import runner

REPO = Path(__file__).resolve().parents[2]
BODY = """
import asyncio, signal, sys, weakref
from actors.runtime.loop import run_loop, runner
signal.signal(signal.SIGINT, signal.default_int_handler)
press = lambda: signal.raise_signal(signal.SIGINT)

async def body():
    try:
        print("begun")
        if "inside" in sys.argv:
            asyncio.get_running_loop().call_soon(press)
        await asyncio.sleep(0 if "after" in sys.argv else 30)
    finally:
        await asyncio.sleep(0)
        print("ended")
    if "after" in sys.argv:
        asyncio.get_running_loop().call_soon(press)
    return 7

if "before" in sys.argv:  # while the loop's first task is made: Python notes it in a weak set
    add = weakref.WeakSet.add
    def added(self, item):
        if isinstance(item, asyncio.Task) and "pressed" not in sys.argv:
            sys.argv.append("pressed")
            press()
        add(self, item)
    weakref.WeakSet.add = added
try:
    print("returned", run_loop(body()))
except KeyboardInterrupt:
    print("interrupted")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("before", ["interrupted"]),
        ("inside", ["begun", "ended", "interrupted"]),
        ("after", ["begun", "ended", "interrupted"]),
    ],
)
def test_an_interrupt_is_heard_whenever_it_comes(when: str, said: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", BODY, when], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (said, "")


def test_a_tls_connection_that_the_network_closed_is_no_traceback_and_anything_else_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the words of uvloop 0.23: it came for each connection that was lost with its server."""
    pytest.importorskip("uvloop")
    closed = "unable to perform operation on <TCPTransport closed=True reading=False 0x1>; the handler is closed"

    async def fails(message: str, error: Exception) -> int:
        caplog.clear()
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
        return len(caplog.records)

    with runner() as loop:
        assert loop.run(fails("Fatal error on SSL protocol", RuntimeError(closed))) == 0
        assert loop.run(fails("Fatal error on SSL protocol", RuntimeError("no memory"))) == 1
        assert loop.run(fails("Exception in callback f()", RuntimeError(closed))) == 1
