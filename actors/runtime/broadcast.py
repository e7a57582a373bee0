"""Process groups that span the trainer and engines: made beside the default one, found by an address and a name."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any


def join_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    *,
    backend: str,
    deadline: timedelta,
    listener: socket.socket | None = None,
) -> Any:
    """A torch process group of its own; waits for all members. Store, prefix and steps are those of SGLang's engines, or
    the ranks would not find each other. Rank 0 leads and gives its `listener` away, so that nobody can take the port.

    RuntimeError, OSError or ValueError when not all come within the deadline. `deadline` is the group's own for gloo. NCCL
    gets a far longer one: its watchdog ends the whole process when that passes, so waits set their own.
    """
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed import distributed_c10d as c10d

    extra: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    store = TCPStore(address, port, world_size, rank == 0, timeout=deadline, wait_for_workers=False, **extra)
    make: Any = c10d._new_process_group_helper
    limit = deadline if backend == "gloo" else max(deadline, timedelta(hours=1))
    group, _ = make(world_size, rank, [], c10d.Backend(backend), PrefixStore(name, store), group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave_group(group: Any) -> None:
    """Part from a group, also from one whose peers are gone: that cannot be done politely, so its work is cut off first."""
    import torch.distributed as dist

    try:
        if dist.get_backend(group) == "nccl":
            group.abort()
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError):
        return


__all__ = ("join_group", "leave_group")
