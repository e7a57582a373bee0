"""One sentence per actor: what it does or waits for, since when, and why (pure)."""

from __future__ import annotations

from actors.runtime.snapshot import ActorFacts
from bus.messages.control import UNLENT
from bus.topology import STREAMS
from miles_async.console.places import Incomplete
from miles_async.console.scene import Scene
from miles_async.console.text import duration, plural

# Waits that may last for ever without anything being wrong: the room has done its work and others have not.
IDLE_WAITS = ("an entry", "requests", "news", "slots", "announcements", "a version to measure", "a free slot")
TURN_WAIT = ("the trainer's turn", UNLENT)  # as long as a step takes or longer, where engines share the trainer's GPUs


def explain(scene: Scene) -> list[tuple[str, str]]:
    """(actor, sentence) for each living actor."""
    return [(a.vitals.actor, _sentence(a, scene)) for a in scene.snapshot.actors if a.life == "alive"]


def _sentence(actor: ActorFacts, scene: Scene) -> str:
    vitals = actor.vitals
    idle = vitals.waits_for.startswith(IDLE_WAITS)
    if not vitals.waits_for or (vitals.in_flight and idle):
        if vitals.state in ("running", "waiting"):
            what = f"works on {plural(vitals.in_flight, 'entry')}" if vitals.in_flight else "works"
        else:
            what = f"is {vitals.state}"
        return what + (f" ({vitals.note})" if vitals.note else "")
    since = waiting_since(actor, scene)
    waits = f"has waited {duration(since)} for" if since >= 1 else "waits for"
    return f"{waits} {vitals.waits_for}{because(actor, scene)}"


def waiting_since(actor: ActorFacts, scene: Scene) -> float:
    """Seconds of the wait. A loop that asks every half second restarts its own clock, so what did not come tells better:
    the age of the newest entry on the streams it reads, or of the last step for the trainer."""
    vitals = actor.vitals
    own = actor.waited_s
    if vitals.role == "trainer" and " on groups" in vitals.waits_for:
        return max(own, scene.snapshot.policy.step_age_s)
    if vitals.waits_for.startswith("an entry of"):
        words = vitals.waits_for.replace("+", " ").replace(",", " ").split()
        facts = [scene.snapshot.streams[s.name] for s in STREAMS if s.readers and s.name in words]
        ages = [f.newest_age_s for f in facts if f.newest_id]
        return max(own, min(ages, default=0.0))
    return own


def because(actor: ActorFacts, scene: Scene) -> str:
    """Why the wait lasts, as far as the streams tell; begins with a colon or is empty."""
    vitals, policy = actor.vitals, scene.snapshot.policy
    announced = f"version {policy.announced} was announced {duration(policy.announced_age_s)} ago"
    match vitals.role:
        case "trainer" if " on groups" in vitals.waits_for:
            late = scene.places.incomplete()
            return f": {open_text(scene)}" + (f"; {incomplete_text(late[0], scene.now)}" if late else "")
        case "sampler" if policy.active < 0:
            return ": no engine serves a version yet, groups issued now would be born stale"
        case "sampler":
            return f": {open_text(scene)}; a slot comes free when a group is dropped, or trained and its version active"
        case "generation" if vitals.waits_for == "a current version":
            return f": {announced}" if policy.announced >= 0 else ": the trainer has announced none yet"
        case "generation" if vitals.waits_for == UNLENT:
            return ": it needs them, or no wait of its is long enough"
        case "generation" if vitals.waits_for.startswith(TURN_WAIT):
            return f": {plural(vitals.in_flight, 'sample')} go on afterwards" if vitals.in_flight else ""
        case "generation" | "reward" | "filter":
            return f": {open_text(scene)}"
        case "publisher" if policy.announced >= 0:
            return f": {announced}"
    return ""


def open_text(scene: Scene) -> str:
    """`5 groups open of at most 12 (2 in generation, 3 with the trainer), 8 trained and not yet in a checkpoint`."""
    where = {"generation": "in generation", "reward": "being scored", "filter": "at the filter", "kept": "with the trainer",
             "nowhere": "in no stream"}  # fmt: skip
    saved = sum(scene.uncommitted.issuperset(group.sample_ids) for group in scene.places.groups.values())
    count = scene.places.stages()
    count["kept"] = max(0, count["kept"] - saved)
    stages = ", ".join(f"{n} {where[stage]}" for stage, n in count.items() if n)
    batch = int(scene.knobs.get("rollout_batch_size", 0))
    limit = f" of at most {(int(scene.knobs.get('max_weight_staleness', 0)) + 1) * batch}" if batch else ""
    text = plural(sum(count.values()), "group") + f" open{limit}" + (f" ({stages})" if stages else "")
    return text + (f", {saved} trained and not yet in a checkpoint" if saved else "")


def incomplete_text(group: Incomplete, now: float) -> str:
    """Which siblings a group waits for and who has them."""
    parts = [
        f"{sample} " + (place.text(now) if place else "is in no stream: see miles-async ledger --check")
        for sample, place in list(group.missing.items())[:3]
    ]
    more = f" and {len(group.missing) - 3} more" if len(group.missing) > 3 else ""
    have = f"group {group.group_id} has had {group.here} of {group.wanted} samples at the filter for"
    return f"{have} {duration(now - group.since)}; missing: {'; '.join(parts)}{more}"
