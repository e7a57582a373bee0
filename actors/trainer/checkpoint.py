"""A checkpoint is one transaction with the bus.

    <save>/iter_0000123/...                       the backend's files and their index
    <save>/rollout/bus_state_0000123.msgpack      what the bus held: cursor, open groups, accounts, ids consumed
    <save>/latest_checkpointed_iteration.txt      written last, by rename: names the one to load

Order: files, fsync, bus state, fsync, tracker by rename, and only then the acknowledgement of the groups inside. Cut short
anywhere before the tracker, the former checkpoint is still the one; cut short after it, the groups listed as consumed are
acknowledged at the next start.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from bus import Bus, Commit
from bus.errors import UNREADABLE, CheckpointOfAnother, CheckpointRefused
from bus.ledger import Accounts, dropped
from bus.messages.groups import GroupKept, OpenGroup
from bus.messages.reasons import DropReason
from bus.messages.versions import PolicyVersion
from bus.streams.redis import LIFE

TRACKER = "latest_checkpointed_iteration.txt"
INDEX = "index.json"  # of a backend's files, written last of them


class Consumed(msgspec.Struct, frozen=True):
    """Samples of one entry of `groups` inside a checkpoint, and what the accounts get for them. `samples` and `tokens` were
    trained, `masked_*` and `aged` were not: see actors.trainer.accounts."""

    group_id: str  # the key of the group or part
    samples: int
    masked_samples: int
    tokens: int
    masked_tokens: int
    versions: tuple[tuple[int, int], ...] = ()  # trained tokens by policy version
    members: tuple[int, ...] = ()  # indexes of these samples
    aged: dict[str, tuple[int, int]] = {}  # reason -> samples and tokens over the staleness bound
    rewards: tuple[float, ...] = ()  # by member, where only a part of the entry was trained

    def covers(self, group: GroupKept) -> bool:
        """Whether these are all samples of an entry."""
        return {s.rollout.task.index for s in group.samples} <= set(self.members)

    def with_more(self, other: Consumed) -> Consumed:
        """Both together, for samples of one entry that were trained in several steps; the same samples count once."""
        if set(other.members) <= set(self.members):
            return self
        aged = dict(self.aged)
        for reason, (samples, tokens) in other.aged.items():
            before = aged.get(reason, (0, 0))
            aged[reason] = (before[0] + samples, before[1] + tokens)
        added = ("samples", "masked_samples", "tokens", "masked_tokens", "versions", "members", "rewards")
        sums = {name: getattr(self, name) + getattr(other, name) for name in added}
        return msgspec.structs.replace(self, aged=aged, **sums)


def merged(known: dict[str, Consumed], more: Iterable[Consumed]) -> dict[str, Consumed]:
    """`known`, by key, with more taken in."""
    for item in more:
        before = known.get(item.group_id)
        known[item.group_id] = item if before is None else before.with_more(item)
    return known


class BusState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the bus. `consumed`: groups trained since the former checkpoint; `open_groups`: issued
    and neither trained in this lineage nor dropped; `state` and `ledger` as they were, this checkpoint's groups counted
    as trained."""

    schema: int = 1
    run: str
    fingerprint: str
    step: int
    version: PolicyVersion
    knob_epoch: int
    knobs: dict[str, object]
    state: dict[str, str]
    ledger: dict[str, int]
    open_groups: dict[str, bytes]
    consumed: tuple[Consumed, ...]
    metrics: dict[str, float] = {}
    after: int = 0
    """Step of the checkpoint that was acknowledged before: `consumed` is of the steps since."""


def iter_dir(save: Path, step: int) -> Path:
    """Directory of one checkpoint."""
    return save / f"iter_{step:07d}"


def bus_state_file(save: Path, step: int) -> Path:
    """File with the bus state of one checkpoint."""
    return save / "rollout" / f"bus_state_{step:07d}.msgpack"


def steps_in(save: Path) -> list[int]:
    """Steps of the checkpoints there, in order, whether whole or not."""
    return sorted(int(p.name[5:]) for p in save.glob("iter_*") if p.name[5:].isdecimal())


