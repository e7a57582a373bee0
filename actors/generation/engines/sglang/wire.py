"""What SGLang's /generate is sent and answers, and what its /v1/loads answers, as far as we read it (pure)."""

from typing import Any

import msgspec

from actors.generation.engine import EngineLoad, GenerateRequest
from bus.errors import UNREADABLE

NEVER_MIXES = "chunks_of_one_version"
"""A server that says so (ours does) states the version of each chunk exactly, and keeps nothing of what older weights saw in a
picture."""


class Reason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class Pair(msgspec.Struct, array_like=True, gc=False):
    """What follows in an answer, a text or null, is left out."""

    logprob: float | None
    token_id: int


class Meta(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    weight_version: str | None = None
    finish_reason: Reason | None = None
    output_token_logprobs: list[Pair] = []
    routed_experts: msgspec.Raw = msgspec.Raw()


class Error(msgspec.Struct):
    message: str = ""


class Event(msgspec.Struct):
    meta_info: Meta = msgspec.field(default_factory=Meta)
    error: Error | None = None


class RankLoad(msgspec.Struct):
    """One scheduler's, of /v1/loads (SGLang 0.5.12)."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float | None = None
    max_running_requests: int | None = None


class Loads(msgspec.Struct):
    loads: list[RankLoad] = []


decode_event = msgspec.json.Decoder(Event).decode


def body_of(request: GenerateRequest, name: str) -> bytes:
    sampling: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_new_tokens": request.max_new_tokens,
        "ignore_eos": request.ignore_eos,
    }
    if request.stop_token_ids:
        sampling["stop_token_ids"] = request.stop_token_ids
    if request.sampling_seed is not None:
        sampling["sampling_seed"] = request.sampling_seed
    body: dict[str, Any] = {
        "rid": name,
        "input_ids": request.input_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
    }
    if request.extra_key is not None:
        body["extra_key"] = request.extra_key
    if request.adapter:
        body["lora_path"] = request.adapter
    if request.images:
        body["image_data"] = request.images
    if request.routed is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routed_from}
    return msgspec.json.encode(body)


def load_of(text: str) -> EngineLoad:
    """Of all schedulers of an engine together; the fullest says how full. Nothing is told by an answer that is not understood."""
    try:
        ranks = msgspec.json.decode(text, type=Loads).loads
    except UNREADABLE:
        return EngineLoad()
    if not ranks:
        return EngineLoad()
    return EngineLoad(
        running=sum(rank.num_running_reqs for rank in ranks),
        waiting=sum(rank.num_waiting_reqs for rank in ranks),
        kv_used=max((rank.token_usage for rank in ranks if rank.token_usage is not None), default=None),
        max_running=sum(rank.max_running_requests or 0 for rank in ranks) or None,
    )


def message_in(text: str) -> str:
    """SGLang nests its message differently per endpoint: {"error": {"message"}}, {"message"} or plain text."""
    try:
        value = msgspec.json.decode(text)
    except UNREADABLE:
        return text
    if isinstance(value, dict):
        inner = value.get("error", value)
        if isinstance(inner, dict) and "message" in inner:
            return str(inner["message"])
    return text
