"""Dead letters: write, list, retry, drop. One script each way, so that a letter is never both gone and not retried.

A letter keeps what its entry held: the body itself, or the reference to it (field `blob`). The commit that buries the entry leaves
that body where it is; it goes when the letter is dropped or what was retried is acknowledged.

What follows a dead sample was done when it died: a marker went on in its place and its group is dropped, in the same
commit. Putting the old sample back then would leave it at the filter for ever. So a retry has three answers: the group
still needs the sample (the entry goes back as it was), the group is closed (its prompt starts again as a new group), or
there is nothing left to retry (said so, and nothing changes).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bus.blobs.api import claimed_bytes
from bus.errors import BadMessage, MilesAsyncError, printable
from bus.inspect import all_heads
from bus.messages.codec import Decoder, encode
from bus.messages.control import DeadLetter
from bus.messages.policy import GroupsGivenUp
from bus.messages.samples import RolloutLost
from bus.streams.entry import Entry
from bus.streams.link import Script
from bus.streams.redis import Bus
from bus.topology import BY_NAME, DEAD, POLICY, ROLLOUTS, SCORED

MOVE = Script("move.lua")


class Letter(msgspec.Struct, frozen=True):
    """A dead letter and the id it is called by. `aside`: where the letter itself lies, if it was too large for its entry."""

    id: str
    letter: DeadLetter
    aside: str = ""


class Retried(msgspec.Struct, frozen=True):
    """What a retry did: `again` (the entry is back) or `reissued` (its prompt will start as a new group)."""

    how: Literal["again", "reissued"]
    stream: str
    entry_id: str
    text: str


class CannotRetry(MilesAsyncError):
    """Nothing was changed; the text says why and what to do instead."""


def letter_of(entry: Entry, *, actor: str, error: str, wall: float, traceback: str = "") -> DeadLetter:
    """What is kept of an entry that failed for good; append it in the commit that acknowledges the entry."""
    return DeadLetter(
        stream=entry.stream.name,
        entry_id=entry.id,
        actor=actor,
        error=printable(error),
        traceback=printable(traceback[-4000:]),
        deliveries=entry.deliveries,
        fields={**entry.fields, "blob": entry.blob} if entry.blob else dict(entry.fields),
        body=entry.body,
        wall=wall,
        sample_id=entry.fields.get("id", ""),
        group_id=entry.fields.get("group", ""),
    )


async def read_letters(bus: Bus) -> list[Letter]:
    """All dead letters, oldest first; unreadable ones are left out."""
    found: list[Letter] = []
    for entry in await bus.scan_all(DEAD):
        try:
            found.append(Letter(entry.id, await bus.message(entry), entry.blob))
        except BadMessage:
            continue
    return found


async def find_letter(bus: Bus, name: str) -> Letter:
    """By its own id, by the id its entry had, or by sample id (the newest)."""
    for item in reversed(await read_letters(bus)):
        if name in (item.id, item.letter.entry_id, item.letter.sample_id):
            return item
    raise CannotRetry(f"no dead letter {name!r}. miles-async bus dead list shows their ids; nothing was changed.")


def prompt_of(letter: DeadLetter) -> str:
    """Id of the prompt of its sample; empty where the letter does not hold it."""
    stream = BY_NAME.get(letter.stream)
    if stream is None or not letter.body:
        return ""
    try:
        message = Decoder[Any](stream.union, stream.name).decode(letter.body)
    except BadMessage:
        return ""
    return str(getattr(_task(message), "prompt_id", ""))


async def drop(bus: Bus, item: Letter) -> None:
    """Forget a letter. The accounts already hold its sample as dropped."""
    await _move(bus, item, DEAD.name, [], 0)
    await bus.blobs.delete(item.letter.kept)


async def retry(bus: Bus, item: Letter) -> Retried:
    """Give the work another chance; CannotRetry when there is none left, and nothing has changed then."""
    letter = item.letter
    message = await _decode(bus, item)
    group_id = letter.group_id or str(getattr(message, "group_id", ""))
    if getattr(_task(message), "eval_name", ""):
        raise CannotRetry(
            f"{letter.sample_id} was counted as lost in its evaluation, which may be over. The next evaluation asks the same "
            f"prompt again; miles-async bus dead drop {item.id} forgets the letter."
        )
    opened = await bus.hash_of(bus.keys.open_groups) if group_id else {}
    if not group_id or (group_id in opened and not await _given_up(bus, letter.sample_id)):
        kind = str(message.__struct_config__.tag)
        body = ("blob", letter.blob) if letter.blob else ("body", letter.body)
        size = len(letter.body) + claimed_bytes(*letter.kept)
        new_id = await _move(bus, item, letter.stream, ["type", kind, *_flat(letter.fields), *body], size)
        name = letter.sample_id or letter.entry_id
        return Retried("again", letter.stream, new_id, f"{name} is back on {letter.stream} as {new_id}")
    if group_id in opened:
        raise CannotRetry(f"group {group_id} is being closed without {letter.sample_id}. Try again in some seconds.")
    return await _reissue(bus, item, group_id, str(getattr(_task(message), "prompt_id", "")))


async def _reissue(bus: Bus, item: Letter, group_id: str, prompt_id: str) -> Retried:
    if not prompt_id:
        raise CannotRetry(
            f"group {group_id} was closed without it, and the letter does not name its prompt: nothing to retry. Drop it."
        )
    message = GroupsGivenUp(groups=(), prompts=(prompt_id,), reissue=True)
    fields = ["type", "policy.given_up", *message.header().fields(), "body", encode(message)]
    new_id = await _move(bus, item, POLICY.name, fields, 0)
    await bus.blobs.delete(item.letter.kept)
    who = item.letter.sample_id or "it"
    text = f"group {group_id} was closed without {who}; prompt {prompt_id} starts again as a new group"
    return Retried("reissued", POLICY.name, new_id, text)


async def _decode(bus: Bus, item: Letter) -> Any:
    """The message the letter holds; CannotRetry when it cannot be a message again."""
    letter, stream = item.letter, BY_NAME.get(item.letter.stream)
    if stream is None or not stream.is_data:
        raise CannotRetry(f"a letter from stream {letter.stream!r} cannot be retried: nobody consumes that stream.")
    if not letter.body and not letter.blob:
        raise CannotRetry(
            f"{letter.sample_id or letter.entry_id} cannot be put back: its body lay in a blob that is gone. Drop the letter."
        )
    try:
        body = letter.body or await bus.blobs.get(letter.blob)
        return Decoder[Any](stream.union, stream.name).decode(body)
    except BadMessage as error:
        raise CannotRetry(f"{letter.entry_id} would die again: {error}. Drop the letter.") from error


def _task(message: Any) -> Any:
    """The sample task inside whatever travels, or the message itself."""
    for name in ("task", "rollout"):
        inner = getattr(message, name, None)
        if inner is not None:
            return _task(inner)
    return message


async def _given_up(bus: Bus, sample_id: str) -> bool:
    """Whether the marker of a lost sample is on its way to the filter or there already."""
    lost = str(RolloutLost.__struct_config__.tag)
    for stream in (ROLLOUTS, SCORED):
        found = await all_heads(bus, stream)
        if any(head.sample == sample_id and head.fields.get("type") == lost for head in found):
            return True
    return False


def _flat(fields: dict[str, str]) -> list[str]:
    return [part for name, value in fields.items() if name not in ("type", "body", "blob") for part in (name, value)]


async def _move(bus: Bus, item: Letter, stream: str, fields: list[Any], size: int) -> str:
    """Take the letter away and append an entry of these fields; returns the entry's id."""
    keys = [bus.keys.stream(DEAD.name), bus.keys.stream(stream), bus.keys.in_flight_bytes]
    reply = await bus.link.run_script(MOVE, keys, [item.id, size, len(fields) // 2, *fields])
    if reply is None:
        raise CannotRetry(f"dead letter {item.id} is gone: somebody else has just dealt with it.")
    await bus.blobs.delete([item.aside])
    return str(reply.decode())
