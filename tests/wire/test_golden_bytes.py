"""Bytes that were once written must mean the same for ever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bus.messages.base import SCHEMA, Message, pack_floats
from bus.messages.codec import Decoder, encode
from bus.messages.groups import OpenGroup
from bus.topology import STREAMS
from tests.bus.strategies import message_types
from tests.wire.examples import EXAMPLES, GOLDEN, SCORED, read_golden, tag_of

BYTES = read_golden()
OPEN_GROUP = bytes.fromhex(
    "87a867726f75705f6964a86730303030303432a970726f6d70745f6964a3703137a96e5f73616d706c657302a7617474656d707401a4737465"
    "7005ac736f757263655f696e64657811a565706f636802"
)
TEACHER_LOGPROBS = bytes.fromhex("b0746561636865725f6c6f6770726f6273c408000000bf000080bf")
"""The field that rollout.scored got later, as it is written when it is set to [-0.5, -1.0]."""


def decode(tag: str, body: bytes) -> Any:
    for stream in STREAMS:
        kinds = getattr(stream.union, "__args__", (stream.union,))
        if any(kind.__struct_config__.tag == tag for kind in kinds):
            return Decoder[Any](stream.union, stream.name).decode(body)
    raise AssertionError(f"no stream carries {tag}")


@pytest.mark.parametrize("example", EXAMPLES, ids=tag_of)
def test_golden_bytes_decode_to_what_was_written(example: Message) -> None:
    assert tag_of(example) in BYTES, "no golden bytes yet: run python -m tests.wire.examples"
    assert decode(tag_of(example), BYTES[tag_of(example)]) == example


@pytest.mark.skipif(SCHEMA != 1, reason="examples of schema 1 are encoded with the present schema number")
@pytest.mark.parametrize("example", EXAMPLES, ids=tag_of)
def test_today_the_same_bytes_are_written(example: Message) -> None:
    assert encode(example) == BYTES[tag_of(example)]


def test_every_message_has_an_example_with_golden_bytes() -> None:
    tags = {kind.__struct_config__.tag for kind in message_types()}
    assert tags == {tag_of(example) for example in EXAMPLES} == set(BYTES)


@pytest.mark.parametrize("example", EXAMPLES, ids=tag_of)
def test_an_example_leaves_no_field_at_its_default(example: Message) -> None:
    for field in msgspec.structs.fields(example):
        if field.name != "schema" and field.default is not msgspec.UNSET:
            assert getattr(example, field.name) != field.default, f"{tag_of(example)}.{field.name}"


@pytest.mark.parametrize("tag", sorted(BYTES))
def test_old_bytes_with_only_required_fields_decode(tag: str) -> None:
    """A sender older than a field with a default left it out."""
    example = decode(tag, BYTES[tag])
    raw = msgspec.msgpack.decode(BYTES[tag])
    for field in msgspec.structs.fields(example):
        if not field.required:
            raw.pop(field.encode_name, None)
    assert type(decode(tag, msgspec.msgpack.encode(raw))) is type(example)


def test_a_field_added_later_follows_the_old_bytes() -> None:
    """Its default is UNSET, so that a message without it is written as it always was."""
    taught = msgspec.structs.replace(SCORED, teacher_logprobs=pack_floats([-0.5, -1.0]))
    old, new = BYTES["rollout.scored"], encode(taught)
    assert new == bytes([old[0] + 1]) + old[1:] + TEACHER_LOGPROBS
    assert decode("rollout.scored", new) == taught


def test_an_open_group_in_the_registry_decodes() -> None:
    group = OpenGroup(group_id="g0000042", prompt_id="p17", n_samples=2, attempt=1, step=5, source_index=17, epoch=2)
    assert msgspec.msgpack.decode(OPEN_GROUP, type=OpenGroup) == group


def test_the_file_holds_each_message_once() -> None:
    tags = [line.split()[0] for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    assert len(tags) == len(set(tags))
