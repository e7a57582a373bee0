"""The engine as a process: how it ends, and how it refuses to start."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.engine.conftest import engine_process
from tests.engine.processes import BOOT_DEADLINE_S, until


@pytest.fixture
def model_dir(models: Callable[[str], tuple[Path, Path]]) -> Path:
    return models("qwen3")[0]


async def test_sigterm_hands_out_partials_and_exits_with_zero(model_dir: Path) -> None:
    with engine_process(model_dir, "--served-version", "12") as (url, process):
        body = {
            "input_ids": [2, 3],
            "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.post(f"{url}/generate", json=body) as response,
        ):
            await response.content.readline()
            process.send_signal(signal.SIGTERM)
            *_, last, done, _ = (await response.text()).split("\n\n")
        meta = json.loads(last.strip().removeprefix("data: "))["meta_info"]
        assert done == "data: [DONE]"
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["weight_version"] == "12"
        assert 0 < meta["completion_tokens"] < 4000
        await asyncio.to_thread(until, lambda: process.poll() is not None, "the engine exits", 10.0)
        assert process.returncode == 0


def refused(*flags: str) -> str:
    """Standard error of a start that must be refused with status 2, in one line."""
    argv = [sys.executable, "-m", "actors.generation.engines.embedded", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOOT_DEADLINE_S, check=False)
    assert done.returncode == 2, done
    line = done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    return line


def test_a_port_in_use_is_named(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}" in refused("--model-path", str(model_dir), "--port", port)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    assert f"cannot read {tmp_path / 'config.json'}" in refused("--model-path", str(tmp_path))


def test_a_model_that_is_not_served_here_is_named(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "gpt9"}))
    assert "model_type 'gpt9' is not served here" in refused("--model-path", str(tmp_path / "m"))


def test_a_flag_out_of_range_is_named(model_dir: Path) -> None:
    assert "--threads 0 must be at least 1" in refused("--model-path", str(model_dir), "--threads", "0")
