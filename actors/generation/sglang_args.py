"""Flags of a real SGLang server: what follows from the run, what users may pass on (pure, stdlib only).

Names are SGLang's own without the leading dashes. What follows from settings of the run always wins over what was given.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from actors.runtime.child import ArgValue, flag_name

MODULE = "sglang.launch_server"
STREAM_INTERVAL = 32  # tokens per streamed chunk: one per token costs more than making it
LOADER = "actors.generation.quick_load.load"
"""Our function inside SGLang, as its flag and its weight updates name it."""


def default_command() -> tuple[str, ...]:
    """The SGLang of this Python."""
    return (sys.executable, "-m", MODULE)


def server_args(
    *,
    tp_size: int,
    max_running: int,
    seed: int,
    given: Mapping[str, ArgValue],
    context_length: int = 0,
    exact_stream: bool = False,
    quick_load: bool = True,
) -> dict[str, ArgValue]:
    """All flags but those of one start (model path, port, version label). `given` wins over our defaults.

    exact_stream: a chunk per token, so that a weight update without an abort has an exact boundary. quick_load: the server's
    Python has this package, whose loader it can import.
    """
    args: dict[str, ArgValue] = {
        "grammar-backend": "none",
        "stream-interval": 1 if exact_stream else STREAM_INTERVAL,
        "incremental-streaming-output": True,
        "max-running-requests": max_running,
        "log-level": "info",
    }
    if context_length:
        args["context-length"] = context_length
    args |= {flag_name(name): value for name, value in given.items()}
    if quick_load:
        theirs = args.get("custom-weight-loader") or ()
        args["custom-weight-loader"] = (*(theirs if isinstance(theirs, tuple | list) else (str(theirs),)), LOADER)
    return args | {"tp-size": tp_size, "random-seed": seed, "skip-tokenizer-init": True}


__all__ = ("LOADER", "MODULE", "STREAM_INTERVAL", "default_command", "server_args")
