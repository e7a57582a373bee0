"""An engine of a user's own, whole: its record (KIND), its client and its server, which speaks neither SGLang's interface nor ours.

    miles-async train --engine tests.engine.own_engine:KIND ...

The server has the form of vLLM's: `/v1/completions` streams prompt and answer as token ids, `/sleep` and `/wake_up` stop and go on,
`/collective_rpc` reloads weights. It answers greedily or by seed, one request after the other, with a Hugging Face model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from actors.generation.engine import (
    Attached,
    BootRefused,
    Chunk,
    Engine,
    EngineUnavailable,
    Finish,
    GenerateRequest,
    Opened,
    PauseMode,
    RequestRefused,
)
from actors.generation.engines.kind import EngineKind
from actors.runtime.child import Child, free_port, last_line

if TYPE_CHECKING:
    from actors.generation.spec import GenerationSpec
    from actors.runtime.context import Context

MODULE = "tests.engine.own_engine"
BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


class OwnClient(Engine):
    """One server at `url`. What it cannot do besides is said by `Engine`."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self._http = aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None, sock_connect=deadline_s))
        self._deadline_s = deadline_s

    async def _post(self, path: str, /, **body: Any) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._deadline_s), self._http.post(path, json=body) as answer:
                said = await answer.json()
        except (*BROKEN, RuntimeError) as error:  # a closed session
            raise EngineUnavailable(f"{path}: {type(error).__name__} {error}") from error
        if answer.status != 200:
            raise RequestRefused(said["error"])
        return cast("dict[str, Any]", said)

    async def look(self, *, own: bool, model_path: str, routed: bool) -> Attached:
        served = (await self._post("/v1/models"))["model"]
        if served != model_path or routed:
            raise BootRefused(f"it serves {served} and tells no experts")
        return Attached(exact=True, tp_size=1)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if request.top_p < 1 or request.images or request.routed:
            raise RequestRefused("this server samples without top-p, and takes neither pictures nor questions about experts")
        body = {
            "request_id": request.rid, "prompt_token_ids": request.input_ids, "max_tokens": request.max_new_tokens,
            "temperature": request.temperature, "stop_token_ids": request.stop_token_ids, "seed": request.sampling_seed,
            "top_k": request.top_k,
        }  # fmt: skip
        try:
            async with self._http.post("/v1/completions", json=body) as answer:
                async for line in answer.content:
                    event = json.loads(line)
                    finish = cast("Finish | None", event["finish_reason"])
                    yield Chunk(event["token_ids"], event["logprobs"], event["version"], finish)
                    if finish is not None:
                        return
        except (*BROKEN, RuntimeError) as error:
            raise EngineUnavailable(f"request {request.rid} broke off: {type(error).__name__} {error}") from error
        raise EngineUnavailable(f"request {request.rid} ended without a reason")

    async def abort(self, rid: str) -> None:
        await self._post("/abort", request_id=rid)

    async def abort_all(self) -> None:
        await self._post("/abort")

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/sleep", ends=mode == "abort")

    async def resume(self) -> None:
        await self._post("/wake_up")

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        await self._post("/collective_rpc", method="reload_weights", path=path, version=version)

    async def set_version(self, version: str) -> None:
        await self._post("/collective_rpc", method="set_version", version=version)

    async def close(self) -> None:
        await self._http.close()


class OwnServer:
    """The server as a child of its worker."""

    def __init__(self, spec: GenerationSpec, folder: Path) -> None:
        self._spec, self._folder, self._child = spec, folder, Child()
        self.note, self.inside = "", None

    @property
    def alive(self) -> bool:
        return self._child.alive

    async def start(self) -> str:
        await self.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        port, log = free_port(), self._folder / "own.log"
        await self._child.start([sys.executable, "-m", MODULE, self._spec.model_path, str(port)], log)
        url, end = f"http://127.0.0.1:{port}", asyncio.get_running_loop().time() + self._spec.boot_deadline_s
        while asyncio.get_running_loop().time() < end:
            try:
                async with aiohttp.ClientSession(url) as http, http.post("/v1/models", json={}):
                    return url
            except OSError:
                if not self.alive:
                    break
                await asyncio.sleep(0.05)
        raise EngineUnavailable(f"the server did not start: {last_line(log)}")

    async def stop(self) -> None:
        await self._child.stop()


