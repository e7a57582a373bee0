"""Rooms, their processes, and the hosts they are on (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from actors.runtime.snapshot import ActorFacts
from bus.identity import are_alike
from bus.messages.events import EventKind
from bus.topology import BY_NAME, OPTIONAL, ROLES
from miles_async.console.doctor.finding import PATIENCE_S, Finding, Level
from miles_async.console.explain import because, waiting_since
from miles_async.console.scene import Scene
from miles_async.console.text import duration, human_bytes, plural, shorten

CLOCK_S = 5.0  # a clock may differ by so much
LINK_S, LINK_RATIO = 0.2, 10.0  # the bus may answer a host so late, and so many times later than others
LOOP_S, LOOP_STARTS = 180.0, 3  # so many restarts of an actor within this time are a loop
HUNG_S = 30.0  # a process that is there may be silent for so long: a busy machine lets it wait
DISK_BYTES, DISK_ERROR_BYTES = 2e9, 2e8
MEMORY_SHARE, MEMORY_ERROR_SHARE = 0.05, 0.02


def _waits_its_turn(actor: ActorFacts, scene: Scene) -> bool:
    """Whether it is silent, but its process is there, not stopped, and not silent for long."""
    stopped = actor.vitals.actor in scene.stopped
    return actor.life == "late" and actor.process is True and not stopped and actor.age_s <= HUNG_S


def missing_rooms(scene: Scene) -> Iterator[Finding]:
    """A room without a living actor, and what waits because of it."""
    snapshot = scene.snapshot
    up_s = [a.vitals.counters.get("up_s", PATIENCE_S) for a in snapshot.living("launcher")]
    if scene.over or any(s < PATIENCE_S for s in up_s):
        return  # it is being started
    if any(a.vitals.state == "draining" for a in snapshot.living("trainer")):
        return  # asked to end: the others have ended, and it writes its last checkpoint
    if not snapshot.actors:
        text = "no actor has ever sent a heartbeat: nothing is running on this bus"
        yield Finding("error", "nobody there", "run", text)
        return
    for role in (r for r in ROLES if r not in OPTIONAL):
        if snapshot.living(role):
            continue
        waiting = [
            f"{plural(s.length, 'entry')} on {s.name}"
            for s in snapshot.streams.values()
            if s.length and role in BY_NAME[s.name].readers
        ]
        known = snapshot.of_role(role)
        if any(_waits_its_turn(a, scene) for a in known):
            continue
        age = min((a.age_s for a in known), default=0.0)
        seen = ", ".join(f"{a.vitals.actor} {a.vitals.state} {duration(a.age_s)} ago" for a in known[:3])
        last = f"; {seen}" if seen else ""
        behind = f"; waiting for it: {', '.join(waiting)}" if waiting else ""
        remedy = " Start one with miles-async worker." if role == "generation" else ""
        name = "rollout worker" if role == "generation" else role
        yield Finding("error", "no actor", role, f"no living {name}{last}{behind}.{remedy}", age)


def no_launcher(scene: Scene) -> Iterator[Finding]:
    """A launcher that is gone although it did not say that it ends: nobody starts again what dies."""
    for launcher in scene.snapshot.of_role("launcher"):
        left = [a.vitals.actor for a in scene.snapshot.living()]
        if launcher.life not in ("late", "dead") or not left or _waits_its_turn(launcher, scene):
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
    held = Counter(pending.owner for pending in scene.places.pending.values())
    for actor in scene.snapshot.actors:
        vitals, life, age = actor.vitals, actor.life, actor.age_s
        if vitals.role == "launcher":
            continue
        if vitals.state == "failed":
            text = f"{vitals.actor} failed: {vitals.note or 'see its log'}"
            yield Finding("error", "actor failed", vitals.actor, text, age)
        if life not in ("late", "dead") or _waits_its_turn(actor, scene):
            continue
        if vitals.actor in scene.stopped:
            text = (
                f"{vitals.actor} (pid {vitals.pid}) is stopped: a signal or a debugger holds it. kill -CONT {vitals.pid} lets it "
                "go on"
            )
            yield Finding("error", "stopped process", vitals.actor, text, age)
            continue
        n = held[vitals.actor]
        what = "its process is gone" if life == "dead" else f"its process was on {vitals.host}"
        text = f"{vitals.actor} ({vitals.role}, pid {vitals.pid}) has been silent for {duration(age)}; {what}"
        peers = [a.vitals.actor for a in scene.snapshot.living(vitals.role)]
        if peers and not n and vitals.role in ("generation", "reward"):
            yield Finding("info", "gone", vitals.actor, f"{text}; it holds nothing, {peers[0]} works on", age)
            continue
        kept = f"; it holds {plural(n, 'entry')}, which a peer claims {scene.lease_s:g} s after its last word" if n else ""
        last = f"; it was waiting for {vitals.waits_for}" if vitals.waits_for else ""
        yield Finding("error", "silent actor", vitals.actor, text + kept + last, age)


def slow_links(scene: Scene) -> Iterator[Finding]:
    """Hosts that the bus answers much later than others. Also of who fell silent a moment ago: what its last word said may be the
    cause."""
    hosts: dict[str, list[ActorFacts]] = {}
    for actor in scene.snapshot.actors:
        there = actor.life in ("alive", "late") and actor.age_s <= PATIENCE_S and not scene.over
        if there and "bus_answer_s" in actor.vitals.counters:
            hosts.setdefault(actor.vitals.host, []).append(actor)
    answers = {host: min(a.vitals.counters["bus_answer_s"] for a in own) for host, own in hosts.items()}
    for host, late_s in sorted(answers.items()):
        usual_s = min((s for other, s in answers.items() if other != host), default=late_s)
        if late_s < max(LINK_S, LINK_RATIO * usual_s):
            continue
        names = ", ".join(a.vitals.actor for a in hosts[host][:3])
        does = next((f" ({a.vitals.actor} {a.vitals.note})" for a in hosts[host] if a.vitals.waits_for and a.vitals.note), "")
        text = (
            f"the bus answers {names} on {host} after {late_s:.1f} s, other hosts after {usual_s:.2g} s: the link of {host} is "
            f"slow or loses packets, or its processors are overloaded{does}. Samples and versions come late: mend that, or stop it"
        )
        yield Finding("warning", "slow link", host, text)


def wrong_clocks(scene: Scene) -> Iterator[Finding]:
    """Hosts whose clocks differ from Redis's. Nothing is decided by them."""
    off = {a.vitals.host: a.vitals.wall + a.age_s - scene.now for a in scene.snapshot.living()}
    for host, by_s in sorted(off.items()):
        if abs(by_s) > CLOCK_S:
            text = (
                f"the clock of {host} is {duration(abs(by_s))} {'ahead of' if by_s > 0 else 'behind'} Redis's: the times that "
                "its actors write into logs and events are off by as much, and nothing else. Correct it (NTP)"
            )
            yield Finding("warning", "clock", host, text)


