"""An inference engine over SGLang's HTTP interface: real SGLang (0.5.12 and like), its router, or the embedded engine.

Owns one connection pool and the names of its requests in flight. Always true: tokens of a request are handed out once,
in order, whether the server streams cumulative or incremental chunks (each is placed by its `completion_tokens`).
"""

import asyncio
import itertools
import struct
import uuid
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from actors.generation.engine import (
    AnswerBroken,
    AnswerRefused,
    Attached,
    Chunk,
    Engine,
    EngineHealth,
    EngineLoad,
    EngineUnavailable,
    Finish,
    GenerateRequest,
    PauseMode,
    RequestRefused,
)
from actors.generation.engines.sglang.args import LOADER
from actors.generation.engines.sglang.attach import as_qualified, check_routed, check_served, describe
from actors.generation.engines.sglang.boundary import Boundaries
from actors.generation.engines.sglang.calls import Calls, said
from actors.generation.engines.sglang.http_stream import Line, Lines, StreamBroken, StreamLate
from actors.generation.engines.sglang.inside_client import Inside
from actors.generation.engines.sglang.sessions import Sessions
from actors.generation.engines.sglang.wire import body_of, decode_event, load_of
from actors.generation.routing import read_routed
from actors.runtime.arrays import floats_fit, ints_fit, logprobs_fault, tokens_fault
from actors.runtime.deadline import within
from bus.errors import UNREADABLE
from bus.messages.weights import Bucket, TensorMeta

FLAT = "flattened_bucket"
DONE = b"[DONE]"
IDLE_S = 5.0  # an engine's time to end what was aborted
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


class GivenUp(Exception):
    """This engine was closed while a request ran."""