class Own(EngineKind, frozen=True, kw_only=True):
    """All that a run needs to know."""

    def open(self, context: Context, spec: GenerationSpec, folder: Path, spare: Child | None = None) -> Opened:
        return Opened(lambda url, inside: OwnClient(url, spec.control_deadline_s), OwnServer(spec, folder))


KIND = Own(name="own", told="a server of the tests", reads_ids=True, exact=True, pauses=("retract", "abort"))


def main() -> None:
    """The server: python -m tests.engine.own_engine MODEL PORT."""
    import torch
    from aiohttp import web
    from safetensors.torch import load_file

    from tests.engine.models import load_model

    torch.set_num_threads(1)
    path, port = sys.argv[1:]
    model, version, goes = load_model(Path(path)), "default", asyncio.Event()
    news = asyncio.Event()  # of pauses and ends
    goes.set()
    ended: set[str] = set()
    running: set[str] = set()

    @torch.no_grad()
    def next_token(ids: list[int], temperature: float, seed: int | None, top_k: int) -> tuple[int, float]:
        scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float() / (temperature or 1.0), -1)
        draw = torch.Generator().manual_seed((seed or 0) % 2**31 + len(ids))
        best = scores.topk(min(top_k, len(scores))) if top_k > 0 else scores.sort(descending=True)
        token = int(best.indices[torch.multinomial(best.values.exp(), 1, generator=draw) if temperature else 0])
        return token, float(scores[token])

    async def complete(request: web.Request) -> web.StreamResponse:
        body, answer = await request.json(), web.StreamResponse()
        rid, ids = body["request_id"], list(body["prompt_token_ids"])
        running.add(rid)
        await answer.prepare(request)
        try:
            for left in range(body["max_tokens"] - 1, -1, -1):
                while not goes.is_set() and rid not in ended:
                    news.clear()
                    await news.wait()
                if rid in ended:
                    await say(answer, [], [], "abort")
                    break
                token, logprob = next_token(ids, body["temperature"], body["seed"], body["top_k"])
                ids.append(token)
                reason = "stop" if token in body["stop_token_ids"] else None if left else "length"
                await say(answer, [token], [logprob], reason)
                if reason:
                    break
                await asyncio.sleep(0)
        finally:
            running.discard(rid)
            ended.discard(rid)
        return answer

    async def say(answer: web.StreamResponse, ids: list[int], logprobs: list[float], reason: str | None) -> None:
        event = {"token_ids": ids, "logprobs": logprobs, "version": version, "finish_reason": reason}
        await answer.write(json.dumps(event).encode() + b"\n")

    async def end(request: web.Request) -> web.Response:
        rid = (await request.json()).get("request_id")
        ended.update(running if rid is None else {rid} & running)
        news.set()
        return web.json_response({})

    async def sleep(request: web.Request) -> web.Response:
        goes.clear()
        if (await request.json())["ends"]:
            ended.update(running)
        news.set()
        return web.json_response({})

    async def wake(request: web.Request) -> web.Response:
        goes.set()
        news.set()
        return web.json_response({})

    async def rpc(request: web.Request) -> web.Response:
        nonlocal version
        body = await request.json()
        if body["method"] == "reload_weights":
            have = model.state_dict()
            try:
                new = load_file(Path(body["path"]) / "model.safetensors")
            except OSError as error:
                return web.json_response({"error": f"no weights there: {error}"}, status=400)
            if any(name not in have or have[name].shape != tensor.shape for name, tensor in new.items()):
                return web.json_response({"error": "other names or shapes"}, status=400)
            model.load_state_dict(new, strict=False)
        version = body["version"]
        return web.json_response({})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"model": path})

    app = web.Application()
    routes = {
        "/v1/completions": complete, "/abort": end, "/sleep": sleep, "/wake_up": wake, "/collective_rpc": rpc, "/v1/models": models,
    }  # fmt: skip
    app.add_routes([web.post(where, handler) for where, handler in routes.items()])
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
