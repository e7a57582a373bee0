"""Checks of a running server that this worker did not start: does it serve our model, and how does it stream?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actors.generation.engine import Attached, BootRefused
from actors.generation.engines.sglang.qualified import record_of
from actors.generation.engines.sglang.wire import NEVER_MIXES
from actors.runtime.fp8 import read_scheme
from actors.runtime.vision import config_of

# What makes two models one shape. A weight update between different ones would fail half-way, or worse, not fail.
SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "moe_intermediate_size",
)

BOUNDARY, CHECKSUMS = "boundary", "checksums"
"""Capabilities in a record that runs turn off."""
SIGHT = (
    "the engine at {url} was not started by this run: started without SGLANG_VLM_CACHE_SIZE_MB=0 in its environment it goes on "
    "with what its vision tower saw in a picture under older weights, and cannot be told to forget. If it was, all is well; if "
    "not, train/train_rollout_logprob_abs_diff grows after the first weight update"
)


def describe(info: Mapping[str, Any]) -> Attached:
    """What /server_info tells about streaming and size."""
    never_mixes = bool(info.get(NEVER_MIXES))
    exact = never_mixes or (info.get("stream_interval", 1) == 1 and bool(info.get("skip_tokenizer_init", False)))
    # With overlap SGLang keeps the result of the last step back while it is paused in place, and states the new version for it.
    in_place = never_mixes or (exact and info.get("disable_overlap_schedule") is True)
    return Attached(exact=exact, tp_size=int(info.get("tp_size") or 1), exact_in_place=in_place)


def as_qualified(found: Attached, info: Mapping[str, Any]) -> tuple[Attached, str]:
    """What `describe` said, less what the record of this release says is not there: requests then end at an update and are sent
    again. And why its checksums are not to be asked for; empty: they are. What is off stands in the note, in one line."""
    release = str(info.get("version") or "")
    record = record_of(release)
    if record is None:
        return found, ""
    off = [name for name in (BOUNDARY, CHECKSUMS) if record.failed(name)]
    if record.failed(BOUNDARY):
        found = replace(found, exact=False, exact_in_place=False)
    if off:
        text = f"{release} is not qualified for {', '.join(off)}, which are off: {record.lacks()}"
        found = replace(found, note="; ".join(filter(None, (found.note, text))))
    why = f"{release} is not qualified for checksums: {record.capabilities[CHECKSUMS].why}" if record.failed(CHECKSUMS) else ""
    return found, why


def check_served(url: str, info: Mapping[str, Any], served_path: str, model_path: str) -> Attached:
    """BootRefused, one line, when the server at `url` serves a model of another shape, or cannot take weight updates."""
    found = describe(info)
    if not info.get(NEVER_MIXES):
        found = replace(found, sight=SIGHT.format(url=url))
    if not model_path:
        return found
    ours, theirs = config_of(model_path), config_of(served_path)
    if not ours:
        return found
    if not theirs:
        return replace(found, note=f"{served_path} is not readable here, its shape was not compared")
    for key in SHAPE_KEYS:
        mine, its = ours.get(key), theirs.get(key)
        if None not in (mine, its) and mine != its:  # a config may leave out what its family implies
            raise BootRefused(
                f"the engine at {url} serves another model ({served_path}): its {key} is {its!r}, {model_path} has {mine!r}. "
                "Give the address of an engine of this model to --rollout-external-engine-addrs."
            )
    mine, its = _quantization(ours), _quantization(theirs)
    if mine != its:
        raise BootRefused(
            f"the engine at {url} serves {its} weights ({served_path}), {model_path} is published as {mine}. Give the address "
            "of an engine that was started with that directory."
        )
    context = info.get("context_length")
    note = f"context of {context} tokens" if isinstance(context, int) else ""
    return replace(found, note=note)


def check_routed(url: str, info: Mapping[str, Any], *, wanted: bool) -> None:
    """BootRefused where samples shall bring experts (`wanted`) and the server at `url` will not tell them."""
    if wanted and not info.get("enable_return_routed_experts"):
        raise BootRefused(
            f"the engine at {url} does not tell which experts it chose, which use_rollout_routing_replay needs. Start it with "
            "--enable-return-routed-experts (SGLang 0.5.12), or leave the setting out."
        )


def _quantization(config: Mapping[str, Any]) -> str:
    """In words: plain, FP8 in blocks, or what the directory itself says."""
    try:
        scheme = read_scheme(config)
    except ValueError:
        return str(config["quantization_config"])[:120]
    return "plain" if scheme is None else f"FP8 ({scheme.block[0]} x {scheme.block[1]} blocks)"
