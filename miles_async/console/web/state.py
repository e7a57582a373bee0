"""What the page shows of a run at one instant: plain values by section, of snapshot, history and the doctor's word (pure).

Numbers come from where the terminal's view and the commands take them. Walls are seconds of the server's clock. A section that is
as before is not sent again, so nothing here says how long ago something was: the page counts from walls.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from actors.recorder.history import REWARD, History, Step
from actors.recorder.records import Record
from actors.runtime.snapshot import ActorFacts, Snapshot
from bus.ledger import accounts_of
from bus.messages.reasons import meaning
from bus.topology import ROLES
from miles_async.console.doctor.finding import Finding
from miles_async.console.figures import RECENT, alarms, eta_s, lying, shares, throughput
from miles_async.console.lines import ledger_line, plain_line, waits_text
from miles_async.console.report_data import staleness_bounds
from miles_async.console.text import is_initial, knob_text, shorten
from miles_async.console.web.curves import evals_of
from miles_async.console.web.looks import Looks, doing

EVENTS_SHOWN = 200
WORTH_A_WORD = 0.1  # share of the trainer's time that went into waiting
HISTOGRAM = "rollout/start_age/"
State = dict[str, Any]


class DoctorWord(msgspec.Struct, frozen=True):
    """The doctor's: what is wrong, one sentence per actor, when it was said; the last sentence in which the trainer waited; which
    groups are open, and where they are."""

    findings: tuple[Finding, ...] = ()
    actors: dict[str, str] = {}
    wall: float = 0.0
    waited: str = ""
    opened: str = ""


def state_of(
    snapshot: Snapshot,
    history: History,
    looks: Looks,
    word: DoctorWord,
    *,
    total_steps: int,
    settings: dict[str, dict[str, Any]],
    kept: bool = False,
) -> State:
    """All sections but the curves. `kept`: of a run that has ended, from a copy of what its Redis kept. Where all actors are silent
    and none said that it ends, the run has not ended: that is the worst of alarms."""
    ended = kept or (bool(snapshot.actors) and all(a.life == "ended" for a in snapshot.actors))
    return {
        "run": _run(snapshot, history, total_steps, ended),
        "why": _why(snapshot, history, word, ended),
        "alarms": [] if ended else _alarms(snapshot, history, word),
        "flow": _flow(snapshot, history, looks),
        "actors": [_actor(a, snapshot.wall) for a in snapshot.actors],
        "engines": {"split": _rounded(looks.split()), "slots_used": looks.slots_used(), "serving": _serving(snapshot)},
        "evals": evals_of(history),
        "ages": _ages(history.steps[-RECENT:]),
        "marks": _marks(history, settings),
        "events": events_of(history),
        "drops": {
            "total": [[why, n, meaning(why)] for why, n in history.drops.most_common()],
            "newest": [_drop(r) for r in list(history.newest_drops)[-50:][::-1]],
        },
        "counts": {"dead": snapshot.streams["dead"].length, "knob_epoch": snapshot.knob_epoch, "samples": len(history.samples)},
    }


def _run(snapshot: Snapshot, history: History, total_steps: int, ended: bool) -> State:
    steps, accounts = history.steps, accounts_of(snapshot.ledger)
    recent = steps[-RECENT:]
    left = None if ended else eta_s(history, total_steps)
    return {
        "name": snapshot.run,
        "step": steps[-1].step if steps else snapshot.policy.step,
        "total": total_steps,
        "began": history.first_wall,
        "ends": round(steps[-1].wall + left) if left is not None and steps else None,
        "last": history.last_wall if ended else None,
        "finished": snapshot.policy.finished or history.finished,
        "ended": ended,
        "lost_steps": history.lost_steps,
        "version": snapshot.policy.announced,
        "knob_epoch": snapshot.knob_epoch,
        "knob": shorten(knob_text(history.knobs[-1]), 200) if snapshot.knob_epoch > 0 and history.knobs else "",
        "wrote": shorten(str(history.samples[-1]["response"]), 200) if history.samples else "",
        "tokens_per_s": throughput(recent) if recent else None,
        "reward": sum(s.get(REWARD) for s in recent) / len(recent) if recent and not history.supervised else None,
        "shares": shares(recent) if recent else None,
        "evals": {name: history.evals_of(name)[-1].score for name in history.eval_names()},
        "failed_evals": {name: str(r.get("error", "")) for name, r in history.failed_evals.items()},
        "ledger": ledger_line(snapshot, history.unsaved_groups()) if accounts.issued else "",
    }


def _why(snapshot: Snapshot, history: History, word: DoctorWord, ended: bool) -> State:
    """Why the trainer waits, or that it does not: the doctor's sentence, and what its time went into lately."""
    if ended:
        done = snapshot.policy.finished or history.finished
        text = (
            "This run has finished."
            if done
            else "This run is not running. The same miles-async train command, with its --name, resumes it."
        )
        return {"text": text, "lately": "", "waits": False}
    wait, train, publish = shares(history.steps[-RECENT:])
    lately = f"Of the last steps' time it waited {wait:.0%}, trained {train:.0%}, published and saved {publish:.0%}."
    said, _, more = word.actors.get("trainer", "").partition(". ")  # the cause, and then where everything is
    ways = ("stopped process", "silent actor", "no actor")
    gone = next((f.text for f in word.findings if f.about == "trainer" and f.rule in ways), "")
    text = gone or (f"The trainer {said}." if said else "Looking why the trainer waits." if not word.wall else "No trainer works.")
    waits = bool(gone) or waiting(said)
    if not waits and wait > WORTH_A_WORD and (word.waited or word.opened):
        lately += f" Last seen waiting, it {word.waited.partition('. ')[0]}." if word.waited else f" Now {word.opened}."
    lately = " ".join(filter(None, (more and f"{more}.", lately if history.steps else "")))
    return {"text": text, "lately": lately, "waits": waits}


