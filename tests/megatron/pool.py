"""Four processes that meet over gloo, started once for all files: each job is a function of a file and runs on the first n.
They are forked from one that has loaded the libraries, which takes longer than their jobs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LOADED = ["tests.megatron.tiny", "transformers.models.qwen3.modeling_qwen3"]
DEADLINE_S = 240.0  # the first job waits until all have loaded megatron-core: half a minute each on a busy host


def _live(pipe: Any, rank: int) -> None:
    torch.set_num_threads(1)
    while True:
        function, n, store, args = pipe.recv()
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=n, timeout=timedelta(seconds=DEADLINE_S)
            )
            pipe.send((True, function(*args)))
        except BaseException:  # noqa: BLE001 - told to who asked
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Pool:
    """`run(n, function, *args)` -> results by rank; a job that fails on a rank fails here, with its traceback."""

    def __init__(self, size: int, directory: Path) -> None:
        context, self._directory, self._jobs = mp.get_context("forkserver"), directory, 0
        context.set_forkserver_preload(LOADED)
        self._members = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(theirs, rank), daemon=True)
            process.start()
            self._members.append((process, ours))

    def run(self, n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._jobs += 1
        store = self._directory / f"store-{self._jobs}"
        for _, pipe in self._members[:n]:
            pipe.send((function, n, str(store), args))
        results = []
        for rank, (_, pipe) in enumerate(self._members[:n]):
            assert pipe.poll(DEADLINE_S), f"rank {rank} of {n} gave no answer in {DEADLINE_S} s"
            results.append(pipe.recv())
        failed = [f"rank {rank}: {said}" for rank, (fine, said) in enumerate(results) if not fine]
        assert not failed, "\n".join(failed)
        return [said for _, said in results]

    def close(self) -> None:
        for process, _ in self._members:
            process.kill()  # they wait for a job, and hold nothing
        for process, _ in self._members:
            process.join(5)


@contextmanager
def opened(size: int, directory: Path) -> Iterator[Pool]:
    pool = Pool(size, directory)
    try:
        yield pool
    finally:
        pool.close()
