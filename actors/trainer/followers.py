"""Ranks 1..N-1 of a trainer with several: children of rank 0's process, started with it and gone with it, or somebody else's.

Owns nothing but processes. A follower that ends before it is told to end ends the trainer, whose supervisor starts all ranks
again from the last checkpoint. Of ranks that others started (torchrun, Slurm, Ray; `--train-master`) the trainer learns by the
connection that breaks; it ends alike, and they too: who started them starts them again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from pathlib import Path

from actors.runtime.child import PYTHON, Child, free_port, last_line
from actors.runtime.deadline import first_of
from actors.runtime.run import EXIT_CRASHED
from bus.errors import MilesAsyncError

MODULE = "actors.trainer.follower"
NOTICE_S = 2.0  # from a peer's broken connection to the peer's exit status
STUCK_S = 20.0  # a collective that lost a rank may never return; the process ends itself after this
PARTING_S = 10.0


class RankDied(MilesAsyncError):
    """A rank of the trainer other than 0 ended while it was needed."""


class Followers:
    """The other ranks, none with size 1. `master`: where all meet, started by others; else they are children here, and the port is
    new at every start, so a dead rank's cannot be in the way."""

    def __init__(self, size: int, run_dir: str, master: str = "") -> None:
        self.size = size
        self._master = master
        self._logs = Path(run_dir) / "logs"
        self._children: dict[int, Child] = {}
        self._parting = False

    async def start(self) -> None:
        """Say in this process's own environment that it is rank 0, and start the others."""
        if self.size == 1:
            return
        host, _, port = (self._master or f"127.0.0.1:{free_port()}").rpartition(":")
        os.environ.update(WORLD_SIZE=str(self.size), MASTER_ADDR=host, MASTER_PORT=port, RANK="0", LOCAL_RANK="0")
        if self._master:
            return
        self._logs.mkdir(parents=True, exist_ok=True)
        for rank in range(1, self.size):
            child = self._children[rank] = Child()
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # The log's path as an argument tells process lists which run this is.
            await child.start([*PYTHON, MODULE, str(self._log(rank))], self._log(rank), environment)

    def _log(self, rank: int) -> Path:
        return self._logs / f"trainer-rank-{rank}.log"

    async def watch(self) -> None:
        """Waits for the first one to end; RankDied unless they were told to end."""
        if not self._children:
            return
        ranks = list(self._children)
        ended = await first_of(*(child.wait() for child in self._children.values()))
        if not self._parting:
            raise self._death(ranks[ended])

    def _death(self, rank: int) -> RankDied:
        code = self._children[rank].exit_code
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return RankDied(
            f"rank {rank} of {self.size} of the trainer {how} (last line: {last_line(self._log(rank))}). All ranks start again "
            f"from the last checkpoint. Log: {self._log(rank)}"
        )

    async def explain(self) -> RankDied | None:
        """The death behind an error of this rank, if one becomes known within NOTICE_S."""
        try:
            async with asyncio.timeout(NOTICE_S):
                await self.watch()
        except RankDied as died:
            return died
        except TimeoutError:
            pass
        return None

    async def part(self, sent_home: Awaitable[object]) -> None:
        """Send them home and wait until they are gone."""
        self._parting = True
        await sent_home
        try:
            async with asyncio.timeout(PARTING_S):
                await asyncio.gather(*(child.wait() for child in self._children.values()))
        except TimeoutError:
            pass  # what is left is ended below
        await asyncio.gather(*(child.stop() for child in self._children.values()))

    async def abandon(self) -> None:
        """Kill them after a failure. This rank's thread may hang in a collective, so a timer ends the process at last."""
        if not self._children or self._parting:
            return
        self._parting = True
        timer = threading.Timer(STUCK_S, os._exit, (EXIT_CRASHED,))
        timer.daemon = True
        timer.start()
        await asyncio.gather(*(child.stop(0.0) for child in self._children.values()))
