"""Engines and the router answer only to who shows the run's token; it is on no command line."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from actors.generation.engine import EngineUnavailable, GenerateRequest
from actors.generation.engines.embedded.process import EngineProcess
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.routed import RoutedEngine
from actors.generation.spec import GenerationSpec
from actors.router.actor import RouterSpec, answers, run
from actors.runtime.child import Child, free_port
from bus.private import write_secret
from tests.actors.house import open_bus, running
from tests.engine.conftest import engine_process, serving
from tests.engine.processes import BOOT_DEADLINE_S, until_async
from tests.second_user import as_nobody, needs_root

TOKEN = "token-of-this-run"
DEADLINES = {"request_deadline_s": 60.0, "token_deadline_s": 20.0, "control_deadline_s": 20.0}
ASK = {"input_ids": [7], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
VERBS = {
    "/generate": ASK,
    "/abort_request": {"rid": "x"},
    "/pause_generation": {},
    "/continue_generation": {},
    "/update_weight_version": {"new_version": "1"},
    "/update_weights_from_disk": {"model_path": "x"},
    "/update_weights_from_tensor": {},
    "/update_weights_from_distributed": {},
    "/init_weights_update_group": {},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/flush_cache": {},
}


@pytest.fixture(scope="module")
def engine(models: Callable[[str], tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    key = write_secret(tmp_path_factory.mktemp("key") / "api-key", f"{TOKEN}\n")
    with engine_process(models("qwen3")[0], "--api-key-file", str(key)) as (url, _):
        yield url


def status(url: str, body: object = None, token: str = "") -> int:
    """Of a call with nothing but the standard library, as any program of any user could make it."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


async def generated(client: SGLangClient) -> int:
    ask = GenerateRequest(rid="r", input_ids=[7, 12], max_new_tokens=4, ignore_eos=True, sampling_seed=1)
    return sum([len(chunk.token_ids) async for chunk in client.generate(ask)])


@pytest.mark.parametrize("path", VERBS)
def test_every_verb_of_an_engine_asks_for_the_token(engine: str, path: str) -> None:
    assert status(engine + path, VERBS[path]) == 401
    assert status(engine + path, VERBS[path], "another") == 401


def test_with_the_token_it_answers_and_its_life_is_no_secret(engine: str) -> None:
    assert status(f"{engine}/generate", ASK, TOKEN) == 200
    for path in ("/server_info", "/model_info", "/v1/loads"):
        assert (status(engine + path), status(engine + path, None, TOKEN)) == (401, 200)
    assert status(f"{engine}/health") == 200


@needs_root
def test_another_user_posts_no_weights_and_generates_nothing(engine: str) -> None:
    assert as_nobody(lambda: status(f"{engine}/update_weights_from_disk", {"model_path": "/tmp/zeros"})) == 401
    assert as_nobody(lambda: status(f"{engine}/generate", ASK)) == 401
    assert isinstance(as_nobody(lambda: Path("/proc/1/environ").read_bytes()), PermissionError)


async def test_our_client_shows_it_in_streams_and_in_calls(engine: str) -> None:
    knows, stranger = SGLangClient(engine, token=TOKEN, **DEADLINES), SGLangClient(engine, **DEADLINES)
    assert await generated(knows) == 4
    await knows.abort("nothing")
    with pytest.raises(EngineUnavailable, match="401"):
        await generated(stranger)
    await knows.close()
    await stranger.close()


@pytest.mark.parametrize("spare", [False, True], ids=["started", "spare"])
async def test_a_workers_engine_gets_it_by_a_file_of_its_own(
    spare: bool, models: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    child = Child()
    if spare:
        from actors.generation.engines.embedded.process import EMBEDDED

        await child.start_spare((*EMBEDDED, "--spare"))
    spec = GenerationSpec(model_path=str(models("qwen3")[0]), max_running=4, boot_deadline_s=BOOT_DEADLINE_S, token=TOKEN)
    process = EngineProcess(spec, tmp_path / "engine", child if spare else None)
    try:
        url = await process.start()
        assert (status(f"{url}/model_info"), status(f"{url}/model_info", None, TOKEN)) == (401, 200)
        assert TOKEN not in " ".join(serving(url).cmdline())
        assert (tmp_path / "engine" / "api-key").stat().st_mode & 0o777 == 0o600
    finally:
        await process.stop()


async def test_the_router_asks_for_it_and_passes_it_on(engine: str, redis_url: str, run_name: str, tmp_path: Path) -> None:
    pytest.importorskip("sglang_router")
    port = free_port(successors=1)
    spec = RouterSpec(port=port, prometheus_port=port + 1, args={"health-check-interval-secs": 1}, token=TOKEN)
    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "router", run, spec, run_dir=str(tmp_path)):
            await until_async(lambda: answers("127.0.0.1", port), "the router starts", BOOT_DEADLINE_S)
            url = f"http://127.0.0.1:{port}"
            routed = RoutedEngine(engine, url, token=TOKEN, **DEADLINES)
            await routed.join()

            async def taken_up() -> bool:
                await routed.renew()
                return routed.routed

            await until_async(taken_up, "the router takes up the engine")
            assert await generated(routed) == 4 and routed.routed
            assert status(f"{url}/generate", ASK) == 401
            assert status(f"{url}/generate", ASK, TOKEN) == 200
            lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
            assert any(lines) and not any(TOKEN in line for line in lines)
            await routed.close()
