"""The launchers that ship: one record each, which with the module that it names is all there is of one (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from actors.kinds import KindRecord, RuleBroken


class LauncherKind(KindRecord, frozen=True, kw_only=True):
    """Who places a run's processes. `module`: of miles_async/launcher, with `check_start` (before anything starts), `join_cluster`
    and `placer_of`. `spreads`: over hosts of a cluster, whose nodes come and go; else all are on this host. `forks`: light rooms
    are forked from a process that has loaded them."""

    module: str
    spreads: bool = False
    forks: bool = False


class RayLauncher(LauncherKind, frozen=True, kw_only=True):
    """A Ray cluster."""

    def rules(self, settings: Any) -> Iterator[RuleBroken]:
        s = settings
        if s.use_router and s.sglang_router_ip is None:
            why = "our router sees the engines of one host (launcher = ray)"
            yield RuleBroken("use_router", s.use_router, why, "Leave it out: workers share the load.")
        if s.transport_kind.maps_gpu and s.engine_kind.needs_gpu and not s.colocate:
            why = "Ray hides the trainer's GPU, whose memory ipc maps, from engines (launcher = ray)"
            yield RuleBroken("update_weight_transport", s.update_weight_transport, why, "Set it to nccl or disk.")
        if s.train_master is not None:
            why = "launcher = ray starts all processes of the trainer"
            yield RuleBroken("train_master", s.train_master, why, "Leave it out.")
        if s.colocate and s.max_workers is not None:
            why = "engines on the trainer's GPUs are placed with it, all at once (colocate = true)"
            yield RuleBroken("max_workers", s.max_workers, why, "Leave it out.")
        if s.colocate and s.actor_num_nodes > 1 and s.transport_kind.on_host and not s.transport_kind.whole:
            why = f"it reaches engines of the trainer's first host, which has {s.actor_num_nodes} (colocate = true)"
            yield RuleBroken("update_weight_transport", s.update_weight_transport, why, "Set it to disk.")


LOCAL = LauncherKind(name="local", told="all on this host", module="miles_async.launcher.local", forks=True)
RAY = RayLauncher(
    name="ray",
    told="over the nodes of a Ray cluster (docs/cluster.md)",
    extra="ray",
    module="miles_async.launcher.ray_open",
    spreads=True,
)
LAUNCHERS: dict[str, LauncherKind] = {kind.name: kind for kind in (LOCAL, RAY)}

if TYPE_CHECKING:
    LauncherName = str
else:
    LauncherName = Literal[tuple(LAUNCHERS)]
"""Type of a setting that names one; a type checker cannot read it off the records."""
