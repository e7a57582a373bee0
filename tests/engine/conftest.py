"""Engines under test: the embedded one as a real process on tiny random models, or any running server.

Set MILES_ASYNC_TEST_ENGINE_URL and MILES_ASYNC_TEST_ENGINE_MODEL (directory the server can read, of the model it serves) to
run the conformance suite against a real SGLang server instead; .._OTHER names a model of the same shape with other weights,
.._INSIDE the folder of letters to our function inside it (actors/generation/engines/sglang/inside.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import psutil
import pytest
import torch

from actors.generation.engines.sglang.client import SGLangClient
from tests.engine.models import FAMILIES, Oracle, make_model
from tests.engine.processes import BOOT_DEADLINE_S, until
from tests.warm.launched import warmed

CONTROL_DEADLINE_S = 30.0
ANSWER_S = 100.0  # of thousands of tokens, one by one, on a host that computes much else


@pytest.fixture(scope="module", autouse=True)
def engines_are_warm(warm: Path | None) -> Iterator[None]:
    """Those that these tests start, and their workers, have torch loaded."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in warmed(warm, os.environ).items() if warm is not None else ():
            patch.setenv(name, value)
        yield


@dataclass(frozen=True)
class Target:
    """A server under test and the models that fit it: `model_dir` as booted, `other_dir` the same shape, other weights."""

    url: str
    family: str
    model_dir: Path
    other_dir: Path
    oracle: Oracle
    other: Oracle
    embedded: bool
    logprob_tolerance: float
    inside: Path | None = None


@contextmanager
def engine_process(model_dir: Path, *flags: str, warm: Path | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running embedded engine: its URL and process. Ended (and reaped) on exit. `warm`: see tests/warm."""
    with TemporaryDirectory(prefix="ma-engine-") as folder:
        port_file = Path(folder) / "port"
        argv = [sys.executable, "-m", "actors.generation.engines.embedded", "--model-path", str(model_dir)]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*argv, "--port-file", str(port_file), *flags],
                stdout=log,
                stderr=log,
                text=True,
                env=warmed(warm, os.environ) if warm is not None else None,
            )
            try:

                def up() -> bool:
                    if process.poll() is not None:
                        log.seek(0)
                        raise RuntimeError(f"engine exited with {process.returncode}: {log.read()}")
                    return port_file.exists()

                until(up, "embedded engine starts", BOOT_DEADLINE_S)
                yield f"http://127.0.0.1:{port_file.read_text().strip()}", process
            finally:
                if process.poll() is not None:  # a test that fails because of it shows why
                    log.seek(0)
                    print(f"engine had ended with {process.returncode}: {log.read()[-3000:]}")
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)


def serving(url: str) -> psutil.Process:
    """The process that listens there: a warm engine is another one's child than the process that was started."""
    port = int(url.rpartition(":")[2])
    [pid] = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
    return psutil.Process(pid)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """family -> two directories of one shape with different weights, made once. "qwen3-endless" has no token that ends."""
    torch.set_num_threads(1)
    made: dict[str, tuple[Path, Path]] = {}

    def pair(family: str) -> tuple[Path, Path]:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            for seed, name in enumerate(("first", "second")):
                kind, _, endless = family.partition("-")
                make_model(kind, root / name, seed=seed, **({"eos_token_id": None} if endless else {}))
            made[family] = (root / "first", root / "second")
        return made[family]

    return pair


SERVED = ["given"] if os.environ.get("MILES_ASYNC_TEST_ENGINE_URL") else FAMILIES


@pytest.fixture(scope="session", params=SERVED)
def booted(request: pytest.FixtureRequest, models: Callable[[str], tuple[Path, Path]], warm: Path | None) -> Iterator[Target]:
    """One engine for all conformance tests of a family."""
    if request.param == "given":
        url, model_dir = os.environ["MILES_ASYNC_TEST_ENGINE_URL"], Path(os.environ["MILES_ASYNC_TEST_ENGINE_MODEL"])
        other_dir = Path(os.environ.get("MILES_ASYNC_TEST_ENGINE_OTHER", model_dir))
        folder = os.environ.get("MILES_ASYNC_TEST_ENGINE_INSIDE", "")
        oracles = Oracle(model_dir), Oracle(other_dir)
        # It may compute in bfloat16: of 2,400 tokens of such a server on a GPU one was 0.11 off.
        yield Target(url, "given", model_dir, other_dir, *oracles, False, 0.2, Path(folder) if folder else None)
        return
    first, second = models(request.param)
    with engine_process(first, warm=warm) as (url, _):
        yield Target(url, request.param, first, second, Oracle(first), Oracle(second), True, 1e-4)


@pytest.fixture
async def target(booted: Target) -> AsyncIterator[Target]:
    """The engine as booted: running, idle, first weights, version "default". Put back after each test."""
    yield booted
    async with aiohttp.ClientSession(booted.url) as http:
        for path, body in (
            ("/abort_request", {"abort_all": True}),
            ("/pause_generation", {"mode": "abort"}),
            (
                "/update_weights_from_disk",  # SGLang ends when a flush is asked for and declined
                {"model_path": str(booted.model_dir), "weight_version": "default", "flush_cache": False},
            ),
            ("/continue_generation", {}),
        ):
            async with http.post(path, json=body) as response:
                assert response.status == 200, await response.text()


@pytest.fixture
async def client(target: Target) -> AsyncIterator[SGLangClient]:
    client = SGLangClient(
        target.url,
        request_deadline_s=60.0,
        token_deadline_s=30.0,
        control_deadline_s=CONTROL_DEADLINE_S,
        inside=target.inside,
    )
    await client.info()
    yield client
    await client.close()


class Http:
    """Raw requests, for what the client hides."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        async with self.session.post(path, json=body) as response:
            return response.status, await _content(response)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            return response.status, await _content(response)

    async def generate(self, input_ids: list[int], **sampling: Any) -> dict[str, Any]:
        status, answer = await self.post("/generate", {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True})
        assert status == 200, answer
        return answer

    async def running(self) -> int:
        """Requests that run or wait."""
        _, answer = await self.get("/v1/loads?include=core")
        return sum(int(load["num_total_reqs"]) for load in answer["loads"])


async def _content(response: aiohttp.ClientResponse) -> Any:
    return await (response.json() if response.content_type == "application/json" else response.text())


@pytest.fixture
async def http(target: Target) -> AsyncIterator[Http]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(target.url, timeout=timeout) as session:
        yield Http(session)
