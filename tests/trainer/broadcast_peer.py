"""A process that joins the group of the plan in a folder, and receives what is broadcast there if it is told to stay. Its words:
the folder, `stay` or `leave`, its rank. Prints that it joined, then the sum of each bucket."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from actors.runtime.broadcast import join_group
from bus.messages.weights import WeightPlan


def main(folder: str, mode: str, rank: str) -> None:
    plan = msgspec.json.decode((Path(folder) / "plan.json").read_bytes(), type=WeightPlan)
    limit = timedelta(seconds=plan.deadline_s)
    group = join_group(plan.address, plan.port, int(rank), plan.world_size, plan.group, backend="gloo", deadline=limit)
    print("joined", flush=True)
    for bucket in plan.buckets if mode == "stay" else ():
        flat = torch.empty(bucket.n_bytes, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=group)
        print(int(flat.long().sum()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
