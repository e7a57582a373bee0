"""What is wrong with a run (pure, over one `Scene`).

An `error` will not go away by itself, a `warning` may, an `info` explains. Waiting is no fault by itself: every room but
the slowest one waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from actors.trainer.selfcheck import checks_made, failures
from bus.messages.control import UNLENT
from bus.topology import BY_NAME, OPTIONAL, ROLES
from miles_async.console.explain import IDLE_WAITS, TURN_WAIT, because, incomplete_text, waiting_since
from miles_async.console.places import owners
from miles_async.console.scene import Scene
from miles_async.console.text import duration, human_bytes, plural, shorten

Level = Literal["error", "warning", "info"]
BRIEF_S = 5.0  # shorter than this is the ordinary course of things
PATIENCE_S = 60.0  # a wait that should be short is a fault after this
STALE_S = 30.0  # a worker may serve an older version for so long
CLOCK_S = 5.0  # a clock may differ by so much
STRAGGLER_S = 120.0  # a group kept incomplete for so long is worth a warning


class Finding(msgspec.Struct, frozen=True):
    """One sentence, what it is about, and for how long it has been so (seconds, 0 = unknown)."""

    level: Level
    rule: str
    about: str
    text: str
    since_s: float = 0.0


def diagnose(scene: Scene) -> list[Finding]:
    """All findings, gravest first."""
    found = [finding for rule in RULES for finding in rule(scene)]
    order = ("error", "warning", "info")
    return sorted(found, key=lambda f: order.index(f.level))


def missing_rooms(scene: Scene) -> Iterator[Finding]:
    """A room without a living actor, and what waits because of it."""
    snapshot = scene.snapshot
    if scene.over:
        return
    if not snapshot.actors:
        yield Finding(
            "error", "nobody there", "run", "no actor has ever sent a heartbeat: nothing is running on this bus"
        )
        return
    for role in (r for r in ROLES if r not in OPTIONAL):
        if role in snapshot.roles_alive:
            continue
        waiting = [
            f"{plural(s.length, 'entry')} on {s.name}"
            for s in snapshot.streams.values()
            if s.length and role in BY_NAME[s.name].readers
        ]
        known = snapshot.of_role(role)
        age = min((a.age_s for a in known), default=0.0)
        last = (
            "; " + ", ".join(f"{a.vitals.actor} {a.vitals.state} {duration(a.age_s)} ago" for a in known[:3])
            if known
            else ""
        )
        behind = f"; waiting for it: {', '.join(waiting)}" if waiting else ""
        remedy = " Start one with miles-async worker." if role == "generation" else ""
        name = "generation worker" if role == "generation" else role
        yield Finding("error", "no actor", role, f"no living {name}{last}{behind}.{remedy}", age)


def no_launcher(scene: Scene) -> Iterator[Finding]:
    """A launcher that is gone although it did not say that it ends: nobody starts again what dies."""
    for launcher in scene.snapshot.of_role("launcher"):
        left = [a.vitals.actor for a in scene.snapshot.actors if a.life == "alive"]
        if launcher.life not in ("late", "dead") or not left:
            continue
        gone = f"no launcher: pid {launcher.vitals.pid} on {launcher.vitals.host} has been silent for {duration(launcher.age_s)}"
        if scene.snapshot.policy.finished:
            text = f"{gone}. The last step is done, and {plural(len(left), 'actor')} still wait: miles-async stop ends them"
        else:
            text = (
                f"{gone}. {plural(len(left), 'actor')} work on and the record is kept, but nobody starts again what dies. The "
                "same miles-async train command takes them over, miles-async stop ends them"
            )
        yield Finding("error", "no launcher", "launcher", text, launcher.age_s)


def silent_actors(scene: Scene) -> Iterator[Finding]:
    """Heartbeats that stopped. An elastic worker that is gone for good and whose leases have passed on is only history."""
    held = owners(scene.places.pending.values())
    for actor in scene.snapshot.actors:
        vitals, life, age = actor.vitals, actor.life, actor.age_s
        if vitals.role == "launcher":
            continue
        if vitals.state == "failed":
            yield Finding(
                "error", "actor failed", vitals.actor, f"{vitals.actor} failed: {vitals.note or 'see its log'}", age
            )
        if life not in ("late", "dead"):
            continue
        n = held.get(vitals.actor, 0)
        what = "its process is gone" if life == "dead" else f"its process was on {vitals.host}"
        text = f"{vitals.actor} ({vitals.role}, pid {vitals.pid}) has been silent for {duration(age)}; {what}"
        peers = [a.vitals.actor for a in scene.snapshot.of_role(vitals.role) if a.life == "alive"]
        if peers and not n and vitals.role in ("generation", "reward"):
            yield Finding("info", "gone", vitals.actor, f"{text}; it holds nothing, {peers[0]} works on", age)
            continue
        kept = (
            f"; it holds {plural(n, 'entry')}, which a peer claims {scene.lease_s:g} s after its last word" if n else ""
        )
        last = f"; it was waiting for {vitals.waits_for}" if vitals.waits_for else ""
        yield Finding("error", "silent actor", vitals.actor, text + kept + last, age)


def abandoned_entries(scene: Scene) -> Iterator[Finding]:
    """Entries whose lease nobody renews and nobody takes over. The trainer alone reads groups, so it needs no lease."""
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


def unfit_server(scene: Scene) -> Iterator[Finding]:
    """Memory, persistence and role of the Redis."""
    s = scene.server
    if s.eviction != "noeviction":
        yield Finding(
            "error", "eviction", "redis", f"Redis evicts unread entries ({s.eviction}): set maxmemory-policy noeviction"
        )
    if s.role not in ("master", "primary"):
        yield Finding(
            "error", "role", "redis", f"Redis is a {s.role} and takes no writes: point --bus-url at its primary"
        )
    if s.aof not in ("", "ok"):
        yield Finding(
            "error", "append-only file", "redis", f"Redis cannot write its append-only file ({s.aof}): free its disk"
        )
    if not s.aof:
        text = "Redis keeps no append-only file: if it crashes, what came after its last snapshot is lost. Set appendonly yes"
        yield Finding("warning", "persistence", "redis", text)
    if s.memory_share > 0.85:
        text = f"Redis uses {human_bytes(s.used_memory)} of maxmemory {human_bytes(s.max_memory)}: at the limit writers wait"
        yield Finding("error" if s.memory_share > 0.97 else "warning", "memory", "redis", text)


def full_streams(scene: Scene) -> Iterator[Finding]:
    """Streams at their byte bound: their writers wait."""
    bound = scene.stream_max_bytes
    blocked = [a.vitals.actor for a in scene.snapshot.actors if a.vitals.waits_for.startswith("room on stream")]
    for stream in scene.snapshot.streams.values():
        if not bound or stream.n_bytes < 0.9 * bound:
            continue
        waits = f"; {', '.join(blocked)} wait for room" if blocked else ""
        text = (
            f"{stream.name} holds {human_bytes(stream.n_bytes)} of at most {human_bytes(bound)}{waits}. Its reader "
            f"({', '.join(BY_NAME[stream.name].readers)}) is too slow or gone, or --stream-max-bytes is too small"
        )
        yield Finding("error" if stream.n_bytes >= bound else "warning", "full stream", stream.name, text)


def long_waits(scene: Scene) -> Iterator[Finding]:
    """Waits that should be short: boots, activations, saves; and a trainer without groups."""
    for actor in scene.snapshot.actors:
        vitals = actor.vitals
        if actor.life != "alive" or scene.over:
            continue
        since = waiting_since(actor, scene)
        if vitals.state == "stalled":
            yield Finding("error", "stalled", vitals.actor, f"{vitals.actor} is stalled: {vitals.note}", since)
        if vitals.waits_for and not vitals.waits_for.startswith((*IDLE_WAITS, *TURN_WAIT)) and since > PATIENCE_S:
            text = f"{vitals.actor} has waited {duration(since)} for {vitals.waits_for}{because(actor, scene)}"
            yield Finding("warning", "long wait", vitals.actor, text, since)


def stale_workers(scene: Scene) -> Iterator[Finding]:
    """Workers that may take no lease, because they do not serve the version that was announced."""
    policy = scene.snapshot.policy
    for actor in scene.snapshot.of_role("generation"):
        vitals = actor.vitals
        if actor.life != "alive" or vitals.version >= policy.announced or vitals.state == "draining" or scene.over:
            continue
        if vitals.waits_for == UNLENT:
            continue  # it takes a version when it has a GPU
        behind_s = policy.behind_s(vitals.version)
        if behind_s < BRIEF_S and vitals.version >= 0:
            continue
        has = f"serves version {vitals.version}" if vitals.version >= 0 else "serves no version yet"
        doing = f"; it waits for {vitals.waits_for}" if vitals.waits_for else ""
        doing += f" ({vitals.note})" if vitals.note else ""
        text = f"{vitals.actor} {has}, newer ones have been announced for {duration(behind_s)} (now {policy.announced}){doing}"
        yield Finding("warning" if behind_s > STALE_S else "info", "stale worker", vitals.actor, text, behind_s)


def wrong_clocks(scene: Scene) -> Iterator[Finding]:
    """Hosts whose clocks differ from Redis's. Nothing is decided by them."""
    off = {a.vitals.host: a.vitals.wall + a.age_s - scene.now for a in scene.snapshot.actors if a.life == "alive"}
    for host, by_s in sorted(off.items()):
        if abs(by_s) > CLOCK_S:
            text = (
                f"the clock of {host} is {duration(abs(by_s))} {'ahead of' if by_s > 0 else 'behind'} Redis's: the times that "
                "its actors write into logs and events are off by as much, and nothing else. Correct it (NTP)"
            )
            yield Finding("warning", "clock", host, text)