def waiting(sentence: str) -> bool:
    """Whether the doctor's sentence on an actor is about a wait."""
    return sentence.startswith(("has waited", "waits"))


def _alarms(snapshot: Snapshot, history: History, word: DoctorWord) -> list[State]:
    """What is wrong now, and the newest faults on record; each with since when."""
    found = [
        {"level": f.level, "text": f.text, "who": f.rule, "about": f.about, "wall": word.wall - f.since_s, "now": True}
        for f in word.findings
        if f.level != "info"
    ]
    texts = {str(f["text"])[:200] for f in found}
    told = [
        {
            "level": r["level"],
            "text": str(r["text"]),
            "who": f"{r['actor']}: {r['event']}",
            "about": "",
            "now": False,
            "wall": float(r["wall"]),
        }
        for r in alarms(history, snapshot.wall, 3)
        if str(r["text"])[:200] not in texts
    ]
    return found + told[::-1]


def _flow(snapshot: Snapshot, history: History, looks: Looks) -> State:
    rooms = {}
    for role in ROLES:
        actors = snapshot.of_role(role)
        if not actors:
            continue
        alive = [a for a in actors if a.life == "alive"]
        wrong = [a for a in actors if a.life in ("late", "dead") or a.vitals.state in ("stalled", "failed")]
        rooms[role] = {
            "alive": len(alive),
            "wrong": len(wrong),
            "busy": sum(a.vitals.in_flight for a in alive),
            "working": any(a.vitals.state == "running" or a.vitals.in_flight for a in alive),
        }
    streams = {}
    for facts in snapshot.streams.values():
        rate, found = looks.rate(facts.name), lying(facts, history) if facts.is_data else None
        oldest = found.oldest_s if found and found.held else None
        streams[facts.name] = {
            "depth": found.depth if found else facts.length,
            "held": found.held if found else 0,
            "unsaved": found.unsaved if found else 0,
            "since": round(snapshot.wall - oldest, 1) if oldest else None,
            "newest": round(snapshot.wall - facts.newest_age_s) if facts.newest_id else None,
            "rate": None if rate is None else float(f"{rate:.3g}"),
            "bytes": facts.n_bytes,
            "data": facts.is_data,
        }
    policy = snapshot.policy
    return {
        "rooms": rooms,
        "streams": streams,
        "open_groups": snapshot.open_groups,
        "announced": policy.announced,
        "active": policy.active,
    }


