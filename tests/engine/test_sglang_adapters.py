"""SGLang servers whose versions are adapters: against a server that answers as SGLang 0.5.23 does, by its source."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from actors.generation.engine import BootRefused, EngineUnavailable, GenerateRequest, RequestRefused
from actors.generation.engines.sglang.adapters import AdapterClient
from actors.generation.engines.sglang.args import sglang_flags
from actors.generation.pausing import pause
from actors.generation.spec import GenerationSpec
from actors.runtime.lora import AdapterShape
from bus.messages.versions import PolicyVersion
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from

pytestmark = pytest.mark.timeout(60)
SHAPE = AdapterShape(4, 8, ("q_proj", "v_proj"))
BEFORE = PolicyVersion(id=1, step=1)


class Server:
    """Loads adapters by name; a request names one that is loaded and makes a token whenever `step` is called."""

    def __init__(self) -> None:
        self.release, self.enable_lora = "0.5.23", True
        self.version = "default"
        self.adapters: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.running: dict[str, asyncio.Queue[str]] = {}
        self.refuses = ""

    def step(self, what: str = "token") -> None:
        for queue in self.running.values():
            queue.put_nowait(what)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if body.get("lora_path") not in self.adapters:
            return web.json_response({"error": {"message": "adapters are not loaded"}}, status=400)
        self.asked.append(body["lora_path"])
        queue = self.running[body["rid"]] = asyncio.Queue()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        made, what = 0, ""
        while what != "abort" and made < body["sampling_params"]["max_new_tokens"]:
            what = await queue.get()
            made += what == "token"
            ended = {"type": "abort"} if what == "abort" else {"type": "length"} if made == 3 else None
            meta = {"completion_tokens": made, "weight_version": self.version, "finish_reason": ended}
            meta["output_token_logprobs"] = [[-0.5, 5, None]] * (what == "token")
            await response.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
        del self.running[body["rid"]]
        await response.write_eof(b"data: [DONE]\n\n")
        return response

    async def load(self, http: web.Request) -> web.Response:
        body = await http.json()
        name = body["lora_name"]
        if self.refuses or name in self.adapters:
            return web.json_response({"success": False, "error_message": self.refuses or "already loaded"}, status=400)
        self.adapters[name] = body
        return web.json_response({"success": True})

    async def unload(self, http: web.Request) -> web.Response:
        del self.adapters[(await http.json())["lora_name"]]
        return web.json_response({"success": True})

    async def control(self, http: web.Request) -> web.Response:
        body = await http.json()
        if http.path == "/abort_request":
            self.step("abort")
        self.version = body.get("new_version", self.version)
        return web.json_response({"success": True})

    async def about(self, http: web.Request) -> web.Response:
        facts = {"version": self.release, "enable_lora": self.enable_lora, "stream_interval": 1, "skip_tokenizer_init": True}
        return web.json_response({"weight_version": self.version, "model_path": "m", **facts, "disable_overlap_schedule": True})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/load_lora_adapter", self.load)
        app.router.add_post("/load_lora_adapter_from_tensors", self.load)
        app.router.add_post("/unload_lora_adapter", self.unload)
        for path in ("pause_generation", "continue_generation", "abort_request", "update_weight_version"):
            app.router.add_post(f"/{path}", self.control)
        for path in ("health", "model_info", "server_info"):
            app.router.add_get(f"/{path}", self.about)
        return app


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, AdapterClient]]:
    server = Server()
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = AdapterClient(url, adapters=SHAPE, request_deadline_s=20, token_deadline_s=20, control_deadline_s=5)
    yield server, client
    await client.close()
    await runner.cleanup()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - the server's state has no event
            await asyncio.sleep(0.005)


async def answer(client: AdapterClient, rid: str = "r") -> list[tuple[str, int, str | None]]:
    request = GenerateRequest(rid=rid, input_ids=[1, 2], max_new_tokens=3)
    return [(c.weight_version, len(c.token_ids), c.finish) async for c in client.generate(request)]


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_an_answer_under_way_ends_with_its_version_and_goes_on_as_a_request_for_the_new_one(
    mode: str, server: tuple[Server, AdapterClient]
) -> None:
    its, client = server
    kind = await client.look(own=True, model_path="", routed=False)
    await client.update_weights_from_disk("/v/1", "1")
    first = asyncio.ensure_future(answer(client))
    await until(lambda: bool(its.running))
    its.step()
    await asyncio.sleep(0)
    assert await pause(client, kind, mode, BEFORE) == "sent again"
    await client.update_weights_from_disk("/v/2", "2")
    await client.resume()
    chunks = await first
    assert {version for version, _, _ in chunks} == {"1"} and chunks[-1][2] == "abort"
    second = asyncio.ensure_future(answer(client))
    for _ in range(3):
        await until(lambda: bool(its.running) or second.done())
        its.step()
    assert {version for version, _, _ in await second} == {"2"}
    assert its.asked[0] != its.asked[1] and [its.adapters[name]["lora_path"] for name in its.asked] == ["/v/1", "/v/2"]


async def test_tokens_count_as_made_by_the_adapter_that_was_named_whatever_the_server_states(
    server: tuple[Server, AdapterClient],
) -> None:
    its, client = server
    await client.update_weights_from_disk("/v/1", "1")
    old = asyncio.ensure_future(answer(client))
    await until(lambda: bool(its.running))
    await client.update_weights_from_disk("/v/2", "2")
    assert its.version == "2"
    for _ in range(3):
        its.step()
    assert [version for version, _, _ in await old] == ["1", "1", "1"]


async def test_an_adapter_is_let_go_of_when_no_request_names_it(server: tuple[Server, AdapterClient]) -> None:
    its, client = server

    def loaded() -> list[str]:
        return [body["lora_path"] for body in its.adapters.values()]

    await client.update_weights_from_disk("/v/1", "1")
    old = asyncio.ensure_future(answer(client))
    await until(lambda: bool(its.running))
    for version in range(2, 6):
        await client.update_weights_from_disk(f"/v/{version}", str(version))
    assert loaded() == ["/v/1", "/v/4", "/v/5"]
    for _ in range(3):
        its.step()
    await old
    await client.update_weights_from_disk("/v/6", "6")
    assert loaded() == ["/v/5", "/v/6"]
    await client.update_weights_from_disk("/v/6", "6")  # a version again
    assert loaded() == ["/v/6", "/v/6"]


async def test_the_trainers_bucket_is_passed_on_and_what_cannot_be_taken_is_refused(server: tuple[Server, AdapterClient]) -> None:
    its, client = server
    with pytest.raises(EngineUnavailable, match="before it had an adapter"):
        await answer(client)
    await client.update_weights_from_tensor(["handle"], "1", ["quick"])
    [body] = its.adapters.values()
    assert body["serialized_named_tensors"] == ["handle"] and body["load_format"] == "flattened_bucket"
    config = body["config_dict"]
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj", "v_proj"])
    with pytest.raises(RequestRefused, match="one bucket"):
        await client.update_weights_from_tensor(["handle"], None)
    with pytest.raises(RequestRefused, match="not over a group"):
        await client.init_weights_update_group(address="a", port=1, rank_offset=1, world_size=2, group="g", backend="nccl")
    with pytest.raises(RequestRefused, match="no checksums"):
        await client.weights_checksum()
    its.refuses = "rank 64 exceeds max_lora_rank"
    with pytest.raises(RequestRefused, match="max_lora_rank"):
        await client.update_weights_from_disk("/v/2", "2")
    its.refuses = ""
    first = asyncio.ensure_future(answer(client))
    await until(lambda: bool(its.running))
    for _ in range(3):
        its.step()
    assert {version for version, _, _ in await first} == {"1"}, "the version before is still there"


async def test_a_server_that_cannot_is_refused_at_its_boot(server: tuple[Server, AdapterClient]) -> None:
    its, client = server
    its.release = "0.5.21"
    with pytest.raises(BootRefused, match=r"0\.5\.21 may never unload.*0\.5\.23") as error:
        await client.look(own=True, model_path="", routed=False)
    assert "\n" not in str(error.value)
    its.release, its.enable_lora = "0.5.23", False
    with pytest.raises(BootRefused, match="without --enable-lora"):
        await client.look(own=True, model_path="", routed=False)


def test_the_servers_flags_say_what_comes() -> None:
    flags = sglang_flags(GenerationSpec(engine="sglang", adapters=SHAPE, server_args={"max-lora-rank": 64}))
    assert (flags["enable-lora"], flags["max-lora-rank"], flags["lora-target-modules"]) == (True, 4, ("q_proj", "v_proj"))
    assert "enable-lora" not in sglang_flags(GenerationSpec(engine="sglang"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"colocate": True}, "lose the base"),
        ({"update_weight_transport": "nccl"}, "from files or by ipc"),
        ({"use_router": True}, "may not have their adapter yet"),
        ({"engine": "external", "rollout_external_engine_addrs": ("h:1",)}, "are not given adapters alone"),
    ],
)
def test_what_would_lose_the_base_or_not_arrive_is_refused(fields: dict[str, Any], said: str) -> None:
    given = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math"}
    lora = {"lora_rank": 4, "target_modules": "all-linear", "lora_publish": "adapters", "engine": "sglang"}
    with pytest.raises(SettingsError, match=said) as error:
        settings_from(**(given | lora | {"update_weight_transport": "disk"} | fields))
    assert "\n" not in str(error.value)