def starving_filter(scene: Scene) -> Iterator[Finding]:
    """Groups rejected one after the other."""
    notes = [head.fields.get("note", "") for head in scene.verdicts]
    kept = max((i for i, note in enumerate(notes) if not note.startswith("dropped")), default=-1)
    reasons = Counter(note.removeprefix("dropped: ") for note in notes[kept + 1 :])
    streak = reasons.total()
    wave = max(1, *(int(scene.knobs.get(name, 0)) for name in ("over_sampling_batch_size", "rollout_batch_size")))
    if streak < 2 * wave:
        return
    most = int(scene.knobs.get("max_waves") or 0)
    why = ", ".join(f"{n} × {reason}" for reason, n in reasons.most_common(3))
    limit = f"; the run ends at max_waves = {most}" if most else ""
    text = (
        f"the last {streak} groups were all dropped ({why}): {streak / wave:.1f} waves of {wave}{limit}. Make the prompts "
        "easier or harder, or change the filter"
    )
    yield Finding("error" if most and streak >= most * wave else "warning", "filter starving", "filter", text)


def incomplete_groups(scene: Scene) -> Iterator[Finding]:
    """Groups at the filter whose siblings do not come."""
    alive = {a.vitals.actor for a in scene.snapshot.actors if a.life == "alive"}
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


