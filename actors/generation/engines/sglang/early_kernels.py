"""FlashInfer's kernels of sampling, compiled beside an SGLang server's boot instead of after it.

SGLang takes two minutes to be up on a fresh host, and its first sampled token then waits for nvcc for as long again (H100, SGLang
0.5.12: 265 to 300 s one after the other; 122 s, there and on an H200, with the compilation started by hand beside the boot).
FlashInfer keeps what it compiled on the disk, locks it while it compiles, and takes it from there: so whoever comes first does it.
As a program: compiles, and ends.

Always true: the GPU is not touched, and nothing here decides whether a boot succeeds.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from actors.runtime.child import PYTHON, Child
from actors.runtime.smi import of_gpus

log = logging.getLogger(__name__)
WORKSPACE, ARCHITECTURES, GPUS = "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_CUDA_ARCH_LIST", "CUDA_VISIBLE_DEVICES"
KNOWN = {"8.0": "8.0", "8.6": "8.6", "8.9": "8.9", "9.0": "9.0a"}
"""Compute capability, as nvidia-smi has it -> FlashInfer's name of what it compiles there. Of others the name is not sure."""


class EarlyKernels:
    """One compilation, for as long as a boot lasts."""

    def __init__(self) -> None:
        self._child = Child()

    async def start(self, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        """Compile what a server of `command` and `env` will want, if it runs this Python's FlashInfer and that is not there yet.
        Output: <folder>/kernels.log."""
        if command[0] != sys.executable or not missing(env):
            return
        try:
            await self._child.start([*PYTHON, __name__], folder / "kernels.log", env)
        except OSError as error:
            log.warning("kernels are compiled by the server itself: %s", error)

    async def stop(self) -> None:
        """The boot is over."""
        await self._child.stop()


def missing(env: Mapping[str, str]) -> bool:
    """Whether FlashInfer is there, and its kernels of sampling are neither part of it nor in its cache."""
    if find_spec("flashinfer") is None or find_spec("flashinfer_jit_cache") is not None:
        return False
    try:
        release = version("flashinfer-python")
    except PackageNotFoundError:
        release = "*"
    base = Path(env.get(WORKSPACE) or Path.home()) / ".cache" / "flashinfer"
    return not any(base.glob(f"{release}/*/cached_ops/sampling/*.so"))


def architectures(gpus: str) -> str:
    """FlashInfer's names for these GPUs of this host (as in CUDA_VISIBLE_DEVICES; empty: all), with spaces; empty where one has a
    capability that is not known, or nvidia-smi does not answer."""
    said = [row[0] for row in of_gpus("compute_cap", only=gpus)]
    return " ".join(sorted({KNOWN[one] for one in said})) if said and all(one in KNOWN for one in said) else ""


def main() -> int:
    wanted = os.environ.get(ARCHITECTURES) or architectures(os.environ.get(GPUS, ""))
    if not wanted:
        print("nothing is compiled early: the GPU's architecture is not known", flush=True)
        return 0
    os.environ |= {ARCHITECTURES: wanted, GPUS: ""}  # FlashInfer asks no GPU, and torch opens no context on one
    from flashinfer.sampling import get_sampling_module

    get_sampling_module()
    print(f"compiled for {wanted}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
