"""Ctrl-C at any moment of a loop's life ends its body once, and says nothing but KeyboardInterrupt."""

import subprocess
import sys
from pathlib import Path

import pytest

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
