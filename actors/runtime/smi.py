"""What nvidia-smi says of this host's GPUs: asked without a context on any of them."""

from __future__ import annotations

import subprocess

ASK_S = 20.0


def of_gpus(
    *fields: str, units: bool = True, only: str = "", command: str = "nvidia-smi", within_s: float = ASK_S
) -> list[list[str]]:
    """Of each GPU its row of cells, one a field; none where nvidia-smi is not there or does not answer. `units`: numbers have
    theirs. `only`: these GPUs, as in CUDA_VISIBLE_DEVICES; empty = all."""
    form = "csv,noheader" if units else "csv,noheader,nounits"
    ask = [command, f"--query-gpu={','.join(fields)}", f"--format={form}", *([f"--id={only}"] if only else [])]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=within_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in told.strip().splitlines()]
