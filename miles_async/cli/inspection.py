"""What the commands that look at a run share: one connection, one answer, printed as text or as JSON."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from miles_async.cli.options import chosen_run
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from bus import Bus


def on_bus(args: argparse.Namespace, body: Callable[["Bus", RunRef], Awaitable[int]], *, look: bool = True) -> int:
    """Run `body` on the bus of the chosen run and return its exit status. Raises what `attached` raises: status 2. `look`: it
    changes nothing, so a run that has ended can be asked too."""
    import asyncio

    from miles_async.console.attach import attached

    ref = chosen_run(args)

    async def go() -> int:
        async with attached(ref, look=look) as bus:
            return await body(bus, ref)

    return asyncio.run(go())


def print_json(value: Any) -> None:
    """One document on stdout; structs and their kind become plain values."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()
    sys.stdout.write(text + "\n")