def write_durably(path: Path, data: bytes) -> None:
    """All of the file or none of it, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk, of which half a file would take the rest
        temporary.unlink(missing_ok=True)
        raise
    os.rename(temporary, path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Make a file durable, or the names inside a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finish(save: Path, state: BusState, *, keep_last: int, retain: int = 0) -> None:
    """After the backend's files are complete in iter_dir: bus state, tracker, and old checkpoints away, but for those whose step is
    a multiple of `retain` (0: none). Later ones, of a run that went back, take no place of these: they stay until it has passed
    them."""
    write_durably(bus_state_file(save, state.step), msgspec.msgpack.encode(state))
    write_durably(save / TRACKER, f"{state.step}\n".encode())
    if keep_last > 0:
        for old in [step for step in steps_in(save) if step <= state.step][:-keep_last]:
            if not (retain and old % retain == 0):
                shutil.rmtree(iter_dir(save, old), ignore_errors=True)
                bus_state_file(save, old).unlink(missing_ok=True)


def latest(save: Path) -> int | None:
    """Step of the checkpoint that the tracker names, None without one; CheckpointRefused when the tracker is damaged."""
    tracker = save / TRACKER
    try:
        text = tracker.read_text("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointRefused(f"{tracker} not readable: {error.strerror}") from error
    if not (text.isascii() and text.isdecimal()):
        raise CheckpointRefused(f"{tracker} holds {text[:40]!r}, not a step number. {others(save, None)}")
    return int(text)


def resume_point(load: str, save: str, step: int | None) -> tuple[Path, int] | None:
    """(parent directory, step) of the checkpoint to go on from; None for none. What the run itself has saved comes before what it
    was started from; of `load` it is `step`, where given, else what the tracker names. Raises as `latest`."""
    parent, own = Path(load), Path(save)
    if save and parent.absolute() != own.absolute() and (newest := latest(own)) is not None:
        return own, newest
    found = step if step is not None else latest(parent)
    return None if found is None else (parent, found)


def read_bus_state(save: Path, step: int, *, fingerprint: str) -> BusState:
    """The bus state of one checkpoint; CheckpointRefused when it is damaged or of other settings."""
    file = bus_state_file(save, step)
    try:
        state = msgspec.msgpack.decode(file.read_bytes(), type=BusState)
    except (OSError, *UNREADABLE) as error:
        raise CheckpointRefused(f"checkpoint {step} in {save} has no usable bus state ({error}). {others(save, step)}") from error
    if fingerprint and state.fingerprint != fingerprint:
        raise CheckpointRefused(
            f"checkpoint {step} in {save} was written with other data or group settings (run {state.run!r}). Nothing was "
            "changed. Load it with the same --prompt-data, --n-samples-per-prompt, --rollout-seed and --rollout-shuffle, or choose "
            "another --load."
        )
    return state


def consumed_before(save: Path, state: BusState) -> tuple[tuple[Consumed, ...], int]:
    """Groups inside the kept checkpoints up to this one, without a gap, and the step from which on that is all of them: a server
    that lost its last moments may have lost what several quick checkpoints acknowledged."""
    consumed, since = state.consumed, state.after
    while since > 0:
        try:
            before = msgspec.msgpack.decode(bus_state_file(save, since).read_bytes(), type=BusState)
        except (OSError, *UNREADABLE):
            break
        consumed, since = before.consumed + consumed, min(before.after, since - 1)
    return consumed, since


def refusal(error: CheckpointRefused, save: Path, step: int | None) -> str:
    """What is said of a checkpoint that was refused: where it is damaged, also which others may do."""
    return str(error) if isinstance(error, CheckpointOfAnother) else f"{error} {others(save, step)}"


def others(save: Path, damaged: int | None) -> str:
    """The end of a refusal: which checkpoints are intact, and how to go on from one."""
    intact = [step for step in steps_in(save) if step != damaged and _looks_intact(save, step)]
    if not intact:
        return "No other checkpoint lies there; choose another --load, or an empty --save to start from scratch."
    return f"Intact: {', '.join(map(str, intact))}; write one of these numbers into {save / TRACKER} to go on from it."


def _looks_intact(save: Path, step: int) -> bool:
    """Bus state readable, and all files of the index there in full size."""
    try:
        msgspec.msgpack.decode(bus_state_file(save, step).read_bytes(), type=BusState)
    except (OSError, *UNREADABLE):
        return False
    return not missing_of(iter_dir(save, step))


def missing_of(directory: Path) -> str:
    """Which file of a checkpoint's index is not there in full size, or what is wrong with the index; empty when all are. The
    checksums are the loader's to compare."""
    try:
        index = json.loads((directory / INDEX).read_text())
        sizes = {name: int(file["n_bytes"]) for name, file in index["files"].items()}
    except OSError as error:
        return f"{INDEX} cannot be read ({error.strerror}): it was never finished"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} is damaged"
    for name, size in sizes.items():
        try:
            found = (directory / name).stat().st_size
        except (OSError, ValueError) as error:
            return f"{name!r} cannot be read ({getattr(error, 'strerror', error)})"
        if found != size:
            return f"{name} has {found} bytes instead of {size}: it is cut or overwritten"
    return ""


async def acknowledged(bus: Bus) -> int:
    """Step of the newest checkpoint that the bus has taken note of, 0 for none. The directory has it before."""
    return await bus.state_as("saved", lambda text: int(text or 0))


