"""The governor at work: looks when a step was recorded, proposes what decide.py says, and tells what it did.

Reads  the launcher's feed    Writes  knobs, events; state field `governor` (what it stands at, for status and doctor)
All that it decides by is on record, so a launcher that starts again goes on as if it had never ended. Nothing it meets ends a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from actors.recorder.feed import Feed
from actors.runtime.deadline import first_of
from bus import Bus, Commit, Out
from bus.errors import BusFull, BusUnreachable, KnobRejected
from bus.knobs import propose
from bus.messages.control import Event
from bus.messages.events import EventKind
from bus.topology import EVENTS
from miles_async.governor.decide import GovernorDecision, decide
from miles_async.governor.look import AUTHOR, GovernorLook, look
from miles_async.governor.standing import STATE_FIELD, GovernorStanding, Note, NoteKind, read_standing
from miles_async.settings.errors import SettingsError
from miles_async.settings.live import check_patch

CATCH_UP = 100  # steps that are looked at again where the bus has forgotten how far this was


class Moved(Exception):
    """Somebody else changed a knob after the look."""


async def govern(bus: Bus, feed: Feed, stop: asyncio.Event) -> None:
    """Until `stop`; woken by what the feed takes in. `feed` is read by somebody else."""
    standing = await read_standing(bus)
    told = {(n.kind, n.about) for n in standing.notes} if standing else set()
    after = standing.due if standing else feed.history.furthest - CATCH_UP
    while not stop.is_set():
        if (seen := look(feed.history, after)) is not None:
            decision = await asyncio.to_thread(decide, seen)
            try:
                await act(bus, seen, decision, told)
                after = seen.due
                continue
            except (BusUnreachable, BusFull):
                pass  # the actors meet the same; decided again with the next step
        await first_of(feed.heard(), stop.wait())


async def act(bus: Bus, seen: GovernorLook, decision: GovernorDecision, told: set[tuple[NoteKind, str]]) -> None:
    """Patch, events, standing. A note is told when it comes up, and again only after it had gone."""
    move, notes, last = decision.move, list(decision.notes), ""
    if move is not None:
        about = f"{move.knob}={move.value}"

        def check(values: Mapping[str, Any], patch: Mapping[str, object]) -> Mapping[str, Any]:
            if any(values.get(knob.name) != knob.value for knob in seen.knobs):
                raise Moved
            return check_patch(values, patch)

        try:
            made = await propose(bus, {move.knob: move.value}, author=AUTHOR, reason=move.reason, check=check)
            last = f"epoch {made.epoch} after step {decision.due}: {about} ({move.reason})"
        except Moved:
            return
        except (KnobRejected, SettingsError) as error:
            notes.append(Note(kind="refused", about=about, text=f"{about} would serve and is refused: {error}"))
    fresh = [note for note in notes if (note.kind, note.about) not in told]
    told.clear()
    told.update((note.kind, note.about) for note in notes)
    said = [(EventKind.GOVERNOR, last)] if last else []
    said += [(EventKind[f"GOVERNOR_{note.kind.upper()}"], note.text) for note in fresh]
    wall = bus.clock.wall()
    events = [Event(actor=AUTHOR, kind=kind, text=text, wall=wall, level=kind.level) for kind, text in said]
    await bus.append([Out(EVENTS, event) for event in events], repeatable=True)
    ours = [c.reason for c in seen.changes if c.author == AUTHOR] + ([move.reason] if move is not None and last else [])
    standing = GovernorStanding(
        due=decision.due,
        knobs=tuple(
            msgspec.structs.replace(k, value=move.value) if move is not None and last and k.name == move.knob else k
            for k in seen.knobs
        ),
        last=last or (f"{AUTHOR}: {ours[-1]}" if ours else ""),
        changes=len(ours),
        taken_back=sum(reason.startswith("back:") for reason in ours),
        notes=tuple(notes),
    )
    await bus.commit(Commit(state={STATE_FIELD: msgspec.json.encode(standing).decode()}))
