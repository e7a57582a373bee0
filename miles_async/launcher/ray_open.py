"""What a run's start does on a Ray cluster (settings/launchers.py)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial

from actors.runtime.fork_server import ForkServer
from bus import Bus
from miles_async.launcher.place import Place
from miles_async.launcher.ray_strangers import refuse_strangers
from miles_async.launcher.supervisor import Placer
from miles_async.settings.errors import refusal
from miles_async.settings.run import RunSettings


def check_start(settings: RunSettings) -> None:
    """SettingsError where Ray is not installed, or its head does not answer."""
    if importlib.util.find_spec("ray") is None:
        why = "ray is not installed in this Python"
        raise refusal("launcher", "ray", why, "Install miles-async[ray] on all nodes.")
    from miles_async.launcher.ray_cluster import check_head

    check_head(settings.launch.ray_address)


def join_cluster(settings: RunSettings) -> None:
    """Before what takes time: a builtin model takes half a minute, and who cannot join hears it before."""
    from miles_async.launcher.ray_cluster import connect

    connect(settings)


def placer_of(
    settings: RunSettings, place: Place, threads: Mapping[str, int], servers: Mapping[str, ForkServer]
) -> Callable[[Bus], Placer]:
    """Makes what says where this run's actors are to be."""
    from miles_async.launcher.ray_placer import RayPlacer

    return lambda bus: RayPlacer(settings, place, dict(threads), partial(refuse_strangers, bus))