async def is_older(bus: Bus, save: Path, state: BusState) -> bool:
    """Whether this bus, restarted from old files, goes back further than the kept checkpoints tell what they contain: it would
    give out again what they have trained."""
    return await acknowledged(bus) < consumed_before(save, state)[1]


async def holds_nothing(bus: Bus) -> bool:
    """Whether this bus never saw the run: nobody issued a sample, no trainer spoke."""
    return not (await bus.state("sampler") or await bus.state("trainer"))


async def _other_life(bus: Bus, state: BusState) -> bool:
    """Whether the bus was made anew since that checkpoint, and holds what came of that: other groups under the same ids."""
    written = state.state.get(LIFE)  # none in what an earlier release wrote
    return written is not None and written != await bus.state(LIFE) and not await holds_nothing(bus)


async def go_back(bus: Bus, save: Path, state: BusState, *, saved: int) -> str:
    """Make the bus hold nothing when it has acknowledged more than the checkpoint contains, since its streams no longer have
    what must be trained again, or when it is older. Version ids stay used. Returns why, empty when there was no need.

    saved: what was `acknowledged` before anybody looked which checkpoint is the newest. A trainer that an earlier launcher left
    alive saves on meanwhile: asked afterwards, the bus of a healthy run would seem to be ahead of its checkpoints."""
    if saved > state.step:
        why = f"checkpoint {state.step} is older than what the bus has acknowledged: the bus goes back with it"
    elif saved < state.step and await _other_life(bus, state):
        why = f"checkpoint {state.step} is of steps that were left for an earlier checkpoint: the bus is made anew from it"
    elif not await holds_nothing(bus) and await is_older(bus, save, state):
        why = f"the bus came back older than the checkpoints before {state.step}: it is made anew from that"
    else:
        return ""
    await begin_anew(bus)
    return why


async def begin_anew(bus: Bus) -> None:
    """Make the bus hold nothing. Version ids stay used."""
    version = await bus.state("version")
    await bus.forget_run()
    await bus.commit(Commit(state={"version": version}))


async def restore_bus(bus: Bus, state: BusState) -> None:
    """Give a Redis that `holds_nothing` what the checkpoint kept of the lost one: cursor, accounts, open groups (to be
    issued again). Tokens that were under way are booked as lost."""
    tokens_open = (
        state.ledger.get("tokens/generated", 0)
        - state.ledger.get("tokens/trained", 0)
        - sum(n for account, n in state.ledger.items() if account.startswith("tokens/dropped/"))
    )
    books = dict(state.ledger)
    for account, n in dropped(DropReason.BUS_LOST, 0, tokens_open).items():
        books[account] = books.get(account, 0) + n
    groups = {group.group_id: msgspec.msgpack.encode(group) for group in whole_again(state.open_groups.values())}
    # Not the evaluator's: samples of an evaluation under way are gone, and the next interval measures again.
    fields = {k: v for k, v in state.state.items() if k in ("sampler", "sampler.data", "version", "folded")}
    fields["version"] = str(max(int(fields.get("version") or 0), await bus.state_as("version", lambda text: int(text or 0))))
    fields |= {"saved": str(state.step)}
    await bus.commit(Commit(ledger=books, open_groups=groups, state={**fields, "reissue": "pending"}))


def whole_again(opened: Iterable[bytes]) -> list[OpenGroup]:
    """Open groups and parts as groups to issue again: one for each group, of all its open samples, with the rewards of those
    that are trained."""
    parts: dict[str, list[OpenGroup]] = {}
    for raw in opened:
        part = msgspec.msgpack.decode(raw, type=OpenGroup)
        parts.setdefault(part.group_id, []).append(part)
    groups: list[OpenGroup] = []
    for _, found in sorted(parts.items()):
        members = sorted({index for part in found for index in part.indexes})
        rewards = {i: reward for part in found for i, reward in part.rewards.items() if i not in members}
        all_of_it = len(members) == found[0].n_samples
        groups.append(
            msgspec.structs.replace(
                found[0],
                attempt=max(part.attempt for part in found) + 1,
                members=None if all_of_it else tuple(members),
                rewards=rewards,
            )
        )
    return groups


def newest_written(weights_dir: Path) -> int:
    """Largest version id with weights in the directory, 0 without any."""
    return max((int(p.name[1:]) for p in weights_dir.glob("v*") if p.name[1:].isdecimal()), default=0)


def booked_as_trained(accounts: Accounts) -> int:
    """Samples whose groups were acknowledged after a step: their entries are gone."""
    return accounts.trained + accounts.dropped.get(DropReason.MASKED, 0)


def fingerprint_of(identity: dict[str, Any]) -> str:
    """Digest of the settings that must not differ between a checkpoint and the run that loads it."""
    return hashlib.blake2b(msgspec.json.encode(identity, order="sorted"), digest_size=8).hexdigest()
