"""`--env-report`: env_report.json in the run's folder, what the numbers of a run depend on besides its settings: this host, GPUs,
every installed package, and the variables that libraries read. No variable whose name says that it is a secret."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import msgspec
import psutil

from actors.runtime.smi import of_gpus

FILE = "env_report.json"
READ_BY_LIBRARIES = re.compile(
    r"^(CUDA|CUBLAS|NCCL|NVTE|TORCH|PYTORCH|TRITON|SGLANG|SGL|FLASH|HF|TRANSFORMERS|TOKENIZERS|OMP|MKL|GLOO|UCX|RAY|SLURM|PYTHON|LD)_?"
)
SECRET = re.compile(r"TOKEN$|_TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
GPU_FIELDS = ("name", "driver_version", "memory.total", "ecc.mode.current", "persistence_mode")


def write_env_report(run_dir: Path) -> Path:
    """The file of this start; that of the start before is replaced."""
    path = run_dir / FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(environment())) + b"\n")
    return path


def environment() -> dict[str, Any]:
    """As it is now."""
    packages = sorted(distributions(), key=lambda d: str(d.metadata["Name"]).lower())
    variables = sorted(os.environ.items())
    return {
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "processors": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        "gpus": [dict(zip(GPU_FIELDS, row, strict=False)) for row in of_gpus(*GPU_FIELDS)],
        "packages": {d.metadata["Name"]: d.version for d in packages},
        "variables": {k: v for k, v in variables if READ_BY_LIBRARIES.match(k) and not SECRET.search(k)},
    }
