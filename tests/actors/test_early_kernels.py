"""Kernels that are compiled beside a boot: when, for which GPUs, and that the boot does not depend on it. FlashInfer and nvidia-smi
are played; what they say was read on an H200."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from actors.generation.engines.sglang.early_kernels import EarlyKernels, missing
from actors.generation.engines.sglang.server import SGLangServer
from actors.generation.spec import GenerationSpec
from tests.engine.processes import until_async

FAKE_SERVER = Path(__file__).with_name("fake_sglang.py")
COMPILES = """
import os, pathlib
def get_sampling_module():
    words = os.environ["FLASHINFER_CUDA_ARCH_LIST"], os.environ["CUDA_VISIBLE_DEVICES"]
    built = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"], ".cache/flashinfer/0.6/90a/cached_ops/sampling/sampling.so")
    built.parent.mkdir(parents=True)
    built.write_text(repr(words))
"""
HANGS = """
import os, pathlib, time
def get_sampling_module():
    pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"], "pid").write_text(str(os.getpid()))
    time.sleep(600)
"""
Environment = Callable[..., Mapping[str, str]]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """environment(FlashInfer's source, capabilities): what a server on GPUs with these would get; none: no nvidia-smi."""

    def make(source: str, *capabilities: str) -> Mapping[str, str]:
        (tmp_path / "site" / "flashinfer").mkdir(parents=True)
        (tmp_path / "site" / "flashinfer" / "__init__.py").touch()
        (tmp_path / "site" / "flashinfer" / "sampling.py").write_text(source)
        (tmp_path / "bin").mkdir()
        if capabilities:
            smi = tmp_path / "bin" / "nvidia-smi"
            smi.write_text(f"#!{sys.executable}\nprint({chr(10).join(capabilities)!r})\n")
            smi.chmod(0o755)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        path = os.pathsep.join([str(tmp_path / "site"), *sys.path])
        places = {"PATH": str(tmp_path / "bin"), "PYTHONPATH": path, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
        for name, value in places.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
        return {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}

    return make


async def compiled(env: Mapping[str, str], folder: Path) -> str:
    """What the compilation said, to its end."""
    kernels = EarlyKernels()
    await kernels.start([sys.executable, "-m", "sglang.launch_server"], folder, env)
    try:
        log = folder / "kernels.log"
        await until_async(lambda: _now(log.exists() and log.read_text().endswith("\n")), "its last word")
        return log.read_text()
    finally:
        await kernels.stop()


async def test_kernels_that_are_missing_are_compiled_for_the_servers_gpu_without_touching_it(
    environment: Environment, tmp_path: Path
) -> None:
    env = environment(COMPILES, "9.0")
    assert missing(env)
    assert await compiled(env, tmp_path) == "compiled for 9.0a\n"
    [built] = tmp_path.rglob("sampling.so")
    assert built.read_text() == "('9.0a', '')"
    assert not missing(env), "the next boot compiles nothing"


@pytest.mark.parametrize("capabilities", [(), ("12.1",), ("9.0", "12.1")], ids=["no nvidia-smi", "unknown", "one unknown"])
async def test_for_gpus_that_are_not_known_nothing_is_compiled(
    environment: Environment, tmp_path: Path, capabilities: tuple[str, ...]
) -> None:
    said = await compiled(environment(COMPILES, *capabilities), tmp_path)
    assert said.startswith("nothing is compiled early") and not list(tmp_path.rglob("sampling.so"))


async def test_the_users_word_on_architectures_holds(environment: Environment, tmp_path: Path) -> None:
    env = {**environment(COMPILES), "FLASHINFER_CUDA_ARCH_LIST": "12.0f"}
    assert await compiled(env, tmp_path) == "compiled for 12.0f\n"


async def test_another_programs_kernels_are_its_own(environment: Environment, tmp_path: Path) -> None:
    kernels = EarlyKernels()
    await kernels.start(["/elsewhere/bin/python", "-m", "sglang.launch_server"], tmp_path, environment(COMPILES, "9.0"))
    await kernels.stop()
    assert not (tmp_path / "kernels.log").exists()


async def test_a_server_that_is_ready_does_not_wait_for_a_compilation_and_ends_it(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(HANGS, "9.0")
    plan, pid = tmp_path / "plan.json", tmp_path / "pid"
    plan.write_text("[]")
    monkeypatch.setenv("FAKE_SGLANG", str(plan))
    compiling = tmp_path / "plan.json.compiling"
    compiling.touch()  # the server's first sampled token comes when it is gone

    async def report(kind: str, text: str, level: str) -> None:
        if kind == "engine compiles":
            await until_async(lambda: _now(pid.exists() and pid.read_text()), "the compilation runs")
            compiling.unlink()

    spec = GenerationSpec(model_path="m", server_command=(sys.executable, str(FAKE_SERVER)), boot_deadline_s=60.0)
    server = SGLangServer(spec, tmp_path / "engines", report, compiling_s=0.05)
    try:
        assert await server.start() and server.note == ""
        assert not Path("/proc", pid.read_text()).exists()
    finally:
        await server.stop()


async def _now(value: object) -> bool:
    return bool(value)
