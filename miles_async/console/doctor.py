"""Who waits for what, since when and why, and what is wrong (pure, over one `Scene`).

`diagnose` gives findings: an `error` will not go away by itself, a `warning` may, an `info` explains. `explain` gives one
sentence per living actor. Waiting is no fault by itself: every room but the slowest one waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from bus.ledger import LedgerCheck
from bus.topology import BY_NAME, STREAMS
from miles_async.console.heads import Head
from miles_async.console.places import Incomplete, Places, owners
from miles_async.console.server import ServerState
from miles_async.console.snapshot import ActorFacts, Snapshot
from miles_async.console.text import duration, human_bytes, plural, shorten

Level = Literal["error", "warning", "info"]
ROLES = ("trainer", "sampler", "generation", "reward", "filter", "partial", "publisher")
ROLE_OF_READERS = {"generation": "generation", "reward": "reward", "filter": "filter", "partial": "partial",
                   "trainer": "trainer", "evaluator": "evaluator"}  # fmt: skip
PATIENCE_S = 60.0  # a wait that should be short is a fault after this
STRAGGLER_S = 120.0  # a group kept incomplete for so long is worth a warning
IDLE_WAITS = ("an entry", "news", "slots", "announcements", "a version to measure", "a free slot")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence, what it is about, and for how long it has been so (0 = unknown)."""

    level: Level
    rule: str
    about: str
    text: str
    since_s: float = 0.0


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """All that the doctor looks at. `verdicts`: newest verdict heads, oldest first. `knobs`: live values, may be empty."""

    snapshot: Snapshot
    places: Places
    server: ServerState
    ledger: LedgerCheck
    verdicts: list[Head]
    dead: list[Head]
    knobs: Mapping[str, Any]
    now: float  # server time
    lease_s: float
    stream_max_bytes: int

    @property
    def over(self) -> bool:
        """The trainer did its last step, or everything was stopped on purpose."""
        return self.snapshot.policy.finished or (
            bool(self.snapshot.actors) and all(a.vitals.state == "stopped" for a in self.snapshot.actors)
        )


def diagnose(scene: Scene) -> list[Finding]:
    """All findings, gravest first."""
    found = [finding for rule in RULES for finding in rule(scene)]
    order = ("error", "warning", "info")
    return sorted(found, key=lambda f: order.index(f.level))


# -- rules --------------------------------------------------------------------------------------------------------------


def silent_actors(scene: Scene) -> Iterator[Finding]:
    """Heartbeats that stopped. An elastic worker that is gone for good and whose leases have passed on is only history."""
    held = owners(scene.places.pending.values())
    for actor in scene.snapshot.actors:
        vitals, life = actor.vitals, actor.life
        if vitals.state == "failed":
            yield _error("actor failed", vitals.actor, f"{vitals.actor} failed: {vitals.note or 'see its log'}", actor.age_s)
        if life not in ("late", "dead"):
            continue
        peers = [a for a in scene.snapshot.of_role(vitals.role) if a.life == "alive"]
        n = held.get(vitals.actor, 0)
        what = "its process is gone" if life == "dead" else f"it last beat on {vitals.host}"
        text = f"{vitals.actor} ({vitals.role}, pid {vitals.pid}) has been silent for {duration(actor.age_s)}; {what}"
        if peers and not n and vitals.role in ("generation", "reward"):
            yield Finding(level="info", rule="gone", about=vitals.actor, since_s=actor.age_s,
                          text=f"{text}; it holds nothing, its work went to {peers[0].vitals.actor}")  # fmt: skip
            continue
        last = f"; it was waiting for {vitals.waits_for}" if vitals.waits_for else ""
        kept = f"; it holds {plural(n, 'entry')}, claimed by a peer {scene.lease_s:g} s after its last word" if n else ""
        yield _error("silent actor", vitals.actor, text + kept + last, actor.age_s)


