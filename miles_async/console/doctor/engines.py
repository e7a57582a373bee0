"""Engines and the versions they serve (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from actors.runtime.snapshot import ActorFacts
from bus.messages.events import EventKind
from bus.messages.waits import Wait
from miles_async.console.doctor.finding import BRIEF_S, Finding
from miles_async.console.scene import Scene
from miles_async.console.text import duration, shorten

STALE_S = 30.0  # a worker may serve an older version for so long
SILENT_S = 30.0  # an engine with requests may give no token for so long
FAILED_S, FAILED_OFTEN = 300.0, 3  # so many failures of an engine within this time will not end by themselves
SLOW = 1 / 3  # of the peers' rate
SLOW_LOAD_S = 5.0  # a version may take so long to load, or as long as two steps


def _workers(scene: Scene) -> list[ActorFacts]:
    """Living ones that are not about to end."""
    living = [a for a in scene.snapshot.living("generation") if not scene.over]
    return [a for a in living if a.vitals.state != "draining"]


def stale_workers(scene: Scene) -> Iterator[Finding]:
    """Workers that may take no lease, because they do not serve the version that was announced."""
    policy = scene.snapshot.policy
    for actor in _workers(scene):
        vitals = actor.vitals
        if vitals.version >= policy.announced or vitals.wait is Wait.UNLENT:  # which takes a version when it has a GPU
            continue
        loads_s = actor.waited_s if vitals.wait is Wait.ACTIVATION else 0.0
        behind_s = max(policy.behind_s(vitals.version), loads_s)  # of many versions the snapshot knows the newest only
        if vitals.wait is Wait.BOOTING:
            behind_s = min(behind_s, actor.waited_s)  # a run that goes on announced its version before this engine's start
        if behind_s < BRIEF_S and vitals.version >= 0:
            continue
        has = f"serves version {vitals.version}" if vitals.version >= 0 else "serves no version yet"
        doing = f"; it waits for {vitals.waits_for}" if vitals.waits_for else ""
        doing += f" ({vitals.note})" if vitals.note else ""
        if loads_s > STALE_S and not vitals.note:
            doing += f", for {duration(loads_s)}: its engine hangs, or loads slowly"
        text = f"{vitals.actor} {has}, newer ones have been announced for {duration(behind_s)} (now {policy.announced}){doing}"
        yield Finding("warning" if behind_s > STALE_S else "info", "stale worker", vitals.actor, text, behind_s)


def refused_weights(scene: Scene) -> Iterator[Finding]:
    """Workers that could not load a version and have loaded none since."""
    workers = _workers(scene)
    kinds = (EventKind.WEIGHTS_REFUSED, EventKind.TRANSPORT_FAILED)
    said = {e.actor: e for e in scene.news if e.kind in kinds and "version" in e.data}
    serves = {a.vitals.actor: a.vitals.version for a in workers}
    behind = {name: e for name, e in said.items() if name in serves and serves[name] < e.data["version"]}
    if behind and len(behind) == len(workers):
        newest = max(behind.values(), key=lambda e: e.wall)
        text = (
            f"no worker could load version {newest.data['version']}: {shorten(newest.text, 250)}. They go on with older weights, "
            "or with none, until one loads"
        )
        yield Finding("error", "weights refused", "generation", text, scene.now - min(e.wall for e in behind.values()))
        return
    for name, event in sorted(behind.items()):
        text = f"{name} could not load version {event.data['version']}: {shorten(event.text, 250)}"
        if serves[name] < 0 and event.kind == EventKind.WEIGHTS_REFUSED:  # a transport that failed says nothing of the model
            text += "; it has loaded none: is its --model-path the model of the run?"
        yield Finding("warning", "weights refused", name, text, scene.now - event.wall)


def failing_engines(scene: Scene) -> Iterator[Finding]:
    """Engines that do not start, or were given up as dead or stalled; not of workers that were told to end."""
    kinds = (EventKind.ENGINE_STALLED, EventKind.ENGINE_BOOT_FAILED, EventKind.ENGINE_BOOT_REFUSED)
    failures = [e for e in scene.news if e.kind in kinds and scene.now - e.wall < FAILED_S]
    serving = {a.vitals.actor for a in _workers(scene) if a.vitals.version >= 0 and a.vitals.wait is not Wait.BOOTING}
    ending = {a.vitals.actor for a in scene.snapshot.of_role("generation") if a.vitals.state in ("draining", "stopped")}
    for actor in sorted({e.actor for e in failures} - ending):
        own = [e for e in failures if e.actor == actor]
        often = len(own) >= FAILED_OFTEN
        if scene.over or (not often and actor in serving):
            continue
        times = f"failed {len(own)} times in {duration(scene.now - own[0].wall)}" if len(own) > 1 else "failed"
        text = f"the engine of {actor} {times}, the last time: {own[-1].kind}: {shorten(own[-1].text, 300)}"
        yield Finding("error" if often else "warning", "engine failing", actor, text, scene.now - own[0].wall)


def silent_engines(scene: Scene) -> Iterator[Finding]:
    """Engines that have requests and give no token."""
    for actor in _workers(scene):
        counters = actor.vitals.counters
        silent_s = counters.get("engine/silent_s", 0.0)
        if silent_s > SILENT_S:
            asked = f"{counters.get('engine/asked', 0):.0f} requests"
            text = (
                f"the engine of {actor.vitals.actor} has given no token for {duration(silent_s)} to any of its {asked}: it hangs, "
                "or reads very long prompts. After --engine-token-deadline-s its samples go elsewhere and it starts anew"
            )
            yield Finding("error", "engine silent", actor.vitals.actor, text, silent_s)


def slow_engines(scene: Scene) -> Iterator[Finding]:
    """Engines that give far fewer tokens than their peers, in all and per request."""
    rates = {}
    for actor in _workers(scene):
        rate, asked = (actor.vitals.counters.get(f"engine/{name}", 0.0) for name in ("tokens_per_s", "asked"))
        if rate and asked:
            rates[actor.vitals.actor] = (rate, rate / asked)
    for name, own in rates.items():
        peers = [rate for other, rate in rates.items() if other != name]
        usual = [median(column) for column in zip(*peers, strict=True)]
        if usual and all(mine < SLOW * theirs for mine, theirs in zip(own, usual, strict=True)):
            text = (
                f"the engine of {name} gives {own[0]:.0f} tokens/s, its peers {usual[0]:.0f}: look at what else runs on its GPU "
                "or host, its clocks and its log"
            )
            yield Finding("warning", "slow engine", name, text)


def slow_weights(scene: Scene) -> Iterator[Finding]:
    """Versions that take longer to load than steps take to make them."""
    loads = [float(e.data.get("total_s", 0.0)) for e in scene.news if e.kind == EventKind.ACTIVATED]
    gaps = [s.gap_s for s in scene.steps[-8:] if s.gap_s and not s.resumed]
    if len(loads) < 3 or len(gaps) < 3 or scene.over:
        return
    load_s, step_s = median(loads), median(gaps)
    if load_s > max(SLOW_LOAD_S, 2 * step_s):
        text = (
            f"a version takes {duration(load_s)} to arrive, a step {duration(step_s)}: samples are born stale. Use a faster "
            "transport (--update-weight-transport), or publish more seldom (--update-weights-interval)"
        )
        yield Finding("warning", "slow weights", "generation", text)