class SGLangClient(Engine):
    """One engine (or router) at `base_url`. Every method raises EngineUnavailable or RequestRefused, within its deadline.

    request_deadline_s: a whole `generate`. token_deadline_s: the longest silence within it (queueing, pauses and the
    first token included). control_deadline_s: any other call. inside: folder of the letters to our function in the server.
    token: what the engine asks of its callers. draws: whether `info` has that function draw the tokens where it can.
    Must be created inside a running event loop.
    """

    def __init__(
        self,
        base_url: str,
        *,
        request_deadline_s: float,
        token_deadline_s: float,
        control_deadline_s: float,
        inside: Path | None = None,
        token: str = "",
        draws: bool = False,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._request_deadline_s = request_deadline_s
        self._token_deadline_s = token_deadline_s
        self._calls = Calls(self.base_url, deadline_s=control_deadline_s, token=token)
        self._lines = Lines(self.base_url, "/generate", connect_s=control_deadline_s, token=token)
        self._busy: set[Line] = set()
        self._numbers = itertools.count()
        self._nonce = uuid.uuid4().hex[:8]
        self._flying: dict[str, set[str]] = {}
        self._boundaries = Boundaries()
        self._runs_our_loader = False  # as `info` said
        self._sessions = Sessions(self._calls)
        self._inside = Inside(inside, self._sessions.letter)
        self._draws = draws
        self._no_checksums = ""  # why not, by the record of its release
        self.counts_when_receiving = False  # whether `receive` can be asked to count, as `info` told
        self._quiet = asyncio.Event()  # nothing is flying
        self._quiet.set()
        self._closed = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks until the sample ends. Closing the iterator early ends the request on the engine."""
        rid = request.rid
        if self._closed:
            raise EngineUnavailable(f"{self.base_url} was given up before request {rid} was sent.")
        # The engine knows the request by another name: unique among all clients and attempts, and no name is a prefix of
        # another, because SGLang aborts by prefix.
        name = f"{self._nonce}-{next(self._numbers):08d}-{rid}"
        names = self._flying.setdefault(rid, set())
        names.add(name)
        self._quiet.clear()
        line: Line | None = None
        whole, seen = False, 0
        try:
            line = await self._lines.take()
            self._busy.add(line)
            if self._closed:
                line.give_up(GivenUp())
            line.send(
                self._lines.head("X-SMG-Routing-Key", request.routing_key or ""),
                body_of(request, name),
                request_s=self._request_deadline_s,
                token_s=self._token_deadline_s,
            )
            while events := await line.events():
                for payload in events:
                    chunk = self._chunk(payload, request, seen)
                    fresh = len(chunk.token_ids)
                    whole = chunk.finish is not None
                    for part in self._boundaries.parted(name, chunk, seen):
                        yield part
                    if whole:
                        return
                    if fresh:  # bytes alone are no progress
                        seen += fresh
                        line.progress()
            if line.status != 200:
                self._calls.raise_status(line.status, line.text, f"request {rid}")
            raise EngineUnavailable(
                f"{self.base_url} ended the stream of request {rid} after {seen} tokens without a finish reason; the engine "
                "or a proxy died. Tokens so far are valid."
            )
        except (StreamBroken, StreamLate, GivenUp, OSError) as error:
            self._raise_broken(error, rid, seen)
        finally:
            if line is not None:
                self._busy.discard(line)
                if whole:
                    line.release(self._lines)
                else:  # the engine aborts a request whose connection closes
                    line.close()
            names.discard(name)
            self._boundaries.forget(name)
            if not names:
                self._flying.pop(rid, None)
            if not self._flying:
                self._quiet.set()

    def _raise_broken(self, error: Exception, rid: str, seen: int) -> NoReturn:
        if isinstance(error, GivenUp):
            raise EngineUnavailable(
                f"{self.base_url} was given up while request {rid} had {seen} tokens; they are valid."
            ) from None
        if isinstance(error, StreamLate):
            limit_s = self._request_deadline_s if error.what == "request" else self._token_deadline_s
            raise EngineUnavailable(
                f"{self.base_url} gave request {rid} {seen} tokens, then its {error.what} deadline of {limit_s:g} s passed; "
                "the engine is stuck, paused or overloaded."
            ) from None
        raise EngineUnavailable(f"{self.base_url} broke off request {rid} after {seen} tokens: {said(error)}.") from None

    def _chunk(self, payload: bytes, request: GenerateRequest, seen: int) -> Chunk:
        """One event's new tokens. Refused (AnswerRefused): more tokens than asked, ids outside the vocabulary, log-probs that are
        none; AnswerBroken for what cannot be read."""
        rid = request.rid
        try:
            event = decode_event(payload)
        except UNREADABLE as error:
            if payload.strip() == DONE:
                raise EngineUnavailable(
                    f"{self.base_url} ended request {rid} after {seen} tokens without a finish reason."
                ) from None
            raise AnswerBroken(f"{self.base_url} sent an event of request {rid} that is not understood: {error}.") from None
        if event.error is not None:
            raise RequestRefused(f"{self.base_url} refused request {rid}: {event.error.message}")
        meta = event.meta_info
        reason, made, version = meta.finish_reason, meta.completion_tokens, meta.weight_version or ""
        finish: Finish | None = None
        if reason is not None:
            if reason.type == "abort" and reason.status_code is not None:
                self._calls.raise_status(reason.status_code, reason.message or "", f"request {rid}")
            finish = _FINISH.get(reason.type)
            if finish is None:
                raise AnswerBroken(f"{self.base_url} ended request {rid} with unknown finish reason {reason.type!r}.")
        if request.images and meta.prompt_tokens not in (None, len(request.input_ids)):
            raise AnswerRefused(
                f"{self.base_url} read {meta.prompt_tokens} tokens where request {rid} has {len(request.input_ids)}: it lays its "
                "pictures out otherwise. Give the engine the model's own preprocessor_config.json"
            )
        experts = read_routed(meta.routed_experts, request.routed) if request.routed and meta.routed_experts else None
        fresh = made - seen
        if fresh <= 0:
            return Chunk([], [], version, finish, experts)
        pairs = meta.output_token_logprobs
        if len(pairs) != fresh:
            pairs = pairs[-fresh:]
        if len(pairs) < fresh:
            raise AnswerBroken(
                f"{self.base_url} lost {fresh - len(pairs)} tokens of request {rid} after token {seen}; they are made again."
            )
        if made > request.max_new_tokens:
            raise AnswerRefused(f"{self.base_url} made {made} tokens for request {rid}, which asked for {request.max_new_tokens}")
        ids, logprobs = [pair.token_id for pair in pairs], [pair.logprob for pair in pairs]
        try:
            packed, floats = struct.pack(f"{fresh}i", *ids), struct.pack(f"{fresh}f", *logprobs)
            fits = ints_fit(packed, request.vocabulary) and floats_fit(floats)
        except (struct.error, OverflowError):  # more than 32 bits, or none at all
            fits = False
        if not fits:
            fault = tokens_fault(ids, request.vocabulary) or logprobs_fault(logprobs)
            raise AnswerRefused(f"{self.base_url} gave request {rid} what is no answer: {fault}")
        return Chunk(array("i", packed), array("f", floats), version, finish, experts)

    def flying(self, rid: str) -> tuple[str, ...]:
        """Names under which requests of this id are on engines now."""
        return tuple(self._flying.get(rid, ()))

    async def abort(self, rid: str) -> None:
        for name in self.flying(rid):
            await self.abort_name(name)

    async def abort_name(self, name: str) -> None:
        """End the request of this name if this engine has it."""
        await self._calls.post("/abort_request", {"rid": name})

    async def abort_all(self) -> None:
        await self._calls.post("/abort_request", {"abort_all": True})

    async def end_running(self, patience_s: float) -> None:
        if self._flying:
            await self.abort_all()
            await within(patience_s, self._quiet)

    async def pause(self, mode: PauseMode) -> None:
        await self._calls.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._calls.post("/continue_generation", {})

    async def pause_counted(self, version: str) -> int | None:
        """Pause in place and count the tokens of each request: those were made by `version` or before it, whatever the chunk says
        that brings them. How many requests there are; None, and nothing is paused, where the engine cannot tell."""
        if not self._inside.able:
            return None
        await self.pause("in_place")
        counts = await self._inside.counts()
        if counts is None:
            await self.resume()
            return None
        self._boundaries.counted(counts, self._all_flying(), version)
        return len(counts)

    def _all_flying(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self._flying.values())

    def count_as_older(self, version: str) -> bool:
        """Of an engine paused in place that cannot count: tokens of requests under way, in chunks that may hold some of `version`
        and some of the next, count as made by `version`: staleness is over-, never understated. False where that cannot be
        told, and their requests must end."""
        self._boundaries.count_as_older(self._all_flying(), version)
        return True

    async def flush(self) -> bool:
        return await self._flushed("/flush_cache")

    async def _flushed(self, path: str) -> bool:
        status, text = await self._calls.call("POST", path, {})
        if status not in (200, 400):
            self._calls.raise_status(status, text, "/flush_cache")
        return status == 200

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Give memory back for another user: tags weights, kv_cache, cuda_graph; none means all. Only while paused, with all
        requests aborted: RequestRefused, with nothing given back, while any is at work. What weights hold afterwards is the
        engine's choice (SGLang keeps them with --enable-weights-cpu-backup only)."""
        # SGLang's scheduler ends when it is asked while a request runs or waits, paused or not; a flush asks the same
        # question and is merely declined. Paused requests of other modes than abort would wait in its queue.
        if not await self._flushed(f"/flush_cache?timeout={IDLE_S:g}"):
            raise RequestRefused(
                f"{self.base_url} has requests at work and keeps its memory; pause it in abort mode before the release."
            )
        await self._calls.post("/release_memory_occupation", {"tags": list(tags) or None})

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        await self._calls.post("/resume_memory_occupation", {"tags": list(tags) or None})

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        """Load safetensors from a directory the engine can read. Refused (RequestRefused) without any change if they do
        not fit; call it between `pause` and `resume`."""
        # flush_cache would fail an assertion in SGLang's scheduler while requests wait; `flush` asks and can be
        # declined.
        await self._sessions.clear()
        body = {"model_path": path, "weight_version": version, "load_format": "auto", "flush_cache": False}
        await self._calls.post("/update_weights_from_disk", body)

    async def update_weights_from_tensor(self, handles: Sequence[str], version: str | None, quick: Sequence[str] = ()) -> None:
        """Load one flat bucket that the trainer exported, one handle per tensor-parallel rank; paused engines only. `quick`:
        handles for an engine that said in `info` that it runs our loader."""
        is_quick = bool(quick) and self._runs_our_loader
        body = {
            "serialized_named_tensors": quick if is_quick else handles,
            "load_format": LOADER if is_quick else FLAT,
            "flush_cache": False,
        }
        await self._sessions.push("/update_weights_from_tensor", body, version)

    async def init_weights_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        """Join a broadcast group; waits for all its members."""
        body = {
            "master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size,
            "group_name": group, "backend": backend,
        }  # fmt: skip
        await self._calls.post("/init_weights_update_group", body)

    async def update_weights_from_distributed(self, tensors: Sequence[TensorMeta], group: str, version: str | None) -> None:
        """Receive one flat bucket from rank 0 of a group and load it; paused engines only."""
        body = {
            "names": [t.name for t in tensors],
            "dtypes": [t.dtype for t in tensors],
            "shapes": [t.shape for t in tensors],
            "group_name": group,
            "load_format": FLAT,
            "flush_cache": False,
        }
        await self._sessions.push("/update_weights_from_distributed", body, version)

    async def receive(self, buckets: Sequence[Bucket], group: str, version: str, before: str | None = None) -> bool:
        """The same for all buckets of a version, in the engine's own process; False, and nothing was received, where that
        cannot be done. `before`: the version that made the tokens so far, of an engine paused in place whose requests stay;
        counts them as `pause_counted` does, in the same call."""
        answer = await self._inside.receive(buckets, group, counts=before is not None)
        if answer is None:
            return False
        if before is not None:
            self._boundaries.counted(answer.counts, self._all_flying(), before)
        if answer.failed:
            raise RequestRefused(f"{self.base_url} did not receive version {version}: {answer.failed}")
        await self.set_version(version)
        return True

    async def destroy_weights_update_group(self, group: str) -> None:
        """Leave a group; one that is gone is not an error."""
        with suppress(RequestRefused):
            await self._calls.post("/destroy_weights_update_group", {"group_name": group})

    async def weights_checksum(self) -> Mapping[str, Any]:
        """The engine's own checksum of each of its tensors, by its names; equal weights give equal ones."""
        if self._no_checksums:
            raise RequestRefused(self._no_checksums)
        if (found := await self._inside.checksums()) is not None:
            return found
        ranks = (await self._calls.json("POST", "/weights_checker", {"action": "checksum"})).get("ranks") or []
        return {f"{i}/{name}": value for i, rank in enumerate(ranks) for name, value in rank["checksums"].items()}

    async def set_version(self, version: str) -> None:
        """Name the weights now served; running requests go on."""
        await self._sessions.label(version)

    async def health(self) -> EngineHealth:
        """Never waits for a sample to end. A paused SGLang answers it too (its /health, from 0.5.21 on, does not)."""
        model = await self._calls.json("GET", "/model_info")
        return EngineHealth(weight_version=str(model["weight_version"]), model_path=str(model["model_path"]))

    async def load(self) -> EngineLoad:
        """How full it is. Cheap: may be asked every second."""
        status, text = await self._calls.call("GET", "/v1/loads?include=core")
        return load_of(text) if status == 200 else EngineLoad()  # an SGLang that does not have it

    async def look(self, *, own: bool, model_path: str, routed: bool) -> Attached:
        """As `health` and `info` say."""
        health, info = await self.health(), await self.info()
        found = describe(info) if own else check_served(self.base_url, info, health.model_path, model_path)
        found, self._no_checksums = as_qualified(found, info)
        check_routed(self.base_url, info, wanted=routed)
        return found

    async def info(self) -> Mapping[str, Any]:
        """The engine's own description of itself (server arguments, state); keys differ between engines."""
        info = await self._calls.json("GET", "/server_info")
        self._runs_our_loader = LOADER in (info.get("custom_weight_loader") or ())
        self._inside.hear(info)
        self.counts_when_receiving = self._inside.able
        if self._draws:
            await self._inside.draw()
        return info

    async def close(self) -> None:
        """What is under way ends at once, as EngineUnavailable."""
        self._closed = True
        for line in self._busy:
            line.give_up(GivenUp())
        self._lines.close()
        await self._calls.close()
