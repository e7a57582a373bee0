"""The processes of one trainer: who we are, commands of rank 0, small sums over all of us, tensors on their way to rank 0.

With one process everything here is the identity and no process group exists. With several (WORLD_SIZE > 1, addresses in
the usual variables RANK, MASTER_ADDR, MASTER_PORT, LOCAL_RANK) tensors of a step travel over nccl on GPUs and gloo elsewhere,
commands and metrics always over gloo. Nothing is pickled. What is computed with the ranks is each library's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from socket import gethostname

import torch
import torch.distributed as dist
from torch import Tensor

from actors.runtime.run import Refused
from bus.errors import MilesAsyncError

STEP_DEADLINE = timedelta(minutes=10)
"""Longest wait for a peer inside a step; then the process stops and the supervisor restarts all ranks."""
COMMAND_DEADLINE = timedelta(hours=24)
"""Longest wait of a follower for rank 0's next command. A rank 0 that dies closes its socket and ends the wait at once."""
FILES_DEADLINE = timedelta(hours=2)
"""Longest wait for the slowest rank's files of a checkpoint."""


class RanksApart(MilesAsyncError, RuntimeError):
    """The trainer's processes did not meet."""


class Ranks:
    """This process among the trainer's processes."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._commands: dist.ProcessGroup | None = None
        self._files: dist.ProcessGroup | None = None
        self.others = ""  # process ids of the other ranks, by host, once connected

    @classmethod
    def from_environment(cls) -> Ranks:
        """Not connected yet."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def connected(self) -> bool:
        return self._commands is not None

    def connect(self) -> None:
        """Meet the other ranks. Raises Refused when there are fewer GPUs than ranks, RanksApart when one does not come."""
        if self.alone:
            return
        cuda = torch.cuda.is_available()
        if cuda:
            device, seen = int(os.environ.get("LOCAL_RANK", str(self.rank))), torch.cuda.device_count()
            if device >= seen:
                raise Refused(
                    f"rank {self.rank} of {self.size} of the trainer wants GPU {device}, {seen} are visible. Lower "
                    "--actor-num-gpus-per-node or widen CUDA_VISIBLE_DEVICES."
                )
            torch.cuda.set_device(device)
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=STEP_DEADLINE)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RanksApart(
                f"rank {self.rank} of the trainer's {self.size} found not all of them at {where} within {STEP_DEADLINE}: "
                f"{str(error).splitlines()[0][:200]}. Look whether each was started, and reaches that address."
            ) from error
        self._commands = dist.new_group(backend="gloo", timeout=COMMAND_DEADLINE)
        self._files = dist.new_group(backend="gloo", timeout=FILES_DEADLINE)
        seats = [seat.decode().split() for seat in self.gather_written(f"{gethostname()} {os.getpid()}".encode())]
        by_host: dict[str, list[str]] = {}
        for rank, (host, pid) in enumerate(seats):
            if rank != self.rank:
                by_host.setdefault(host, []).append(pid)
        self.others = ", ".join(f"{' '.join(pids)} on {host}" for host, pids in by_host.items())

    def close(self) -> None:
        """Part from the other ranks; harmless twice."""
        if self._commands is not None:
            self._commands, self._files = None, None
            dist.destroy_process_group()

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """One rank's bytes on every rank."""
        if self.alone:
            return data or b""
        mine = data if self.rank == source else None
        length = torch.tensor([len(mine or b"")], dtype=torch.int64)
        dist.broadcast(length, source, group=self._commands)
        body = torch.empty(int(length), dtype=torch.uint8)
        if mine:
            body.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        if body.numel():
            dist.broadcast(body, source, group=self._commands)
        return body.numpy().tobytes()

    def total(self, x: Tensor) -> Tensor:
        """Sum of a CPU tensor over all ranks, in place."""
        if not self.alone and x.numel():
            dist.all_reduce(x, dist.ReduceOp.SUM)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Maximum of a CPU tensor over all ranks, in place."""
        if not self.alone and x.numel():
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def first_said(self, text: str) -> str:
        """What the first rank that says anything says, on every rank and with its name; empty where none does. All meet here."""
        if self.alone:
            return text
        speaks = self.largest(torch.tensor([self.size - self.rank if text else 0], dtype=torch.int64))
        first = self.size - int(speaks)
        if first == self.size:
            return ""
        return self.broadcast(f"rank {self.rank} on {gethostname()}: {text}".encode(), source=first).decode()

    def gather_written(self, data: bytes) -> list[bytes]:
        """What every rank said, by rank. Of a group of its own: for the threads that write, beside the training."""
        if self.alone:
            return [data]
        length = torch.tensor([len(data)], dtype=torch.int64)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._files)
        body = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        body[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        bodies = [torch.empty_like(body) for _ in range(self.size)]
        dist.all_gather(bodies, body, group=self._files)
        return [b[: int(n)].numpy().tobytes() for b, n in zip(bodies, lengths, strict=True)]

    def send(self, header: bytes, parts: Sequence[Tensor] | None = None) -> None:
        """To rank 0, which calls `receive`; `parts`: uint8 [n] each, on any device, sent as they lie."""
        sizes = torch.tensor([part.numel() for part in parts or ()], dtype=torch.int64)
        counts = torch.tensor([len(header), -1 if parts is None else len(parts)], dtype=torch.int64)
        for told in (counts, torch.frombuffer(bytearray(header), dtype=torch.uint8), sizes):
            if told.numel():
                dist.send(told, 0, group=self._commands)
        for part in parts or ():
            dist.send(part, 0)

    def receive(self, source: int, device: torch.device) -> tuple[bytes, list[Tensor] | None]:
        """What rank `source` sends, its parts on `device`."""
        counts = torch.empty(2, dtype=torch.int64)
        dist.recv(counts, source, group=self._commands)
        header = torch.empty(int(counts[0]), dtype=torch.uint8)
        sizes = torch.empty(max(0, int(counts[1])), dtype=torch.int64)
        for told in (header, sizes):
            if told.numel():
                dist.recv(told, source, group=self._commands)
        if counts[1] < 0:
            return header.numpy().tobytes(), None
        parts = [torch.empty(int(size), dtype=torch.uint8, device=device) for size in sizes]
        for part in parts:
            dist.recv(part, source)
        return header.numpy().tobytes(), parts
