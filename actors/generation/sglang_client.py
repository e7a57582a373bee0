"""Engine over SGLang's HTTP interface: the only client, for real SGLang (0.5.12 and like), its router, and the embedded
engine.

Owns one connection pool and the names of its requests in flight. Always true: tokens of a request are handed out once,
in order, whether the server streams cumulative or incremental chunks (each is placed by its `completion_tokens`).
"""

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import aiohttp
import msgspec

from actors.generation.engine import (
    Chunk,
    EngineHealth,
    EngineLoad,
    EngineUnavailable,
    Finish,
    GenerateRequest,
    PauseMode,
    RequestRefused,
)
from actors.generation.inside_client import Inside
from actors.generation.sglang_args import LOADER
from actors.generation.sglang_wire import body_of, decode_event, load_of, message_in, split
from actors.generation.sse import SseParser
from bus.messages.weights import Bucket, TensorMeta

T = TypeVar("T")

_ERROR_CHARS = 300
FLAT = "flattened_bucket"
IDLE_S = 5.0  # an engine's time to end what was aborted
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangClient:
    """One engine (or router) at `base_url`.

    request_deadline_s: a whole `generate`. token_deadline_s: the longest silence within it (queueing, pauses and the
    first token included). control_deadline_s: any other call. inside: folder of the letters to our function in the server.
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
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._request_deadline_s = request_deadline_s
        self._token_deadline_s = token_deadline_s
        self._control_deadline_s = control_deadline_s
        # Concurrency is the caller's decision: a pool limit would queue requests unseen, outside of every deadline. SGLang
        # closes connections idle for 5 s: a request sent on one just then would look like the engine's end.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=control_deadline_s),
            read_bufsize=1 << 20,
        )
        self._numbers = itertools.count()
        self._nonce = uuid.uuid4().hex[:8]
        self._flying: dict[str, set[str]] = {}
        self._marks: dict[str, list[tuple[int, str]]] = {}  # request -> (tokens, version that made them or older), rising
        self._runs_our_loader = False  # as `info` said
        self._inside = Inside(inside, self._post)
        self.counts_when_receiving = False
        self._quiet = asyncio.Event()  # nothing is flying
        self._quiet.set()
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        # The engine knows the request by another name: unique among all clients and attempts, and no name is a prefix of
        # another, because SGLang aborts by prefix.
        name = f"{self._nonce}-{next(self._numbers):08d}-{request.rid}"
        names = self._flying.setdefault(request.rid, set())
        names.add(name)
        self._quiet.clear()
        try:
            async with aclosing(self._stream(request, name)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            names.discard(name)
            self._marks.pop(name, None)
            if not names:
                self._flying.pop(request.rid, None)
            if not self._flying:
                self._quiet.set()

    async def _stream(self, request: GenerateRequest, name: str) -> AsyncGenerator[Chunk, None]:
        if self._closed:
            raise EngineUnavailable(f"{self.base_url} was given up before request {request.rid} was sent.")
        end_s = asyncio.get_running_loop().time() + self._request_deadline_s
        headers = {"Content-Type": "application/json"}
        if request.routing_key is not None:
            headers["X-SMG-Routing-Key"] = request.routing_key
        call = self._http.post(f"{self.base_url}/generate", data=body_of(request, name), headers=headers)
        response = await self._within(call.__aenter__(), end_s, request.rid, 0)
        try:
            if response.status != 200:
                await self._raise_for(response, f"request {request.rid}")
            parser, seen = SseParser(), 0
            while True:
                data = await self._within(response.content.readany(), end_s, request.rid, seen)
                if not data:
                    raise EngineUnavailable(
                        f"{self.base_url} ended the stream of request {request.rid} after {seen} tokens without a finish reason; "
                        "the engine or a proxy died. Tokens so far are valid."
                    )
                for payload in parser.feed(data):
                    chunk = self._chunk(payload, request.rid, seen)
                    parts = split(chunk, seen, self._marks.get(name, ()))
                    seen += len(chunk.token_ids)
                    if chunk.finish is not None:
                        with suppress(EngineUnavailable):  # the sample is whole; the tail only frees the connection
                            await self._within(response.content.read(), end_s, request.rid, seen)
                    for part in parts:
                        yield part
                    if chunk.finish is not None:
                        return
        finally:
            # A response that was not read to its end closes its connection, and the engine aborts the request.
            response.release()

    def _chunk(self, payload: bytes, rid: str, seen: int) -> Chunk:
        try:
            event = decode_event(payload)
        except msgspec.DecodeError as error:
            raise EngineUnavailable(
                f"{self.base_url} sent an event of request {rid} that is not understood: {error}."
            ) from None
        if event.error is not None:
            raise RequestRefused(f"{self.base_url} refused request {rid}: {event.error.message}")
        meta, reason = event.meta_info, event.meta_info.finish_reason
        if reason is not None and reason.type == "abort" and reason.status_code is not None:
            self._raise_status(reason.status_code, reason.message or "", f"request {rid}")
        fresh = meta.completion_tokens - seen
        pairs = meta.output_token_logprobs[-fresh:] if fresh > 0 else []
        if len(pairs) < fresh:
            raise EngineUnavailable(
                f"{self.base_url} lost {fresh - len(pairs)} tokens of request {rid} after token {seen}; the sample must restart."
            )
        if reason is not None and reason.type not in _FINISH:
            raise EngineUnavailable(f"{self.base_url} ended request {rid} with unknown finish reason {reason.type!r}.")
        return Chunk(
            token_ids=[pair[1] for pair in pairs],
            logprobs=[pair[0] if pair[0] is not None else float("-inf") for pair in pairs],
            weight_version=meta.weight_version or "",
            finish=None if reason is None else _FINISH[reason.type],
        )

    def flying(self, rid: str) -> tuple[str, ...]:
        """Names under which requests of this id are on engines now."""
        return tuple(self._flying.get(rid, ()))

    async def abort(self, rid: str) -> None:
        for name in self.flying(rid):
            await self.abort_name(name)

    async def abort_name(self, name: str) -> None:
        """End the request of this name if this engine has it."""
        await self._post("/abort_request", {"rid": name})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def end_running(self, patience_s: float) -> None:
        if self._flying:
            await self.abort_all()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), patience_s)

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def pause_counted(self, version: str) -> int | None:
        if not self._inside.able:
            return None
        await self.pause("in_place")
        counts = await self._inside.counts()
        if counts is None:
            await self.resume()
            return None
        self._mark(counts, version)
        return len(counts)

    def _mark(self, counts: Mapping[str, int], version: str) -> None:
        for name in itertools.chain.from_iterable(self._flying.values()):
            if name in counts:
                self._marks.setdefault(name, []).append((counts[name], version))

    async def flush(self) -> bool:
        status, text = await self._call("POST", "/flush_cache", {})
        if status not in (200, 400):
            self._raise_status(status, text, "/flush_cache")
        return status == 200

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        # SGLang's scheduler ends when it is asked while a request runs or waits, paused or not; a flush asks the same
        # question and is merely declined. Paused requests of other modes than abort would wait in its queue.
        status, text = await self._call("POST", f"/flush_cache?timeout={IDLE_S:g}", {})
        if status not in (200, 400):
            self._raise_status(status, text, "/flush_cache")
        if status == 400:
            raise RequestRefused(
                f"{self.base_url} has requests at work and keeps its memory; pause it in abort mode before the release."
            )
        await self._post("/release_memory_occupation", {"tags": list(tags) or None})

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        await self._post("/resume_memory_occupation", {"tags": list(tags) or None})

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        # flush_cache would fail an assertion in SGLang's scheduler while requests wait; `flush` asks and can be
        # declined.
        body = {"model_path": path, "weight_version": version, "load_format": "auto", "flush_cache": False}
        await self._post("/update_weights_from_disk", body)

    async def update_weights_from_tensor(
        self, handles: Sequence[str], version: str | None, quick: Sequence[str] = ()
    ) -> None:
        is_quick = bool(quick) and self._runs_our_loader
        body = {
            "serialized_named_tensors": quick if is_quick else handles,
            "load_format": LOADER if is_quick else FLAT,
            "weight_version": version,
            "flush_cache": False,
        }
        await self._post("/update_weights_from_tensor", body)

    async def init_weights_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        body = {
            "master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size,
            "group_name": group, "backend": backend,
        }  # fmt: skip
        await self._post("/init_weights_update_group", body)

    async def update_weights_from_distributed(
        self, tensors: Sequence[TensorMeta], group: str, version: str | None
    ) -> None:
        body = {
            "names": [t.name for t in tensors],
            "dtypes": [t.dtype for t in tensors],
            "shapes": [t.shape for t in tensors],
            "group_name": group,
            "load_format": FLAT,
            "weight_version": version,
            "flush_cache": False,
        }
        await self._post("/update_weights_from_distributed", body)

    async def receive(self, buckets: Sequence[Bucket], group: str, version: str, before: str | None = None) -> bool:
        answer = await self._inside.receive(buckets, group, counts=before is not None)
        if answer is None:
            return False
        if before is not None:
            self._mark(answer.counts, before)
        if answer.failed:
            raise RequestRefused(f"{self.base_url} did not receive version {version}: {answer.failed}")
        await self.set_version(version)
        return True

    async def destroy_weights_update_group(self, group: str) -> None:
        with suppress(RequestRefused):  # it is gone already
            await self._post("/destroy_weights_update_group", {"group_name": group})

    async def weights_checksum(self) -> Mapping[str, Any]:
        if (found := await self._inside.checksums()) is not None:
            return found
        text = await self._ok("POST", "/weights_checker", {"action": "checksum"})
        ranks = msgspec.json.decode(text, type=dict[str, Any]).get("ranks") or []
        return {f"{i}/{name}": value for i, rank in enumerate(ranks) for name, value in rank["checksums"].items()}

    async def set_version(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def health(self) -> EngineHealth:
        await self._ok("GET", "/health")
        model = await self._get("/model_info")
        return EngineHealth(weight_version=str(model["weight_version"]), model_path=str(model["model_path"]))

    async def load(self) -> EngineLoad:
        status, text = await self._call("GET", "/v1/loads?include=core")
        return load_of(text) if status == 200 else EngineLoad()  # an SGLang that does not have it

    async def info(self) -> Mapping[str, Any]:
        info = await self._get("/server_info")
        self._runs_our_loader = LOADER in (info.get("custom_weight_loader") or ())
        self._inside.hear(info)
        self.counts_when_receiving = self._inside.able
        return info

    async def close(self) -> None:
        """What is under way ends at once, as EngineUnavailable: aiohttp would leave those that wait for an answer waiting."""
        self._closed = True
        for wait in [w for w in self._waits if not w.expired()]:
            wait.reschedule(asyncio.get_running_loop().time())
        await self._http.close()

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        await self._ok("POST", path, body)

    async def _ok(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        status, text = await self._call(method, path, body)
        if status != 200:
            self._raise_status(status, text, path)
        return text

    async def _get(self, path: str) -> dict[str, Any]:
        text = await self._ok("GET", path)
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise EngineUnavailable(
                f"{self.base_url}{path} did not answer a JSON object ({error}); is this an engine?"
            ) from None

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self._closed:
            raise EngineUnavailable(f"{self.base_url}{path} was not asked: this engine was given up.")
        try:
            async with self._limit(self._control_deadline_s):
                async with self._http.request(method, self.base_url + path, data=data, headers=headers) as response:
                    return response.status, await response.text()
        except (aiohttp.ClientError, OSError) as error:
            late = f"did not answer within {self._control_deadline_s:g} s; the engine is stuck or overloaded."
            why = late if _timed_out(error) else f"cannot be reached: {_say(error)}."
            raise EngineUnavailable(f"{self.base_url}{path} {'was given up.' if self._closed else why}") from None

    @asynccontextmanager
    async def _limit(self, seconds: float) -> AsyncIterator[None]:
        """TimeoutError after `seconds`, or once the engine is given up."""
        async with asyncio.timeout(seconds) as limit:
            self._waits.add(limit)
            try:
                yield
            finally:
                self._waits.discard(limit)

    async def _within(self, wait: Awaitable[T], end_s: float, rid: str, seen: int) -> T:
        """One wait of a stream, under both deadlines."""
        left_s = end_s - asyncio.get_running_loop().time()
        try:
            async with self._limit(min(left_s, self._token_deadline_s)):
                return await wait
        except (aiohttp.ClientError, OSError) as error:
            if not _timed_out(error):
                raise EngineUnavailable(
                    f"{self.base_url} broke off request {rid} after {seen} tokens: {_say(error)}."
                ) from None
            if self._closed:
                raise EngineUnavailable(
                    f"{self.base_url} was given up while request {rid} had {seen} tokens; they are valid."
                ) from None
            whole = left_s <= self._token_deadline_s
            name, limit_s = ("request", self._request_deadline_s) if whole else ("token", self._token_deadline_s)
            raise EngineUnavailable(
                f"{self.base_url} gave request {rid} {seen} tokens, then its {name} deadline of {limit_s:g} s passed; "
                "the engine is stuck, paused or overloaded."
            ) from None

    async def _raise_for(self, response: aiohttp.ClientResponse, what: str) -> NoReturn:
        end_s = asyncio.get_running_loop().time() + self._control_deadline_s
        text = await self._within(response.text(), end_s, what, 0)
        self._raise_status(response.status, text, what)

    def _raise_status(self, status: int, text: str, what: str) -> NoReturn:
        message = " ".join(message_in(text).split())[:_ERROR_CHARS]
        if status in (400, 404, 413, 422):
            raise RequestRefused(f"{self.base_url} refused {what} (HTTP {status}): {message}")
        raise EngineUnavailable(f"{self.base_url} failed {what} (HTTP {status}): {message}")


def _timed_out(error: BaseException) -> bool:
    """By our own limit, not by one of aiohttp's."""
    return isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError)


def _say(error: BaseException) -> str:
    return f"{type(error).__name__} {error}".strip()
