"""Processes that meet over gloo: each job is a function of a file, on the first n ranks. Every job has processes of its own, forked
from one that has loaded the libraries: a model of megatron-core holds its groups for good, and each group has threads that wake a
hundred times a second."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LOADED = ["tests.megatron.loaded"]
DEADLINE_S = 240.0  # the first job waits until the libraries are loaded: half a minute on a busy host


def _live(pipe: Any, rank: int, function: Callable[..., Any], n: int, store: str, compiled: bool, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if not compiled:
        torch.compiler.set_stance("force_eager")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=n, timeout=timedelta(seconds=DEADLINE_S)
        )
        pipe.send((True, function(*args)))
    except BaseException:  # noqa: BLE001 - told to who asked
        pipe.send((False, traceback.format_exc()))
    pipe.poll(DEADLINE_S)  # tensors of the answer are fetched from here; it is killed then


class Pool:
    """`run(n, function, *args)` -> results by rank; a job that fails on a rank fails here, with its traceback. What megatron-core
    has compiled (`jit_fuser`) runs plain unless the job is to be `compiled`: each of its processes would call a C++ compiler."""

    def __init__(self, directory: Path) -> None:
        self._context, self._directory, self._jobs = mp.get_context("forkserver"), directory, 0
        self._context.set_forkserver_preload(LOADED)

    def run(self, n: int, function: Callable[..., Any], *args: Any, compiled: bool = False) -> list[Any]:
        self._jobs += 1
        store = str(self._directory / f"store-{self._jobs}")
        members = []
        try:
            for rank in range(n):
                ours, theirs = self._context.Pipe()
                told = (theirs, rank, function, n, store, compiled, args)
                process = self._context.Process(target=_live, args=told, daemon=True)
                process.start()
                theirs.close()
                members.append((process, ours))
            results = []
            for rank, (_, pipe) in enumerate(members):
                assert pipe.poll(DEADLINE_S), f"rank {rank} of {n} gave no answer in {DEADLINE_S} s"
                results.append(pipe.recv())
        finally:
            for process, pipe in members:
                process.kill()  # it has answered, or will not
                process.join(5)
                pipe.close()
        failed = [f"rank {rank}: {said}" for rank, (fine, said) in enumerate(results) if not fine]
        assert not failed, "\n".join(failed)
        return [said for _, said in results]
