"""`python -m actors.environments.child PATH [PROFILE]`: one environment of the user's at a time, in a process of its own.

Orders on stdin, answers on stdout, msgpack behind a 4-byte little-endian length: [verb, argument] -> [whether it worked, value or
text]. The first answer is to its start. What the environment prints goes to stderr. PROFILE: its limits; those of files from before
its module is loaded, so that threads which that starts have them too, those of system calls from then on.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any, BinaryIO, cast

import msgspec

from actors.runtime.confine import confine_calls, confine_files, decoded, with_imports
from actors.runtime.hooks import awaited, framed, load_hook, own_pipes, read_frame
from actors.runtime.whole import said


def serve(path: str, limits: str) -> None:
    """Until stdin ends. `limits`: an encoded profile, empty = none."""
    profile = decoded(limits) if limits else None
    orders, answers = own_pipes()
    loop = asyncio.new_event_loop()  # before the limits: it opens a pair of sockets
    kind: Any = None
    refusal, environment = "", cast(Any, None)  # before `begin`, `step` fails and says so
    try:
        if profile is not None:
            confine_files(with_imports(profile, path))
        kind = load_hook(path)
        if profile is not None:
            confine_calls(profile)
    except BaseException as error:  # noqa: BLE001 - the user's module runs while it is imported
        refusal = said(error)
    _say(answers, not refusal, refusal)
    while (order := read_frame(orders)) is not None:
        verb, argument = msgspec.msgpack.decode(order)
        try:
            if verb == "begin":
                environment = kind()
            value = environment.reset(argument) if verb == "begin" else environment.step(argument)
            if inspect.isawaitable(value):
                value = loop.run_until_complete(awaited(value))
            worked, value = True, msgspec.Raw(msgspec.msgpack.encode(value))
        except BaseException as error:  # noqa: BLE001 - it is told where it was asked
            worked, value = False, said(error)
        _say(answers, worked, value)


def _say(answers: BinaryIO, worked: bool, value: Any) -> None:
    answers.write(framed(msgspec.msgpack.encode([worked, value])))
    answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