def missing_rooms(scene: Scene) -> Iterator[Finding]:
    """A room without a living actor, and what waits because of it."""
    if scene.over:
        return
    snapshot = scene.snapshot
    if not snapshot.actors:
        yield _error("nobody there", "run", "no actor has ever sent a heartbeat: nothing is running on this bus", 0.0)
        return
    for role in ROLES:
        if role in snapshot.roles_alive:
            continue
        waiting = [
            f"{plural(s.length, 'entry')} on {s.name}"
            for s in snapshot.streams.values()
            if s.length and any(ROLE_OF_READERS.get(r) == role for r in BY_NAME[s.name].readers)
        ]
        known = snapshot.of_role(role)
        last = f"; {known[0].vitals.actor} {known[0].vitals.state} {duration(known[0].age_s)} ago" if known else ""
        name = "generation worker" if role == "generation" else role
        remedy = " Start one with miles-async worker." if role == "generation" else ""
        behind = f"; {', '.join(waiting)} wait for it" if waiting else ""
        yield _error("no actor", role, f"no living {name}{last}{behind}.{remedy}", known[0].age_s if known else 0.0)


def unserved_entries(scene: Scene) -> Iterator[Finding]:
    """Entries whose lease nobody renews and nobody takes over."""
    for stream in scene.snapshot.streams.values():
        for r in stream.readers:
            if r.readers == "trainer" or not r.oldest_id or r.oldest_idle_s < max(3 * scene.lease_s, 20.0):
                continue
            sample = scene.places.pending.get((stream.name, r.oldest_id))
            who = next((h.sample for h in scene.places.heads.get(stream.name, ()) if h.id == r.oldest_id), "")
            yield _error(
                "abandoned entry",
                stream.name,
                f"entry {r.oldest_id} of {stream.name}{f' (sample {who})' if who else ''} is held by {r.oldest_owner}, "
                f"which has not renewed its lease for {duration(r.oldest_idle_s)}, and no living {r.readers} reader claims "
                f"it (delivered {sample.deliveries if sample else r.oldest_deliveries} times)",
                r.oldest_idle_s,
            )


def stale_workers(scene: Scene) -> Iterator[Finding]:
    """Workers that may take no lease, because they do not serve the version that was announced."""
    policy = scene.snapshot.policy
    for actor in scene.snapshot.of_role("generation"):
        vitals = actor.vitals
        if actor.life != "alive" or vitals.version >= policy.announced or vitals.state == "draining":
            continue
        late = policy.announced_age_s > 30.0
        has = f"serves version {vitals.version}" if vitals.version >= 0 else "serves no version yet"
        text = f"{vitals.actor} {has}; version {policy.announced} was announced {duration(policy.announced_age_s)} ago"
        doing = f", it waits for {vitals.waits_for}" if vitals.waits_for else ""
        yield Finding(level="warning" if late else "info", rule="stale worker", about=vitals.actor,
                      text=text + doing, since_s=policy.announced_age_s)  # fmt: skip


