"""What must not be on a stream, made by chance from a seed: bytes, damaged and foreign and future messages, and messages whose
names, lengths and numbers cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from actors.runtime.content import fault_of
from bus import Bus, Commit, Out, Stream
from bus.errors import BadMessage
from bus.messages.active import PolicyActive
from bus.messages.base import Message, pack_floats, pack_ints
from bus.messages.codec import Decoder, encode
from bus.messages.control import Event
from bus.messages.groups import GroupKept, GroupVerdict, OpenGroup
from bus.messages.policy import PolicyAnnounced, StepDone, WeightManifest
from bus.messages.samples import (
    Parked,
    PrefixDropped,
    PrefixResume,
    Response,
    RolloutDone,
    RolloutLost,
    SampleTask,
    Scored,
)
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.streams.hop import Placed
from bus.topology import STREAMS
from tests.actors.house import rollout, scored, task

VOCABULARY = 64
VERSION = PolicyVersion(1, 0)
_again = msgspec.structs.replace


def _of_response(build: Callable[[Response], Message]) -> list[Message]:
    good = rollout(9, 0).response
    nan, high = pack_floats([float("nan")] * 3), pack_floats([-0.5, 7.5, -0.5])
    return [
        build(_again(good, **bent))
        for bent in (
            {"tokens": memoryview(b"1234567890123")},
            {"tokens": pack_ints([4, 5])},
            {"tokens": pack_ints([4, -1, 6])},
            {"tokens": pack_ints([4, 1 << 30, 6])},
            {"logprobs": memoryview(b"")},
            {"logprobs": nan},
            {"logprobs": high},
            {"logprobs": pack_floats([-0.5, float("-inf"), -0.5])},
            {"loss_mask": memoryview(b"\x01" * 7)},
            {"spans": ()},
            {"spans": (VersionSpan(1, 0, 9),)},
            {"spans": (VersionSpan(1, 0, -3), VersionSpan(1, 0, 6))},
        )
    ]


def _of_task(build: Callable[[SampleTask], Message]) -> list[Message]:
    good = task(9, 0)
    bad_sampling = [_again(good.sampling, temperature=float("nan")), _again(good.sampling, max_new_tokens=-1)]
    bents: list[dict[str, Any]] = [
        {"index": -1},
        {"index": 7},
        {"n_samples": 1 << 40, "index": 1 << 39},
        {"sample_id": "g1/1"},
        {"sample_id": ""},
        {"prompt_tokens": memoryview(b"12345")},
        {"prompt_tokens": pack_ints([1, -7])},
        *({"sampling": s} for s in bad_sampling),
    ]
    return [build(_again(good, **bent)) for bent in bents]


def _of_lost() -> list[Message]:
    lost = RolloutLost(sample_id="g9/0", group_id="g9", n_samples=2, reason="poison")
    bents: list[dict[str, Any]] = [{"tokens_made": -5}, {"sample_id": "g9"}, {"group_id": ""}, {"tokens_made": 1 << 60}]
    return [_again(lost, **bent) for bent in bents]


def bent() -> dict[str, list[Message]]:
    """Well-formed messages by stream that cannot be what they say, or that nobody waits for."""
    of_rollout = [*_of_response(lambda r: _again(rollout(9, 0), response=r)), *_of_task(lambda t: _again(rollout(9, 0), task=t))]
    of_scored = [_again(scored(9, 0, 1.0), rollout=r) for r in of_rollout if isinstance(r, RolloutDone)]
    taught = _again(scored(9, 0, 1.0), teacher_logprobs=pack_floats([float("nan")] * 3))
    short = _again(scored(9, 0, 1.0), teacher_logprobs=pack_floats([-1.0]))
    stranger = RolloutLost(sample_id="g8/0", group_id="g8", n_samples=2, reason="poison", tokens_made=9)
    resumed = [PrefixResume(task=r.task, response=r.response) for r in of_rollout if isinstance(r, RolloutDone)]
    dropped = PrefixDropped(task=task(9, 0), tokens_made=-1)
    pair = (scored(9, 0, 1.0), scored(9, 1, 0.0))
    groups: list[Message] = [GroupKept(group_id="g9", prompt_id="p9", samples=(s,)) for s in of_scored if isinstance(s, Scored)]
    groups += [
        GroupKept(group_id="g9", prompt_id="p9", samples=pair),  # of no open group
        GroupKept(group_id="g9", prompt_id="p9", samples=()),
        GroupKept(group_id="g9", prompt_id="p9", samples=(pair[0], pair[0])),
        GroupKept(group_id="g4", prompt_id="p4", samples=pair),
        GroupKept(group_id="g9", prompt_id="p9", samples=(scored(9, 0, float("nan")), pair[1])),
        GroupKept(group_id="g9", prompt_id="p9", samples=(scored(9, 0, 1e300), pair[1])),
        GroupKept(group_id="g9", prompt_id="p9", samples=pair, known=(float("inf"),)),
    ]
    step = StepDone(step=1, version=VERSION, trained_on=VERSION, groups=(), samples=("g1/99999999999",))
    manifest = WeightManifest(path="no\0path", transport="nccl")
    rollouts, scores = [*of_rollout, *_of_lost()], [*of_scored, *_of_lost(), taught, short, *pair, stranger]
    return {
        "prompts": _of_task(lambda t: t),
        "eval.prompts": _of_task(lambda t: t),
        "prefixes": [*resumed, dropped],
        "tail": list(resumed),
        "parked": [Parked(task=r.task, response=r.response, reason="drain") for r in of_rollout if isinstance(r, RolloutDone)],
        "rollouts": rollouts,
        "eval.rollouts": rollouts,
        "scored": scores,
        "eval.scored": scores,
        "groups": groups,
        "policy": [step, PolicyAnnounced(version=VERSION, manifest=manifest)],
        "verdicts": [GroupVerdict(group_id="g1", prompt_id="p1", kept=False, members=(1 << 60,))],
        "active": [PolicyActive(version=VERSION, slots={"w": -1})],
        "events": [Event(actor="w", kind="activated", text="", wall=0.0, data={"version": {"no": "number"}, "gpus": []})],
        "eval.results": [],
    }


def fields_of(message: Message, body: bytes | None = None) -> list[Any]:
    """An entry's fields as the bus writes them; `body`: what lies there instead."""
    fields = Placed(Out(STREAMS[0], message), encode(message)).fields()
    return [*fields[:-1], fields[-1] if body is None else body]


