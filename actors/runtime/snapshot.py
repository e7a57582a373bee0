"""One look at a run: streams, actors, accounts, policy, knobs, as one frozen value. Two round trips, nothing written."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from actors.runtime.host import lives
from bus import Bus
from bus.errors import BadMessage
from bus.identity import Identity, read_identity
from bus.inspect import Head, StreamFacts, newest_heads, stream_facts
from bus.messages.active import PolicyActive
from bus.messages.control import EvalDone, Vitals
from bus.messages.groups import OpenGroup
from bus.streams.hop import id_key
from bus.topology import ACTIVE, EVAL_RESULTS, POLICY, ROLES

LATE_BEATS = 3.5  # heartbeats that may be missing before an actor counts as silent
ENDED = ("stopped", "failed")


class ActorFacts(msgspec.Struct, frozen=True):
    """One actor's last vitals, how old they are, and whether its process is there (None: not asked of one that was just
    heard, or on another host)."""

    vitals: Vitals
    age_s: float
    process: bool | None
    late_s: float = 7.0

    @property
    def waited_s(self) -> float:
        """How long it has waited for what it waits for: by its own clock until its last vitals, by the server's since."""
        since = self.vitals.waits_since
        return self.age_s + max(0.0, self.vitals.wall - since) if since else 0.0

    @property
    def life(self) -> str:
        """`alive`, `ended` (it said so), `late` (no heartbeat), or `dead` (no heartbeat and no process)."""
        if self.vitals.state in ENDED:
            return "ended"
        if self.age_s <= self.late_s:
            return "alive"
        return "dead" if self.process is False else "late"


class PolicyFacts(msgspec.Struct, frozen=True):
    """Where training stands: steps done, newest version announced (id, step, seconds ago), who serves what."""

    step: int = 0
    step_age_s: float = 0.0
    announced: int = -1
    announced_step: int = -1
    announced_age_s: float = 0.0
    active: int = -1
    active_step: int = -1
    serving: dict[str, int] = {}
    finished: bool = False
    checkpoint_step: int = -1
    announced_ages: dict[int, float] = {}  # of the newest versions, seconds
    entries: int = 0  # that were looked at

    def behind_s(self, version: int) -> float:
        """How long a newer version than this one has been announced; 0 when it is the newest."""
        return max((age for newer, age in self.announced_ages.items() if newer > version), default=0.0)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one instant, as far as two round trips are one."""

    run: str
    wall: float
    streams: dict[str, StreamFacts]
    actors: tuple[ActorFacts, ...]
    ledger: dict[str, int]
    open_groups: int
    open_samples: int
    policy: PolicyFacts
    evals: dict[str, EvalDone]
    knob_epoch: int
    release: str = ""  # of who started the run last

    def of_role(self, role: str) -> list[ActorFacts]:
        """Actors of one role, by name."""
        return [a for a in self.actors if a.vitals.role == role]

    def living(self, role: str = "") -> list[ActorFacts]:
        """Actors that are alive, of one role or of all, by name."""
        return [a for a in self.actors if a.life == "alive" and role in ("", a.vitals.role)]


async def read_snapshot(bus: Bus) -> Snapshot:
    """Read everything. Raises BusUnreachable after the bus's deadline."""
    (now, streams), small, vitals, silences, identity = await asyncio.gather(
        stream_facts(bus), bus.snapshot(), bus.vitals(), bus.silences(), read_identity(bus)
    )
    policy, active, evals = await asyncio.gather(newest_heads(bus, POLICY, 64), bus.last(ACTIVE, 8), bus.last(EVAL_RESULTS, 8))
    wall = bus.clock.wall()
    said = next((m for m in [await readable(bus, e) for e in active] if isinstance(m, PolicyActive)), None)
    facts = policy_facts(policy, said, now)
    newest_evals: dict[str, EvalDone] = {}
    for done in [await readable(bus, e) for e in evals]:
        # What measured a later step than the newest one is of a lost future.
        if isinstance(done, EvalDone) and (done.step <= facts.step or not facts.step):
            newest_evals.setdefault(done.name, done)
    groups = [msgspec.msgpack.decode(raw, type=OpenGroup) for raw in small.open_groups.values()]
    return Snapshot(
        run=bus.config.run,
        wall=wall,
        streams=streams,
        actors=_actors(vitals, silences, max(5.0, LATE_BEATS * (identity or Identity()).heartbeat_s)),
        ledger=small.ledger,
        open_groups=len({g.group_id for g in groups}),
        open_samples=sum(g.n_samples if g.members is None else len(g.members) for g in groups),
        policy=facts,
        evals=newest_evals,
        knob_epoch=int((small.state.get("knob_epoch") or "-1").partition(":")[0]),
        release=(identity or Identity()).release,
    )


async def readable(bus: Bus, entry: Any) -> Any:
    """An entry's message; None for one that is none."""
    try:
        return await bus.message(entry)
    except BadMessage:
        return None  # whoever reads the stream for work reports it


def _actors(said: dict[str, Vitals], silences: dict[str, float], late_s: float) -> tuple[ActorFacts, ...]:
    found: list[ActorFacts] = []
    for vitals in said.values():
        age_s = silences.get(vitals.actor, 0.0)
        found.append(ActorFacts(vitals, age_s, lives(vitals) if age_s > late_s else None, late_s))
    return tuple(sorted(found, key=lambda a: (ROLE_ORDER.get(a.vitals.role, 99), a.vitals.actor)))


ROLE_ORDER = {role: n for n, role in enumerate((*ROLES, "launcher"))}


def policy_facts(heads: list[Head], said: PolicyActive | None, now: float) -> PolicyFacts:
    """Facts from the plain fields of the newest entries of `policy`, oldest first (pure)."""
    ages: dict[int, float] = {}
    facts: dict[str, Any] = {"announced_ages": ages, "entries": len(heads)}
    for head in sorted(heads, key=lambda h: id_key(h.id)):
        age, number = max(0.0, now - head.wall), _number(head.sample)
        match head.fields.get("type", ""):
            case "policy.step" | "policy.restored":
                facts |= {"step": number, "step_age_s": age, "finished": False}
            case "policy.checkpointed":
                facts |= {"checkpoint_step": number}
            case "policy.finished":
                facts |= {"finished": True}
            case "policy.announced":
                step = _number(head.fields.get("note", ""))
                facts |= {"announced": number, "announced_age_s": age, "announced_step": step}
                ages[number] = age
    if said is not None:
        facts |= {"active": said.version.id, "active_step": said.version.step, "serving": dict(said.serving)}
    return PolicyFacts(**facts)


def _number(text: str) -> int:
    """The digits at the end of a header id such as `step12`; -1 without any."""
    digits = text[len(text.rstrip("0123456789")) :]
    return int(digits) if digits else -1