def starving_filter(scene: Scene) -> Iterator[Finding]:
    """Groups rejected one after the other."""
    streak, reasons = 0, dict[str, int]()
    for head in reversed(scene.verdicts):
        note = head.fields.get("note", "")
        if not note.startswith("dropped"):
            break
        streak += 1
        reason = note.removeprefix("dropped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    wave = max(1, int(scene.knobs.get("over_sampling_batch_size", 32)))
    most = int(scene.knobs.get("max_waves", 0))
    if streak < 2 * wave:
        return
    why = ", ".join(f"{n} × {reason}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1])[:3])
    level: Level = "error" if most and streak >= most * wave else "warning"
    limit = f"; the run stops at max_waves = {most}" if most else ""
    yield Finding(level=level, rule="filter starving", about="filter",
                  text=f"the last {streak} groups were all dropped ({why}), {streak / wave:.1f} waves of {wave}{limit}. Make "
                  "the prompts easier or harder, or change the filter")  # fmt: skip


def incomplete_groups(scene: Scene) -> Iterator[Finding]:
    """Groups at the filter whose siblings do not come."""
    alive = {a.vitals.actor for a in scene.snapshot.actors if a.life == "alive"}
    found = scene.places.incomplete()
    for group in found[:5]:
        age = scene.now - group.since
        lost = [s for s, place in group.missing.items() if place is None]
        orphaned = [
            s for s, p in group.missing.items() if p and p.pending and p.pending.owner not in alive and age > scene.lease_s
        ]
        level: Level = "error" if lost and age > 10 else "warning" if orphaned or age > STRAGGLER_S else "info"
        yield Finding(level=level, rule="incomplete group", about=group.group_id, text=incomplete_text(group, scene.now),
                      since_s=age)  # fmt: skip
    if len(found) > 5:
        yield Finding(level="info", rule="incomplete group", about="filter", text=f"{len(found) - 5} more incomplete groups")


def incomplete_text(group: Incomplete, now: float) -> str:
    """Which siblings a group waits for and who has them."""
    parts = [
        f"{sample} " + (place.text(now) if place else "is in no stream: see miles-async ledger --check")
        for sample, place in list(group.missing.items())[:3]
    ]
    more = f" and {len(group.missing) - 3} more" if len(group.missing) > 3 else ""
    return (
        f"group {group.group_id} has {group.here} of {group.wanted} samples at the filter since {duration(now - group.since)}; "
        f"missing: {'; '.join(parts)}{more}"
    )


def long_waits(scene: Scene) -> Iterator[Finding]:
    """Waits that should be short: boots, activations, saves; and a trainer without groups."""
    for actor in scene.snapshot.actors:
        vitals = actor.vitals
        if actor.life != "alive" or not vitals.waits_for or vitals.waits_for.startswith(IDLE_WAITS) or scene.over:
            continue
        since = scene.snapshot.wall - vitals.waits_since if vitals.waits_since else 0.0
        if vitals.role == "trainer" and " on groups" in vitals.waits_for:
            since = max(since, scene.snapshot.policy.step_age_s)
        if since > PATIENCE_S:
            yield Finding(level="warning", rule="long wait", about=vitals.actor, since_s=since,
                          text=f"{vitals.actor} has waited {duration(since)} for {vitals.waits_for}{_because(actor, scene)}")  # fmt: skip
        if vitals.state == "stalled":
            yield _error("stalled", vitals.actor, f"{vitals.actor} is stalled: {vitals.note}", since)


def full_streams(scene: Scene) -> Iterator[Finding]:
    """Streams at their byte bound: their writers wait."""
    bound = scene.stream_max_bytes
    blocked = [a.vitals.actor for a in scene.snapshot.actors if a.vitals.waits_for.startswith("room on stream")]
    for stream in scene.snapshot.streams.values():
        if not bound or stream.n_bytes < 0.9 * bound:
            continue
        readers = ", ".join(BY_NAME[stream.name].readers)
        waits = f"; {', '.join(blocked)} wait for room" if blocked else ""
        yield Finding(level="error" if stream.n_bytes >= bound else "warning", rule="full stream", about=stream.name,
                      text=f"{stream.name} holds {human_bytes(stream.n_bytes)} of at most {human_bytes(bound)}{waits}. Its "
                      f"reader ({readers}) is too slow or gone, or --stream-max-bytes is too small")  # fmt: skip


def unfit_server(scene: Scene) -> Iterator[Finding]:
    """Memory and persistence of the Redis."""
    s = scene.server
    if s.eviction != "noeviction":
        yield _error("eviction", "redis", f"Redis has maxmemory-policy {s.eviction}: it evicts unread entries. Set noeviction")
    if s.role not in ("master", "primary"):
        yield _error("role", "redis", f"Redis is a {s.role} and takes no writes. Point --bus-url at its primary")
    if s.aof not in ("", "ok"):
        yield _error("append-only file", "redis", f"Redis cannot write its append-only file ({s.aof}): free its disk")
    if not s.aof:
        text = "Redis keeps no append-only file: a crash of it loses what came after its last snapshot. Set appendonly yes"
        yield Finding(level="warning", rule="persistence", about="redis", text=text)
    if s.memory_share > 0.85:
        text = f"Redis uses {human_bytes(s.used_memory)} of maxmemory {human_bytes(s.max_memory)}: at the limit writers wait"
        yield Finding(level="error" if s.memory_share > 0.97 else "warning", rule="memory", about="redis", text=text)


def dead_letters(scene: Scene) -> Iterator[Finding]:
    """Entries that failed for good."""
    if not scene.dead:
        return
    newest = scene.dead[-1]
    n = scene.snapshot.streams["dead"].length
    text = f"{plural(n, 'dead letter')}; the newest: {shorten(newest.fields.get('note', ''), 120)}. miles-async bus dead list"
    yield Finding(level="warning", rule="dead letters", about="dead", text=text, since_s=max(0.0, scene.now - newest.wall))


def open_ledger(scene: Scene) -> Iterator[Finding]:
    """Accounts that do not close."""
    if not scene.ledger.closes:
        yield _error("ledger", "ledger", f"the ledger does not close: {scene.ledger.text()}")


RULES: tuple[Callable[[Scene], Iterator[Finding]], ...] = (
    missing_rooms,
    silent_actors,
    unserved_entries,
    open_ledger,
    unfit_server,
    full_streams,
    long_waits,
    stale_workers,
    starving_filter,
    incomplete_groups,
    dead_letters,
)


def _error(rule: str, about: str, text: str, since_s: float = 0.0) -> Finding:
    return Finding(level="error", rule=rule, about=about, text=text, since_s=since_s)


# -- sentences ----------------------------------------------------------------------------------------------------------


def explain(scene: Scene) -> list[tuple[str, str]]:
    """(actor, sentence) for each living actor: what it does or waits for, since when, and why."""
    out: list[tuple[str, str]] = []
    for actor in scene.snapshot.actors:
        vitals = actor.vitals
        if actor.life != "alive":
            continue
        busy = f"works on {plural(vitals.in_flight, 'entry')}" if vitals.in_flight else "works"
        if not vitals.waits_for or (vitals.in_flight and vitals.waits_for.startswith(IDLE_WAITS)):
            out.append((vitals.actor, f"{vitals.state if vitals.state == 'draining' else busy}{_noted(vitals.note)}"))
            continue
        since = _since(actor, scene)
        ago = f" since {duration(since)}" if since >= 1 else ""
        out.append((vitals.actor, f"waits for {vitals.waits_for}{ago}{_because(actor, scene)}"))
    return out


def _noted(note: str) -> str:
    return f" ({note})" if note else ""


def _since(actor: ActorFacts, scene: Scene) -> float:
    """Seconds of the wait. A loop that asks every half second restarts its own clock, so what did not come tells better:
    the age of the newest entry on the streams it reads, or of the last step for the trainer."""
    vitals = actor.vitals
    own = scene.snapshot.wall - vitals.waits_since if vitals.waits_since else 0.0
    if vitals.role == "trainer" and " on groups" in vitals.waits_for:
        return max(own, scene.snapshot.policy.step_age_s)
    if vitals.waits_for.startswith("an entry of"):
        names = [s.name for s in STREAMS if s.readers and s.name in vitals.waits_for.replace("+", " ").replace(",", " ").split()]
        ages = [scene.snapshot.streams[n].newest_age_s for n in names if scene.snapshot.streams[n].newest_id]
        return max([own, *([min(ages)] if ages else [])])
    return own


def _because(actor: ActorFacts, scene: Scene) -> str:
    """Why the wait lasts, as far as the streams tell."""
    snapshot, stages = scene.snapshot, scene.places.stages()
    limit = (int(scene.knobs.get("max_weight_staleness", 0)) + 1) * int(scene.knobs.get("rollout_batch_size", 0))
    where = ", ".join(f"{n} at {stage}" for stage, n in stages.items() if n) or "none open"
    open_text = f"{plural(snapshot.open_groups, 'group')} open" + (f" of at most {limit}" if limit else "") + f" ({where})"
    match actor.vitals.role:
        case "trainer" if " on groups" in actor.vitals.waits_for:
            late = scene.places.incomplete()
            straggler = f"; {incomplete_text(late[0], scene.now)}" if late else ""
            return f": {open_text}{straggler}"
        case "sampler":
            policy = snapshot.policy
            if policy.active < 0:
                return ": no engine serves a version yet, groups issued now would be born stale"
            return f": {open_text}, a slot comes free when a group is trained and its version active, or dropped"
        case "generation" if actor.vitals.waits_for == "a current version":
            policy = snapshot.policy
            if policy.announced < 0:
                return ": the trainer has announced none yet"
            return f": version {policy.announced} was announced {duration(policy.announced_age_s)} ago, the publisher orders it"
        case "generation" | "reward" | "filter":
            return f": {open_text}"
        case "publisher":
            return f": version {snapshot.policy.announced} is the newest announced"
    return ""


__all__ = ("Finding", "Level", "Scene", "diagnose", "explain", "incomplete_text")
