"""Bodies of the HTTP interface, shaped as SGLang 0.5.12 shapes them. Decoding checks types; `to_request` checks
meaning."""

from typing import Any, Literal, TypeVar

import msgspec
import torch
from aiohttp import web

from actors.generation.engines.embedded.config import ModelConfig
from actors.generation.engines.embedded.pictures import Eyes, View
from actors.generation.engines.embedded.request import Progress, Request
from actors.runtime.rows import BadData
from bus.errors import UNREADABLE
from bus.messages.weights import TensorMeta

DEFAULT_NEW_TOKENS = 128

B = TypeVar("B")


class BadRequest(ValueError):
    """What the caller asked cannot be served; the text is one line for it."""


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int | None = DEFAULT_NEW_TOKENS
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    # Accepted because SGLang's callers send them; only values that change nothing for token ids.
    stop: list[str] | str | None = None
    n: Literal[1] = 1
    min_p: float = 0.0
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False


class GenerateBody(msgspec.Struct):
    input_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    rid: str | None = None
    stream: bool = False
    return_logprob: bool = False
    return_routed_experts: bool = False
    image_data: list[str] | None = None
    """Pictures of a request, as data URLs or base64; input_ids hold as many placeholders for each as it has tokens."""
    routed_experts_start_len: int = 0
    """First token whose experts are asked for."""
    logprob_start_len: int | None = None
    """First prompt token whose log-probability is asked (the first itself has none). Needs max_new_tokens 0 and
    return_logprob; ignored beside generation. None or -1: none of the prompt's."""


class AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class VersionBody(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class GroupBody(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Literal["gloo"]
    """There is no GPU here."""


class LeaveBody(msgspec.Struct):
    group_name: str


class BroadcastBody(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    group_name: str
    load_format: Literal["flattened_bucket"]
    weight_version: str | None = None
    flush_cache: bool = True
    """Ignored, as in DiskBody."""

    def tensors(self) -> list[TensorMeta]:
        """Raises BadRequest when the lists do not belong together."""
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise BadRequest(f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes differ.")
        return list(map(TensorMeta, self.names, self.dtypes, self.shapes))


class TensorBody(msgspec.Struct):
    serialized_named_tensors: list[str]
    """One FileHandle for this engine's one rank."""
    load_format: Literal["flattened_bucket"]
    weight_version: str | None = None
    flush_cache: bool = True


class MemoryBody(msgspec.Struct):
    tags: list[str] | None = None
    """None or empty: all."""


class CheckerBody(msgspec.Struct):
    action: Literal["checksum"]


class DiskBody(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    """Ignored: there is no prefix cache, and rows follow the pause mode."""
    abort_all_requests: bool = False


def decode_body(raw: bytes, kind: type[B]) -> B:
    """A body of its kind; BadRequest for anything else."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE as error:  # includes ValidationError
        raise BadRequest(f"body refused: {error}") from None


def json_answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


_UNSUPPORTED = SamplingParams()
_NEUTRAL = ("min_p", "min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty")


def view_of(body: GenerateBody, eyes: Eyes | None) -> View | None:
    """What a body shows; None: nothing. Raises BadRequest."""
    if not body.image_data:
        return None
    if eyes is None:
        raise BadRequest("this model reads no pictures; leave image_data out.")
    if body.sampling_params.max_new_tokens == 0:
        raise BadRequest("prompts with pictures are not scored here; leave image_data out, or ask for a token.")
    try:
        return eyes.view(body.input_ids, body.image_data)
    except BadData as error:
        raise BadRequest(f"image_data refused: {error}") from None


def to_request(body: GenerateBody, rid: str, config: ModelConfig, max_total_tokens: int, view: View | None = None) -> Request:
    """Check a body against the model and turn it into a Request. Raises BadRequest."""
    p = body.sampling_params
    prompt = body.input_ids
    limit = p.max_new_tokens if p.max_new_tokens is not None else config.context - len(prompt)
    room = min(config.context, max_total_tokens)
    if not prompt:
        raise BadRequest("input_ids is empty; send at least one token.")
    if min(prompt) < 0 or max(prompt) >= config.vocab:
        raise BadRequest(f"input_ids holds a token outside 0..{config.vocab - 1}; tokenise with the model's own tokenizer.")
    if (limit != 0 and len(prompt) >= room) or len(prompt) + limit > room:
        raise BadRequest(
            f"{len(prompt)} input tokens + {limit} new tokens exceed the context length of {room} tokens; "
            "shorten the prompt or lower max_new_tokens."
        )
    start = body.logprob_start_len if body.logprob_start_len is not None else -1
    if limit < 0 or (limit == 0 and not (body.return_logprob and 0 <= start < len(prompt))):
        raise BadRequest(
            f"max_new_tokens={limit} must be at least 1, or 0 with return_logprob and logprob_start_len in "
            f"0..{len(prompt) - 1} to score the prompt."
        )
    if not (p.temperature >= 0.0 and 0.0 < p.top_p <= 1.0 and (p.top_k == -1 or p.top_k >= 1)):
        raise BadRequest(
            f"temperature={p.temperature} (>= 0), top_p={p.top_p} (0 < p <= 1) or top_k={p.top_k} (-1 or >= 1) is out of range."
        )
    if p.stop:
        raise BadRequest("stop strings need a tokenizer, which this engine does not have; use stop_token_ids.")
    for name in _NEUTRAL:
        if getattr(p, name) != getattr(_UNSUPPORTED, name):
            raise BadRequest(f"{name}={getattr(p, name)} is not supported by the embedded engine; leave it out.")
    stop_ids = frozenset(p.stop_token_ids or ()) | (frozenset() if p.ignore_eos else config.eos)
    return Request(
        rid=rid,
        prompt=prompt,
        limit=limit,
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=p.top_k,
        stop_ids=stop_ids,
        seed=p.sampling_seed,
        stream=body.stream,
        score_from=start if limit == 0 else 0,
        view=view,
        routed_from=body.routed_experts_start_len if body.return_routed_experts and config.experts else None,
    )


def answer(request: Request, progress: Progress, start: int, with_logprobs: bool, latency_s: float) -> bytes:
    """JSON of one response or one stream chunk holding tokens start..n_tokens (start is 0 where answers are
    cumulative)."""
    n = progress.n_tokens
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": progress.finish,
        "prompt_tokens": len(request.prompt),
        "weight_version": progress.version,
        "num_retractions": request.retractions,
        "completion_tokens": n,
        "cached_tokens": 0,
    }
    if with_logprobs:
        meta["output_token_logprobs"] = request.pairs[start:n]
        meta["output_token_logprobs_length"] = n
        if request.input_pairs:
            meta["input_token_logprobs"] = request.input_pairs
    if progress.finish is not None:
        meta["e2e_latency"] = latency_s
        if request.routed_from is not None and (rows := request.experts[request.routed_from :]):
            meta["routed_experts"] = torch.stack(rows).numpy().tobytes()  # base64 in JSON
    return msgspec.json.encode({"output_ids": request.tokens[start:n], "meta_info": meta})
