"""What is wrong with a run (pure, over one `Scene`).

An `error` will not go away by itself, a `warning` may, an `info` explains. Waiting is no fault by itself: every room but
the slowest one waits. Causes stand before what follows from them: among findings of one level the first names the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles_async.console.doctor import engines, flow, learning, rooms, streams
from miles_async.console.doctor.finding import Finding
from miles_async.console.scene import Scene

RULES: tuple[Callable[[Scene], Iterator[Finding]], ...] = (
    streams.unfit_server, rooms.other_releases, rooms.full_hosts, streams.lost_streams, rooms.crash_loops, rooms.slow_links,
    rooms.silent_actors, rooms.missing_rooms, rooms.no_launcher, engines.refused_weights, engines.failing_engines,
    engines.silent_engines, engines.stale_workers, engines.slow_weights, engines.slow_engines, flow.failed_checkpoints,
    flow.dead_letters, flow.slow_rewards, flow.starving_filter, streams.abandoned_entries, streams.open_ledger,
    streams.incomplete_groups, streams.full_streams, learning.first_step, *learning.TRENDS, flow.stuck_evaluation,
    flow.endless_step, flow.idle_trainer, rooms.long_waits, rooms.wrong_clocks, flow.governor_at_its_edge,
)  # fmt: skip


def diagnose(scene: Scene) -> list[Finding]:
    """All findings, gravest first."""
    found = [finding for rule in RULES for finding in rule(scene)]
    order = ("error", "warning", "info")
    return sorted(found, key=lambda f: order.index(f.level))
