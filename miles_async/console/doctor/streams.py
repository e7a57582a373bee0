"""Streams, entries, accounts, and the server under them (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from bus.messages.waits import Wait
from bus.server.checks import ServerFacts, unfit
from bus.topology import BY_NAME
from miles_async.console.doctor.finding import BRIEF_S, Finding, Level
from miles_async.console.explain import incomplete_text
from miles_async.console.scene import Scene
from miles_async.console.text import duration, human_bytes, plural

STOPS_WRITES = ("role", "append-only file", "snapshot", "memory")
"""Rules whose errors may keep a Redis from taking writes, heartbeats among them."""
STRAGGLER_S = 120.0  # a group kept incomplete for so long is worth a warning


def unfit_server(scene: Scene) -> Iterator[Finding]:
    """Memory, persistence and role of the Redis."""
    yield from faults_of(scene.server)


def faults_of(s: ServerFacts) -> Iterator[Finding]:
    """The same, of what INFO says."""
    for rule, why in unfit(s.role, s.eviction).items():
        yield Finding("error", rule, "redis", f"Redis {why}")
    if s.aof not in ("", "ok"):
        text = f"Redis cannot write its append-only file ({s.aof}): free its disk"
        yield Finding("error", "append-only file", "redis", text)
    if not s.snapshot_ok:
        text = "Redis cannot write its snapshot and refuses writes (stop-writes-on-bgsave-error): free its disk, or correct its dir"
        yield Finding("error", "snapshot", "redis", text)
    if not s.aof:
        text = "Redis keeps no append-only file: if it crashes, what came after its last snapshot is lost. Set appendonly yes"
        yield Finding("warning", "persistence", "redis", text)
    if s.memory_share > 0.85:
        text = f"Redis uses {human_bytes(s.used_memory)} of maxmemory {human_bytes(s.max_memory)}: at the limit writers wait"
        yield Finding("error" if s.memory_share > 0.97 else "warning", "memory", "redis", text)


def full_streams(scene: Scene) -> Iterator[Finding]:
    """Streams at their byte bound: their writers wait."""
    bound = scene.stream_max_bytes
    blocked = [a.vitals.actor for a in scene.snapshot.actors if a.vitals.wait is Wait.STREAM_SPACE]
    for stream in scene.snapshot.streams.values():
        if not bound or stream.n_bytes < 0.9 * bound:
            continue
        waits = f"; {', '.join(blocked)} wait for space" if blocked else ""
        text = (
            f"{stream.name} holds {human_bytes(stream.n_bytes)} of at most {human_bytes(bound)}{waits}. Its reader "
            f"({', '.join(BY_NAME[stream.name].readers)}) is too slow or gone, or --stream-max-bytes is too small"
        )
        yield Finding("error" if stream.n_bytes >= bound else "warning", "full stream", stream.name, text)


def abandoned_entries(scene: Scene) -> Iterator[Finding]:
    """Entries whose lease nobody renews and nobody takes over. The trainer alone reads groups, so it needs no lease."""
    if not scene.snapshot.living():
        return  # what a run that was stopped left for its next start
    for stream in scene.snapshot.streams.values():
        for r in stream.readers:
            if r.readers == "trainer" or not r.oldest_id or r.oldest_idle_s < max(3 * scene.lease_s, 20.0):
                continue
            sample = next((h.sample for h in scene.places.heads.get(stream.name, ()) if h.id == r.oldest_id), "")
            named = f" (sample {sample})" if sample else ""
            text = (
                f"entry {r.oldest_id} of {stream.name}{named} is held by {r.oldest_owner}, which has not renewed its lease "
                f"for {duration(r.oldest_idle_s)}, and no living {r.readers} reader claims it (delivered "
                f"{plural(r.oldest_deliveries, 'time')})"
            )
            yield Finding("error", "abandoned entry", stream.name, text, r.oldest_idle_s)


def open_ledger(scene: Scene) -> Iterator[Finding]:
    """Accounts that do not close."""
    if not scene.ledger.closes:
        yield Finding("error", "ledger", "ledger", f"the ledger does not close: {scene.ledger.text()}")


def incomplete_groups(scene: Scene) -> Iterator[Finding]:
    """Groups at the filter whose siblings do not come."""
    alive = {a.vitals.actor for a in scene.snapshot.living()}
    found = [group for group in scene.places.incomplete() if scene.now - group.since > BRIEF_S]
    for group in found[:5]:
        age = scene.now - group.since
        places = group.missing.values()
        nowhere = any(place is None for place in places) and age > 10.0
        orphaned = any(p and p.pending and p.pending.owner not in alive for p in places) and age > scene.lease_s
        level: Level = "error" if nowhere else "warning" if orphaned or age > STRAGGLER_S else "info"
        yield Finding(level, "incomplete group", group.group_id, incomplete_text(group, scene.now), age)
    if len(found) > 5:
        yield Finding("info", "incomplete group", "filter", f"{len(found) - 5} more groups are incomplete")


def lost_streams(scene: Scene) -> Iterator[Finding]:
    """What somebody deleted on the server while the run was at work."""
    if not scene.snapshot.living():
        return
    for stream in scene.snapshot.streams.values():
        gone = set(BY_NAME[stream.name].readers) - {r.readers for r in stream.readers}
        if gone:
            text = (
                f"{stream.name} has no readers {', '.join(sorted(gone))} any more: somebody deleted the stream or its group on "
                "Redis. What was on it is lost: stop the run; the same miles-async train command goes on from the checkpoint"
            )
            yield Finding("error", "stream gone", stream.name, text)
    served = max((a.vitals.version for a in scene.snapshot.living("generation")), default=-1)
    logs = {"knobs": bool(scene.knobs), "policy": scene.snapshot.policy.entries > 0}
    gone_logs = [name for name, has_some in logs.items() if not has_some]
    if gone_logs and served >= 0:
        text = (
            f"{' and '.join(gone_logs)} is empty on Redis although workers serve version {served}: somebody deleted it. Stop the "
            "run; the same miles-async train command goes on from the checkpoint"
        )
        yield Finding("error", "stream gone", gone_logs[0], text)
