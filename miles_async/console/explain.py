"""One sentence per actor: what it does or waits for, since when, and why (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from actors.runtime.snapshot import ActorFacts
from actors.runtime.staleness import rule_of
from actors.sampler.admission import open_limit
from bus.messages.waits import Wait
from bus.topology import STREAMS
from miles_async.console.places import Incomplete
from miles_async.console.scene import Scene
from miles_async.console.text import duration, plural
from miles_async.console.web.looks import doing

LIMITING = (
    *("max_weight_staleness", "rollout_batch_size", "over_sampling_batch_size", "update_weights_interval", "staleness_lookahead"),
)
NEWEST, FEWEST, MANY = 200, 8, 0.5  # groups judged last, so many at least, and the share of drops that is worth a word
LONG_S = 5.0  # a group that waits for its siblings is named after this


def explain(scene: Scene) -> list[tuple[str, str]]:
    """(actor, sentence) for each living actor."""
    return [(a.vitals.actor, _sentence(a, scene)) for a in scene.snapshot.living()]


def _sentence(actor: ActorFacts, scene: Scene) -> str:
    vitals = actor.vitals
    idle = vitals.wait is not None and vitals.wait.length == "idle"
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
    if vitals.role == "trainer" and vitals.wait is Wait.GROUPS:
        return max(own, scene.snapshot.policy.step_age_s)
    if vitals.wait is Wait.ENTRY:
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
        case "trainer" if vitals.wait is Wait.GROUPS:
            late = [group for group in scene.places.incomplete() if scene.now - group.since >= LONG_S]
            named = f"; {incomplete_text(late[0], scene.now)}" if late else ""
            return f": {'; '.join(filter(None, (held_up(scene), drops_text(scene))))}. {open_text(scene)}{named}"
        case "sampler" if vitals.wait is Wait.READING:
            return f": {vitals.note}" if vitals.note else ""
        case "sampler" if policy.active < 0:
            return ": no engine serves a version yet, groups issued now would be born stale"
        case "sampler" if vitals.wait is Wait.ENGINE_SLOTS:
            busy, slots = taken_slots(scene)
            return f": {busy} of {plural(slots, 'slot')} are taken; prompts are issued as they come free"
        case "sampler":
            return f": {open_text(scene)}; a slot comes free when a group is dropped, or trained and its version active"
        case "generation" if vitals.wait is Wait.CURRENT_VERSION:
            return f": {announced}" if policy.announced >= 0 else ": the trainer has announced none yet"
        case "generation" if vitals.wait is Wait.BOOTING:
            return f": {vitals.note}" if vitals.note else ""
        case "generation" if vitals.wait is Wait.UNLENT:
            return ": it needs them, or no wait of its is long enough"
        case "generation" if vitals.wait is Wait.TURN:
            return f": {plural(vitals.in_flight, 'sample')} go on afterwards" if vitals.in_flight else ""
        case "generation" | "reward" | "filter":
            return f": {open_text(scene)}"
        case "publisher" if policy.announced >= 0:
            return f": {announced}"
    return ""


def held_up(scene: Scene) -> str:
    """Which room lets the trainer wait for groups, and why it does: `generation holds it up, all 8 slots of 2 workers are taken
    and 4 samples wait for one`."""
    stages, policy = scene.places.stages(), scene.snapshot.policy
    count = {room: stages[room] for room in ("generation", "reward", "filter")}
    workers = scene.snapshot.living("generation")
    waiting = {a.vitals.role: a.vitals.waits_for for a in scene.snapshot.living()}
    if not workers:
        return "no rollout worker is alive"
    if policy.active < 0:
        return "no engine serves a version yet"
    if not any(count.values()):
        return "no samples are on their way, " + (
            f"the sampler waits for {waiting['sampler']}" if waiting.get("sampler") else "the sampler issues some"
        )
    room = max(count, key=lambda name: count[name])
    if room == "reward":
        return f"reward holds it up, {plural(len(scene.places.heads.get('rollouts', ())), 'sample')} wait for their score"
    if room == "filter":
        return f"the filter holds it up, {plural(count[room], 'scored group')} wait for its verdict"
    busy, slots = taken_slots(scene)
    queued = sum((head.stream, head.id) not in scene.places.pending for head in scene.places.heads.get("prompts", ()))
    doings = {doing(a) for a in workers}
    if doings == {"taking a new version"}:
        return f"the engines take version {policy.announced}"
    if doings == {"booting"}:
        return "the engines boot"
    if slots and busy >= slots and queued:
        return (
            f"generation holds it up, all {slots} slots of {plural(len(workers), 'worker')} are taken and "
            f"{plural(queued, 'sample')} wait for one"
        )
    if Wait.of(waiting.get("sampler", "")) is Wait.CREDITS and busy < slots and not queued:
        return f"the staleness bound holds prompts back, {_of_most(scene)} are open and {slots - busy} of {slots} slots are free"
    taken = f"{busy} of {slots} slots make" if slots else f"{plural(len(workers), 'worker')} make"
    return f"generation holds it up, {taken} the samples of {plural(count[room], 'group')}"


def taken_slots(scene: Scene) -> tuple[int, int]:
    """Samples that living workers have, and may have."""
    workers = [a.vitals for a in scene.snapshot.living("generation")]
    return sum(v.in_flight for v in workers), sum(v.slots for v in workers)


def most_open(scene: Scene) -> int:
    """Groups that the sampler lets be open, under the present settings; 0 = not known."""
    knobs = {name: int(scene.knobs.get(name) or 0) for name in LIMITING}
    bound = knobs["max_weight_staleness"]
    waits = rule_of(str(scene.knobs.get("staleness_policy", "auto")), bound) == "wait"
    return open_limit(
        per_version=knobs["rollout_batch_size"] * max(1, knobs["update_weights_interval"]),
        max_staleness=bound,
        over_sampling=knobs["over_sampling_batch_size"],
        lookahead=knobs["staleness_lookahead"] if waits else 0,
    )


def drops_text(scene: Scene) -> str:
    """That the filter drops most groups, which then never reach the trainer; empty where it does not."""
    notes = [head.fields.get("note", "") for head in scene.verdicts[-NEWEST:]]
    reasons = Counter(note.removeprefix("dropped: ") for note in notes if note.startswith("dropped"))
    if len(notes) < FEWEST or reasons.total() < MANY * len(notes):
        return ""
    share, mostly = reasons.total() / len(notes), reasons.most_common(1)[0][0]
    return f"the filter dropped {share:.0%} of the newest {len(notes)} groups (mostly {mostly})"


def open_text(scene: Scene) -> str:
    """`5 groups open of at most 12 (2 in generation, 3 with the trainer), 8 trained and not yet in a checkpoint`; where some are
    open in part, `5 groups open (...), 33 of at most 96 samples, ...`."""
    where = {"generation": "in generation", "reward": "being scored", "filter": "at the filter", "kept": "with the trainer",
             "nowhere": "in no stream"}  # fmt: skip
    left = _left(scene)
    saved = sum(not n for n in left.values())
    count = scene.places.stages()
    count["kept"] = max(0, count["kept"] - saved)
    stages = ", ".join(f"{n} {where[stage]}" for stage, n in count.items() if n)
    most = most_open(scene)
    whole = _are_whole(scene, left)
    limit = f" of at most {most}" if most and whole else ""
    text = plural(sum(count.values()), "group") + f" open{limit}" + (f" ({stages})" if stages else "")
    text += f", {_of_most(scene)}" if most and not whole else ""
    return text + (f", {saved} trained and not yet in a checkpoint" if saved else "")


def _left(scene: Scene) -> dict[str, int]:
    """By group, its open samples that no step has trained: those that the sampler counts."""
    left: dict[str, int] = {}
    for part in scene.places.groups.values():
        untrained = sum(sample not in scene.uncommitted for sample in part.sample_ids)
        left[part.group_id] = left.get(part.group_id, 0) + untrained
    return left


def _size(scene: Scene) -> int:
    """Samples of a group."""
    return max((part.n_samples for part in scene.places.groups.values()), default=1)


def _are_whole(scene: Scene, left: Mapping[str, int]) -> bool:
    """Whether no group is open in part, so that a count of groups says what a count of samples does."""
    return all(n in (0, _size(scene)) for n in left.values())


def _of_most(scene: Scene) -> str:
    """`4 of at most 12 groups`, or `33 of at most 96 samples` where groups are open in part."""
    left = _left(scene)
    if _are_whole(scene, left):
        return f"{sum(n > 0 for n in left.values())} of at most {most_open(scene)} groups"
    return f"{sum(left.values())} of at most {most_open(scene) * _size(scene)} samples"


def incomplete_text(group: Incomplete, now: float) -> str:
    """Which siblings a group waits for and who has them."""
    parts = [
        f"{sample} " + (place.text(now) if place else "is in no stream: see miles-async ledger --check")
        for sample, place in list(group.missing.items())[:3]
    ]
    more = f" and {len(group.missing) - 3} more" if len(group.missing) > 3 else ""
    have = f"group {group.group_id} has had {group.here} of {group.wanted} samples at the filter for"
    return f"{have} {duration(now - group.since)}; missing: {'; '.join(parts)}{more}"