def other_releases(scene: Scene) -> Iterator[Finding]:
    """Workers that stayed on their hosts while the run was resumed with another release. A launcher replaces its own actors."""
    wanted = scene.snapshot.release
    others = [a.vitals for a in scene.snapshot.living() if not are_alike(a.vitals.release, wanted)]
    for release in sorted({vitals.release for vitals in others}):
        named = [f"{vitals.actor} on {vitals.host}" for vitals in others if vitals.release == release]
        text = (
            f"{shorten(', '.join(named), 200)} of release {release}, the run is of {wanted}: they may mean different things by the "
            f"same message. Stop what is named, and start it with miles_async {wanted}"
        )
        yield Finding("error", "release", named[0].split()[0], text)


def long_waits(scene: Scene) -> Iterator[Finding]:
    """Waits that should be short: boots, activations, saves; and a trainer without groups."""
    for actor in scene.snapshot.actors:
        vitals = actor.vitals
        if actor.life != "alive" or scene.over:
            continue
        since = waiting_since(actor, scene)
        if vitals.state == "stalled":
            yield Finding("error", "stalled", vitals.actor, f"{vitals.actor} is stalled: {vitals.note}", since)
        short = vitals.wait is None or vitals.wait.length == "short"
        if vitals.waits_for and short and since > PATIENCE_S:
            text = f"{vitals.actor} has waited {duration(since)} for {vitals.waits_for}{because(actor, scene)}"
            yield Finding("warning", "long wait", vitals.actor, text, since)


def crash_loops(scene: Scene) -> Iterator[Finding]:
    """Actors that are started again and again."""
    restarts = [e for e in scene.news if e.kind == EventKind.RESTART and scene.now - e.wall < LOOP_S]
    for actor in sorted({e.text.split()[0] for e in restarts}):
        own = [e for e in restarts if e.text.split()[0] == actor]
        if len(own) < LOOP_STARTS or scene.over:
            continue
        since = scene.now - own[0].wall
        text = (
            f"{actor} has ended {len(own)} times in {duration(since)}, the last time so: {shorten(own[-1].text, 300)}. "
            f"logs/{actor}.log has the rest"
        )
        yield Finding("error", "crash loop", actor, text, since)


def full_hosts(scene: Scene) -> Iterator[Finding]:
    """Disks and memory that are nearly used up, as the actors on each host last saw them."""
    alive = [a.vitals for a in scene.snapshot.living()]
    hosts = {vitals.host: vitals.counters for vitals in alive if "free/memory" in vitals.counters}
    for host, has in sorted(hosts.items()):
        disk, memory, share = has.get("free/disk", DISK_BYTES), has["free/memory"], has.get("free/memory_share", 1.0)
        if disk < DISK_BYTES:
            level: Level = "error" if disk < DISK_ERROR_BYTES else "warning"
            text = (
                f"the disk of the run's folder on {host} has {human_bytes(disk)} left: checkpoints and the bus's file fail when "
                "it is full. Free it"
            )
            yield Finding(level, "disk", host, text)
        if share < MEMORY_SHARE:
            level = "error" if share < MEMORY_ERROR_SHARE else "warning"
            text = (
                f"{host} has {human_bytes(memory)} of memory left ({share:.1%}): the kernel ends the largest process when there "
                "is none. Use fewer or smaller workers there, or a larger host"
            )
            yield Finding(level, "host memory", host, text)