def garbage(stream: Stream, rng: random.Random, each: int = 3) -> list[list[Any]]:
    """Fields of entries: `each` of every kind, and every bent message once."""
    decoder = Decoder[Any](stream.union, stream.name)
    own = [encode(rollout(9, 0)), encode(scored(9, 0, 1.0)), encode(task(9, 0))]
    foreign: list[Message] = [Event(actor="a", kind="k", text="", wall=0.0), task(9, 0), rollout(9, 0), scored(9, 0, 1.0)]
    heads: list[list[Any]] = [
        [],
        ["id", "g9/0", "group", "g9", "tokens", "7"],
        ["id", "g9", "tokens", "-1"],
        ["id", b"\xff\xfe", "group", b"\xff"],
        ["id", "e77/0", "group", "e77"],
    ]
    bodies: list[bytes] = [b"", b"\xc0", encode(foreign[0])[:-2]]
    for _ in range(each):
        bodies.append(rng.randbytes(rng.randrange(1, 200)))
        whole = rng.choice(own)
        bodies.append(whole[: rng.randrange(1, len(whole))])
        bodies.append(msgspec.msgpack.encode({"type": rng.choice(["policy.newer", "x", ""]), "schema": 99, "more": [1, {}]}))
        bodies.append(msgspec.msgpack.encode(rng.choice([7, None, [1, 2], {"type": 5}, "text", {"a": [[[]]]}])))
        bodies.append(encode(rng.choice(foreign)))
    found: list[list[Any]] = []
    for body in bodies:
        try:
            usable = not fault_of(decoder.decode(body), VOCABULARY)
        except BadMessage:
            usable = False
        if not usable:
            found.append([*(["type", "policy.step"] if not stream.is_data else []), *rng.choice(heads), "body", body])
    found += [["blob", "redis:nothing:12"], ["blob", "nowhere"], ["id", "g9/0", "group", "g9"]]
    knows = stream.name not in ("rollouts", "eval.rollouts", "parked")  # what is open, and the vocabulary
    found += [fields_of(message) for message in bent()[stream.name] if knows or fault_of(message)]
    rng.shuffle(found)
    return found


async def list_open(bus: Bus, *groups: str, n: int = 2, generated: int = 0) -> None:
    """Groups as issued, with tokens as generated, in one commit."""
    opened = {g: msgspec.msgpack.encode(OpenGroup(group_id=g, prompt_id=g, n_samples=n)) for g in groups}
    await bus.commit(Commit(open_groups=opened, ledger={"issued": n * len(groups), "tokens/generated": generated}))


__all__ = ("VOCABULARY", "fields_of", "garbage", "list_open")
