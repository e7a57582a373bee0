"""Show every actor of a running run: what it is, where it is, what it does, what it waits for; and the streams in short."""

import argparse
from typing import TYPE_CHECKING, Any

from miles_async.cli.options import add_json_option, add_run_options, on_bus, print_json
from miles_async.settings.runs import RunRef

if TYPE_CHECKING:
    from actors.runtime.snapshot import ActorFacts, Snapshot
    from bus import Bus
    from bus.inspect import StreamFacts
    from miles_async.governor.standing import GovernorStanding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shared options only."""
    add_run_options(parser, positional=True)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the status; 0 whenever the bus answered."""

    async def body(bus: "Bus", ref: RunRef) -> int:
        from actors.runtime.snapshot import read_snapshot
        from miles_async.governor.standing import read_standing

        if args.as_json:
            print_json(await document(bus))
        else:
            snapshot = await read_snapshot(bus)
            print(as_text(snapshot, await read_standing(bus), await _unheard(bus, snapshot)))
        return 0

    return on_bus(args, body)


async def _unheard(bus: "Bus", snapshot: "Snapshot") -> tuple[str, ...]:
    """Why heartbeats may not arrive though their actors live: what is wrong with the Redis, where an actor is silent."""
    if all(actor.life == "alive" for actor in snapshot.actors):
        return ()
    from bus.server.checks import ServerFacts
    from miles_async.console.doctor.streams import STOPS_WRITES, faults_of

    faults = faults_of(ServerFacts.of(await bus.server_info()))
    return tuple(fault.text for fault in faults if fault.rule in STOPS_WRITES and fault.level == "error")


async def document(bus: "Bus") -> dict[str, Any]:
    """What --json prints, as plain values."""
    import msgspec

    from actors.runtime.snapshot import read_snapshot
    from miles_async.governor.standing import read_standing

    found = as_json(await read_snapshot(bus)) | {"governor": await read_standing(bus)}
    plain: dict[str, Any] = msgspec.to_builtins(found, enc_hook=str)
    return plain


def as_json(snapshot: "Snapshot") -> dict[str, Any]:
    """The document of --json."""
    from bus.ledger import accounts_of

    accounts = accounts_of(snapshot.ledger)
    return {
        "run": snapshot.run,
        "wall": snapshot.wall,
        "policy": snapshot.policy,
        "knob_epoch": snapshot.knob_epoch,
        "actors": [_actor_json(actor) for actor in snapshot.actors],
        "streams": {name: stream_json(facts) for name, facts in snapshot.streams.items()},
        "open_groups": snapshot.open_groups,
        "ledger": {name: getattr(accounts, name) for name in ("issued", "trained", "dropped", "pending")},
        "evals": {
            name: {"step": d.step, "metrics": d.metrics, "versions": d.versions or {}, "error": d.error or ""}
            for name, d in snapshot.evals.items()
        },
    }


def _actor_json(actor: "ActorFacts") -> dict[str, Any]:
    v = actor.vitals
    same = ("actor", "role", "pid", "host", "state", "version", "in_flight", "waits_for", "note", "counters")
    found: dict[str, Any] = {name: getattr(v, name) for name in same}
    found |= {"life": actor.life, "heartbeat_age_s": round(actor.age_s, 3)}
    return found | {"slots": v.slots or None, "waits_since": v.waits_since or None}


def stream_json(facts: "StreamFacts") -> dict[str, Any]:
    """One stream as plain values."""
    found = {name: getattr(facts, name) for name in ("writer", "length", "pending", "lag", "newest_id", "readers")}
    return found | {"data": facts.is_data, "bytes": facts.n_bytes, "newest_age_s": round(facts.newest_age_s, 3)}


def as_text(snapshot: "Snapshot", governor: "GovernorStanding | None" = None, unheard: tuple[str, ...] = ()) -> str:
    """Three blocks: where training stands, actors, streams. `unheard`: why heartbeats may not have arrived."""
    from miles_async.console.lines import busy_text, ledger_line, waits_text
    from miles_async.console.text import duration, human_bytes, plural, table

    head = [_standing(snapshot)]
    if snapshot.ledger:
        head.append(f"ledger: {ledger_line(snapshot)}")
    if governor is not None:
        head.append(governor.text())
    for trainer in snapshot.of_role("trainer"):
        if times := trainer.vitals.counters.get("lend/times"):
            counters = trainer.vitals.counters
            lent_s, waited_s, tokens = (counters.get(f"lend/{name}", 0.0) for name in ("s", "waited_s", "tokens"))
            head.append(
                f"the trainer's GPUs: lent {plural(int(times), 'time')}, {duration(lent_s)} in all, {int(tokens)} tokens were made "
                f"on them, the trainer waited {waited_s:.1f} s for them"
            )

    head += [f"{why}; actors that are silent below may be at work, for heartbeats may not arrive" for why in unheard]
    rows = []
    for actor in snapshot.actors:
        v = actor.vitals
        silent = {"late": "SILENT", "dead": "DEAD"}.get(actor.life)
        state = f"{silent} for {duration(actor.age_s)}" if silent else v.state
        version = f"v{v.version}" if v.version >= 0 else "-"
        rows.append([v.actor, v.role, str(v.pid), v.host, state, version, busy_text(v), waits_text(actor)])
    columns = ["actor", "role", "pid", "host", "state", "version", "busy", "waits for"]
    actors = table(columns, rows, right=("pid", "version", "busy")) if rows else "no actor has sent a heartbeat"
    rows = []
    for facts in snapshot.streams.values():
        if facts.is_data and (facts.length or not facts.name.startswith("eval")):
            oldest = max((r.oldest_age_s for r in facts.readers if r.oldest_id), default=0.0)
            size = human_bytes(facts.n_bytes)
            held = duration(oldest) if facts.pending else "-"
            rows.append([facts.name, str(facts.length), str(facts.pending), str(facts.lag), held, size])
    columns = ["stream", "entries", "held", "waiting", "oldest held", "bytes"]
    streams = table(columns, rows, right=columns[1:])
    dead = snapshot.streams["dead"].length
    tail = [f"\n{plural(dead, 'dead letter')}: miles-async bus dead list"] if dead else []
    return "\n".join([*head, "", actors, "", streams, *tail])


def _standing(snapshot: "Snapshot") -> str:
    from miles_async.console.text import duration, percent, plural

    policy = snapshot.policy
    parts = [f"run {snapshot.run}", f"step {policy.step}" + (" (finished)" if policy.finished else "")]
    if policy.announced >= 0:
        parts.append(f"version {policy.announced} announced {duration(policy.announced_age_s)} ago")
    if policy.active >= 0:
        n = sum(v == policy.active for v in policy.serving.values())
        parts.append(f"version {policy.active} active on {plural(n, 'worker')}")
    for name, done in snapshot.evals.items():
        score = done.metrics.get(f"eval/{name}")
        parts.append(f"{name} {'failed' if score is None else percent(score)} at step {done.step}")
    if snapshot.knob_epoch > 0:
        parts.append(f"knob epoch {snapshot.knob_epoch}")
    return ", ".join(parts)