def dead_letters(scene: Scene) -> Iterator[Finding]:
    """Entries that failed for good."""
    if not scene.dead:
        return
    newest = scene.dead[-1]
    what = f"{newest.sample} on {shorten(newest.fields.get('note', ''), 120)}"
    n = plural(scene.snapshot.streams["dead"].length, "dead letter")
    age = max(0.0, scene.now - newest.wall)
    yield Finding("warning", "dead letters", "dead", f"{n}, the newest {what}. See miles-async bus dead list", age)


def first_step(scene: Scene) -> Iterator[Finding]:
    """What the run's first training step said about itself, where its record can be read."""
    found = failures(scene.first_step)
    for line in found:
        yield Finding("warning", "self-check", "trainer", f"step 1 failed its self-check: {line}")
    if not found and (made := checks_made(scene.first_step)):
        yield Finding("info", "self-check", "trainer", f"step 1 passed the {made} checks of its self-check")


def governor_at_its_edge(scene: Scene) -> Iterator[Finding]:
    """What would serve lies outside of what the user allows, or is left to hands."""
    for note in scene.governor.notes if scene.governor is not None and scene.knobs.get("governor") else ():
        yield Finding("info", f"governor {note.kind}", "governor", f"the governor is held up: {note.text}")


RULES: tuple[Callable[[Scene], Iterator[Finding]], ...] = (
    missing_rooms,
    no_launcher,
    silent_actors,
    abandoned_entries,
    open_ledger,
    unfit_server,
    full_streams,
    long_waits,
    stale_workers,
    wrong_clocks,
    starving_filter,
    incomplete_groups,
    dead_letters,
    first_step,
    governor_at_its_edge,
)