def _actor(actor: ActorFacts, wall: float) -> State:
    v = actor.vitals
    silent = actor.life in ("late", "dead")
    return {
        "name": v.actor,
        "role": v.role,
        "host": v.host,
        "pid": v.pid,
        "life": actor.life,
        "state": v.state,
        "doing": doing(actor) if v.role == "generation" and actor.life == "alive" else "",
        "version": v.version,
        "busy": v.in_flight,
        "slots": v.slots,
        "kv": v.counters.get("engine/kv_used"),
        "queued": v.counters.get("engine/waiting"),
        "waits": v.waits_for if actor.life == "alive" and v.waits_for else waits_text(actor),
        "since": round(wall - actor.waited_s) if actor.waited_s >= 1 and actor.life == "alive" else None,
        "heard": round(wall - actor.age_s) if silent else None,
    }


def _serving(snapshot: Snapshot) -> list[tuple[int, int]]:
    """(version, workers that serve it), newest first."""
    return sorted(Counter(a.vitals.version for a in snapshot.living("generation")).items(), reverse=True)


def _ages(steps: list[Step]) -> dict[str, float]:
    """Staleness histogram of the last steps: share of the samples by age of their first token, in steps."""
    found: dict[str, float] = {}
    for step in steps:
        for name, value in step.metrics.items():
            if name.startswith(HISTOGRAM):
                age = name.removeprefix(HISTOGRAM)
                found[age] = found.get(age, 0.0) + value / len(steps)
    return _rounded(found)


def _marks(history: History, settings: dict[str, dict[str, Any]]) -> State:
    """Steps at which something happened that bends curves; and the staleness bound from each step on."""

    def step_at(wall: float) -> int:
        return next((s.step for s in reversed(history.steps) if s.wall <= wall), 0)

    knobs = [
        [step_at(float(r["wall"])), ", ".join(f"{k} = {v}" for k, v in r["values"].items())]
        for r in history.knobs[-50:]
        if int(r["epoch"]) > 0 and r["values"] and not is_initial(r)  # a plan bends nothing
    ]
    restarts = [[int(r["step"]), f"restored to step {r['step']}"] for r in history.restores[1:][-50:]]
    return {"knobs": knobs, "restarts": restarts, "bounds": staleness_bounds(history, settings)}


def _drop(record: Record) -> State:
    keep = ("wall", "group", "prompt", "reason", "samples", "tokens", "reward", "members")
    return {name: record[name] for name in keep if record.get(name) is not None}


def events_of(history: History) -> list[State]:
    """What an operator may want to find later, newest first: faults, dead letters, knobs, checkpoints, restores."""
    records = [r for kind in (history.faults, history.dead, history.knobs, history.checkpoints, history.restores)
               for r in kind[-EVENTS_SHOWN:]]  # fmt: skip
    records.sort(key=lambda r: float(r["wall"]), reverse=True)
    found = []
    for record in records[:EVENTS_SHOWN]:
        if record["kind"] == "fault":
            level, what, text = str(record["level"]), f"{record['actor']}: {record['event']}", str(record["text"])
        else:
            restart = record["kind"] == "restored" and record is not history.restores[0]
            level = "error" if record["kind"] == "dead" else "warning" if restart else "info"
            what, text = str(record["kind"]), plain_line(record, history, total_steps=0)
        if text:
            found.append({"wall": float(record["wall"]), "level": level, "what": what, "text": text[:1000]})
    return found


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}
