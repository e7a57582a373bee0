"""What is wrong with a run (pure, over one `Scene`).

An `error` will not go away by itself, a `warning` may, an `info` explains. Waiting is no fault by itself: every room but
the slowest one waits. Causes stand before what follows from them: among findings of one level the first names the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles_async.console.doctor.engines import (
    failing_engines,
    refused_weights,
    silent_engines,
    slow_engines,
    slow_weights,
    stale_workers,
)
from miles_async.console.doctor.finding import (
    Finding,
)
from miles_async.console.doctor.flow import (
    dead_letters,
    failed_checkpoints,
    governor_at_its_edge,
    idle_trainer,
    slow_rewards,
    starving_filter,
    stuck_evaluation,
)
from miles_async.console.doctor.learning import (
    TRENDS,
    first_step,
)
from miles_async.console.doctor.rooms import (
    crash_loops,
    full_hosts,
    long_waits,
    missing_rooms,
    no_launcher,
    silent_actors,
    wrong_clocks,
)
from miles_async.console.doctor.streams import (
    abandoned_entries,
    full_streams,
    incomplete_groups,
    lost_streams,
    open_ledger,
    unfit_server,
)
from miles_async.console.scene import Scene

RULES: tuple[Callable[[Scene], Iterator[Finding]], ...] = (
    unfit_server,
    full_hosts,
    lost_streams,
    crash_loops,
    silent_actors,
    missing_rooms,
    no_launcher,
    refused_weights,
    failing_engines,
    silent_engines,
    stale_workers,
    slow_weights,
    slow_engines,
    failed_checkpoints,
    dead_letters,
    slow_rewards,
    starving_filter,
    abandoned_entries,
    open_ledger,
    incomplete_groups,
    full_streams,
    first_step,
    *TRENDS,
    stuck_evaluation,
    idle_trainer,
    long_waits,
    wrong_clocks,
    governor_at_its_edge,
)


def diagnose(scene: Scene) -> list[Finding]:
    """All findings, gravest first."""
    found = [finding for rule in RULES for finding in rule(scene)]
    order = ("error", "warning", "info")
    return sorted(found, key=lambda f: order.index(f.level))
