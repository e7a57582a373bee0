"""Process groups that span the trainer and engines: made beside the default one, found by an address and a name."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any


def open_store(address: str, deadline: timedelta) -> Any:
    """Where the members of a group find each other, at a port of its own (`port`); for the rank that leads. Whoever waits there
    hears at once, as an error, that the last reference to it is gone."""
    from torch.distributed import TCPStore

    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    return TCPStore(address, port, None, True, timeout=deadline, wait_for_workers=False, master_listen_fd=listener.detach())


def join_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    *,
    backend: str,
    deadline: timedelta,
) -> Any:
    """A torch process group of its own; waits for all members at the store that `open_store` made. Prefix and steps are those
    of SGLang's engines, or the ranks would not find each other.

    RuntimeError, OSError or ValueError when not all come within the deadline, or the store closes. `deadline` is the group's own
    for gloo. NCCL gets a far longer one: its watchdog ends the whole process when that passes, so waits set their own.
    """
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed import distributed_c10d as c10d

    store = TCPStore(address, port, world_size, False, timeout=deadline, wait_for_workers=False)
    make: Any = c10d._new_process_group_helper
    limit = deadline if backend == "gloo" else max(deadline, timedelta(hours=1))
    group, _ = make(world_size, rank, [], c10d.Backend(backend), PrefixStore(name, store), group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave_group(group: Any) -> None:
    """Leave a group. Where its peers may be gone, its pending work is aborted first."""
    import torch.distributed as dist

    try:
        if dist.get_backend(group) == "nccl":
            group.abort()
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError):
        return
