"""Flags and variables of a real SGLang server: what follows from the run, what users may pass on.

Names are SGLang's own without the leading dashes. What follows from settings of the run always wins over what was given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from actors.generation.spec import GenerationSpec
from actors.runtime.child import ArgValue, flag_name
from actors.runtime.vision import family_of

MODULE = "sglang.launch_server"
STREAM_INTERVAL = 32  # tokens per streamed chunk: one per token costs more than making it
LOADER = "actors.generation.engines.sglang.quick_load.load"
INSIDE = "actors.generation.engines.sglang.inside.run"
"""Our functions inside SGLang, as its flag and its weight updates name them."""
PREFILL_BATCH = 64
GATHER: dict[str, ArgValue] = {
    "enable-prefill-delayer": True,
    "prefill-delayer-queue-min-ratio": 0.1,
    "prefill-delayer-max-delay-ms": 100,
    "prefill-max-requests": PREFILL_BATCH,
}
"""Prompts wait up to a tenth of a second for company: samples end one by one, and a prefill for each would stop all others
every second step. SGLang also holds prompts back, without a limit in time, while fewer slots are free than its largest
prefill had; so there are always that many more than samples. One GPU only: SGLang 0.5.12 has each rank decide by its own clock
when the wait is over, and ranks that disagree wait for each other for good (its pull requests 30521 and 32454)."""

SEES_ANEW = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
"""SGLang (0.5.12) keeps what the vision tower made of a picture by the picture alone, across weight updates, and no flush clears
it: a picture seen before was looked at with old weights for good. Without that memory each prefill looks anew; siblings
that come later share its keys and values, which are kept by version."""

UNEQUAL_GPUS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
"""SGLang refuses to start where one of an engine's GPUs has a tenth less free memory than another. A trainer beside it keeps
the version it shares with engines on its first rank's GPU alone: seen with a 4B model, 7.6 GiB of 80."""


ADAPTERS_AT_ONCE = 3
"""In one batch: the newest, one that the last requests of the version before name, and none, for health checks."""

ADAPTERS_FROM = (0, 5, 23)
"""Before it (0.5.17 and 0.5.21 were read) a request that is aborted while it waits counts as using its adapter for good: the call
that unloads the adapter never returns, nor does any later load."""


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
    ours_inside: bool = True,
    routed: bool = False,
    sighted: bool = False,
) -> dict[str, ArgValue]:
    """All flags but those of one start (model path, port, version label). `given` wins over our defaults.

    max_running: samples at once. routed: it tells which experts it chose. sighted: its model reads pictures. ours_inside: the
    server's Python has this package, whose functions it can import.
    """
    args: dict[str, ArgValue] = {
        "grammar-backend": "none",
        "stream-interval": STREAM_INTERVAL,
        "incremental-streaming-output": True,
        "max-running-requests": max_running,
        "log-level": "info",
    }
    if context_length:
        args["context-length"] = context_length
    theirs = {flag_name(name): value for name, value in given.items()}
    if tp_size == 1 and theirs.keys().isdisjoint({*GATHER, "disable-overlap-schedule", "max-running-requests"}):
        args |= GATHER | {"max-running-requests": max_running + PREFILL_BATCH}
    args |= theirs
    if sighted:  # the numbers that the trainer makes of a picture
        args["disable-fast-image-processor"] = True
    if routed:
        args["enable-return-routed-experts"] = True
    if ours_inside:
        loaders = args.get("custom-weight-loader") or ()
        args["custom-weight-loader"] = (
            *(loaders if isinstance(loaders, tuple | list) else (str(loaders),)), LOADER, INSIDE,
        )  # fmt: skip
    return args | {"tp-size": tp_size, "random-seed": seed, "skip-tokenizer-init": True}


def sglang_env(spec: GenerationSpec) -> dict[str, str]:
    """Variables of an SGLang server, and of each part of it; they win over those of this process (pure)."""
    beside_trainer = UNEQUAL_GPUS if spec.gives_back and spec.tp_size > 1 else {}
    return {**(SEES_ANEW if family_of(spec.model_path) else {}), **beside_trainer}


def sglang_flags(spec: GenerationSpec, part: int = 0) -> dict[str, ArgValue]:
    """Flags of an SGLang server, or of one part of it where it is spread over hosts (pure)."""
    args = server_args(
        tp_size=spec.tp_size,
        max_running=spec.max_running,
        seed=spec.seed,
        given=spec.server_args,
        context_length=spec.context_length,
        routed=spec.routed,
        sighted=bool(family_of(spec.model_path)),
        ours_inside=not spec.server_command,  # another program's Python need not have our package
    )
    if spec.adapters:
        args |= {
            "enable-lora": True,
            "max-lora-rank": spec.adapters.rank,
            "lora-target-modules": spec.adapters.targets,
            "max-loras-per-batch": ADAPTERS_AT_ONCE,
        }
    if spec.nodes > 1:
        args |= {"nnodes": spec.nodes, "node-rank": part, "dist-init-addr": spec.meeting}
    return args


def too_old(release: str) -> str:
    """Why a server of this release gets no adapters; empty: it may."""
    number = tuple(int(n) for n in re.findall(r"\d+", release)[:3])
    if number >= ADAPTERS_FROM:
        return ""
    return (
        f"SGLang {release or 'of an unknown release'} may never unload an adapter (lora_publish = adapters). Install 0.5.23 or "
        "newer, or set --lora-publish merged"
    )
