"""What a host has of what SGLang servers need: versions, its router, kernels, and what compiles them. Loads and starts nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

from actors.generation.engines.sglang.args import too_old
from actors.generation.engines.sglang.inside import TESTED
from actors.generation.engines.sglang.qualified import record_of
from actors.kinds import HostFacts, Lack

LEAST = (0, 5, 12)
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": ("/tmp", "torchinductor_*"), "TRITON_CACHE_DIR": ("~/.triton/cache", ""),
    "FLASHINFER_WORKSPACE_BASE": ("~", ".cache/flashinfer"), "SGLANG_DG_CACHE_DIR": ("~/.cache/deep_gemm", ""),
}  # fmt: skip
"""Variable -> (what it is without being set, where under it): the kernels that were compiled on this host."""


def findings(s: Any, host: HostFacts) -> Iterator[Lack]:
    """`s`: the run's settings as attributes."""
    found = host.version("sglang")
    if not found and not s.sglang_server_command:
        yield Lack("wrong", "sglang", "not installed in this Python: no engine starts; install miles-async[sglang]")
        return
    lost = _lost(found)
    yield Lack("note" if lost else "ok", "sglang", f"{found} {lost}" if lost else found or "by a command of yours")
    if s.lora_publish == "adapters" and found and (why := too_old(found)):
        yield Lack("wrong", "sglang", why)
    if s.use_router and s.sglang_router_ip is None and not host.version("sglang-router"):
        yield Lack("wrong", "sglang-router", "not installed: requests are not shared out; install it, or set --no-use-router")
    if _fp8(s) and util.find_spec("deep_gemm") is None and util.find_spec("sgl_deep_gemm") is None:
        yield Lack("note", "deep-gemm", "not installed: SGLang multiplies block-scaled FP8 by Triton or CUTLASS, slower; it "
                   "comes with SGLang's CUDA wheels")  # fmt: skip
    held = {name: _bytes_in(Path(os.environ.get(name) or base).expanduser(), under) for name, (base, under) in CACHES.items()}
    full = ", ".join(f"{name.split('_')[0].lower()} {host.shown(n)}" for name, n in held.items() if n)
    if nvcc := shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"):
        yield Lack("ok", "kernel cache", f"nvcc is {nvcc}; cached: {full or 'nothing, so a first boot takes minutes longer'}")
    else:
        yield Lack("note", "kernel cache", f"no nvcc on PATH or in CUDA_HOME, cached: {full or 'nothing'}. Kernels that SGLang "
                   "compiles at boot come from its caches or not at all; install nvcc of torch's CUDA, copy the caches of "
                   "a host with nvcc, or choose kernels that need none (--sglang-attention-backend triton)")  # fmt: skip


def _lost(release: str) -> str:
    """What a run does without on an engine of this release, which nobody here tried; empty: nothing."""
    number = tuple(int(n) for n in re.findall(r"\d+", release)[:3])
    if not release or release in TESTED:
        return ""
    if number < LEAST:
        return "is older than 0.5.12, with which everything was tried; upgrade it"
    record = record_of(release)
    if record is None:
        tried = "it was not tried from outside either: `miles-async qualify` does that"
    else:
        tried = f"from outside it lacks {record.lacks()}" if record.lacks() else "from outside it was tried"
    return (
        f"is none of the releases that were tried from inside ({', '.join(TESTED)}): counting in place, receiving, drawing "
        f"there, and checksums over several GPUs, are off; {tried}. Install one of those for all of it"
    )


def _fp8(s: Any) -> bool:
    try:
        config: Any = json.loads((Path(s.hf_checkpoint) / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "quantization_config" in config


def _bytes_in(base: Path, under: str) -> int:
    roots = base.glob(under) if under else (base,)
    return sum(file.stat().st_size for root in roots if root.is_dir() for file in root.rglob("*") if file.is_file())
