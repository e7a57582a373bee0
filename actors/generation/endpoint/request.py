"""One `/v1/chat/completions`: what a client may ask, and the answer in its terms (pure).

Always true: what would draw tokens otherwise than the policy is trained, or claim what we cannot keep, is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from actors.generation.endpoint.calls import ToolCall, without
from actors.generation.endpoint.plain_json import MOST_DEPTH, depth_of
from actors.generation.rollouts.session import Segment
from bus.errors import UNREADABLE
from bus.messages.samples import Sampling

MOST_ANSWERS = 16  # `n` of one call
MOST_STOPS, LONGEST_STOP = 64, 500  # each is looked for in what is made, whenever more is; the second: characters of one
Json = dict[str, Any]


class BadRequest(Exception):
    """A call that cannot be answered; the text is for the client."""


class ChatBody(msgspec.Struct, kw_only=True):
    """What we read of a body. Fields that we do not know are left alone: clients send many."""

    messages: Any
    model: str = ""
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    """`none` leaves the tools out. That a call must be made is the prompt's business: no token is forced."""
    stream: bool | None = False
    stream_options: Json | None = None
    n: int | None = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    response_format: Json | None = None
    frequency_penalty: float | None = 0
    presence_penalty: float | None = 0
    logit_bias: Json | None = None

    @property
    def stops(self) -> list[str]:
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in found if text]

    @property
    def offered(self) -> list[Json]:
        return [] if self.tool_choice == "none" else self.tools or []


_decode = msgspec.json.Decoder(ChatBody).decode


def read(raw: bytes) -> ChatBody:
    """A body. Raises BadRequest."""
    try:
        body = _decode(raw)
    except UNREADABLE as error:
        raise BadRequest(f"the body cannot be read: {error}") from error
    refused = [
        *(name for name in ("frequency_penalty", "presence_penalty", "logit_bias") if getattr(body, name)),
        *(["top_logprobs"] if body.top_logprobs else []),
        *(["response_format"] if (body.response_format or {}).get("type", "text") != "text" else []),
    ]
    if refused:
        raise BadRequest(f"{', '.join(refused)} not supported: tokens are drawn as the policy is trained.")
    if not 1 <= (body.n or 1) <= MOST_ANSWERS:
        raise BadRequest(f"n = {body.n} is not from 1 to {MOST_ANSWERS}.")
    if len(body.stops) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in body.stops):
        raise BadRequest(f"'stop' takes at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters.")
    for name in ("max_tokens", "max_completion_tokens"):
        if (getattr(body, name) or 0) < 0:
            raise BadRequest(f"{name} = {getattr(body, name)} is below 0; leave it out for as many tokens as there are left.")
    if depth_of(body.offered) > MOST_DEPTH:
        raise BadRequest(f"'tools' has more than {MOST_DEPTH} tables and lists in each other.")
    for tool in body.offered:
        if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
            raise BadRequest("each of 'tools' must be {'type': 'function', 'function': {'name': ...}}")
        schema = tool["function"].get("parameters") or {}
        if not isinstance(schema, dict) or not isinstance(schema.get("properties") or {}, dict):
            raise BadRequest(f"the parameters of tool {tool['function']['name']!r} are no JSON schema of an object")
    return body


def sampling_of(body: ChatBody, given: Sampling, *, as_asked: bool) -> tuple[Sampling, bool]:
    """How to draw this answer, and whether that is another way than asked. `as_asked`: the client's temperature and top_p count, as
    nothing is trained on the answer; else the run's do."""
    asked = body.max_completion_tokens or body.max_tokens or given.max_new_tokens
    most = max(1, min(asked, given.max_new_tokens))
    sampling = msgspec.structs.replace(given, max_new_tokens=most, stop=tuple(body.stops) or given.stop)
    other = {
        name: value
        for name in ("temperature", "top_p")
        if (value := getattr(body, name)) is not None and value != getattr(given, name)
    }
    return (msgspec.structs.replace(sampling, **other), False) if as_asked else (sampling, bool(other))


def message_of(text: str, calls: Sequence[ToolCall], prefix: str) -> Json:
    """The assistant's message: what it says before its calls, and these. Calls that cannot be read stay text, for the client to
    judge. `prefix`: of the calls' ids."""
    if not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": text}
    tool_calls = [
        {"id": f"call_{prefix}_{index}", "type": "function", "function": {
            "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
        for index, call in enumerate(calls)
    ]  # fmt: skip
    return {"role": "assistant", "content": without(text[: calls[0].start], []) or None, "tool_calls": tool_calls}


def finish_of(message: Json, segment: Segment) -> str:
    return "tool_calls" if "tool_calls" in message else segment.finish


def logprobs_of(segment: Segment, texts: Sequence[str]) -> Json:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, segment.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def usage_of(n_prompt: int, segments: Sequence[Segment]) -> Json:
    made = sum(len(segment.tokens) for segment in segments)
    return {"prompt_tokens": n_prompt, "completion_tokens": made, "total_tokens": n_prompt + made}


def safe_length(text: str, stops: Sequence[str], opening: str) -> int:
    """How much of a growing text may be shown: what can no longer become a stop or a call."""
    end = len(text)
    for mark in (*stops, opening):
        if not mark:
            continue
        at = text.find(mark)
        if at >= 0:
            end = min(end, at)
            continue
        for n in range(min(len(mark) - 1, len(text)), 0, -1):
            if text.endswith(mark[:n]):
                end = min(end, len(text) - n)
                break
    return end
