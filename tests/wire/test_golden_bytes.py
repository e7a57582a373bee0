"""Bytes that were once written must mean the same for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus.messages.base import SCHEMA, Message
from bus.messages.codec import Decoder, encode
from bus.messages.groups import OpenGroup
from bus.messages.samples import Response, Routed
from bus.topology import STREAMS
from tests.bus.strategies import message_types
from tests.wire import examples, examples_2
from tests.wire.examples import read_golden, tag_of

OLD, NEW = read_golden(), read_golden(examples_2.GOLDEN)
OPEN_GROUP = bytes.fromhex(
    "87a867726f75705f6964a86730303030303432a970726f6d70745f6964a3703137a96e5f73616d706c657302a7617474656d707401a4737465"
    "7005ac736f757263655f696e64657811a565706f636802"
)
PAIRS = [(e, OLD) for e in examples.EXAMPLES] + [(e, NEW) for e in examples_2.EXAMPLES]
NEWEST = {tag_of(e): e for e in (*examples.EXAMPLES, *examples_2.EXAMPLES)}


def name_of(value: object) -> str:
    """Of a test case: tag and schema."""
    return tag_of(value) if isinstance(value, Message) else f"schema{1 if value is OLD else 2}"


def bare(message: Message) -> Any:
    """A message as plain values without its schema numbers."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k != "schema"}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(msgspec.msgpack.decode(encode(message), strict=False))


def decode(tag: str, body: bytes) -> Any:
    for stream in STREAMS:
        kinds = getattr(stream.union, "__args__", (stream.union,))
        if any(kind.__struct_config__.tag == tag for kind in kinds):
            return Decoder[Any](stream.union, stream.name).decode(body)
    raise AssertionError(f"no stream carries {tag}")


@pytest.mark.parametrize(("example", "golden"), PAIRS, ids=name_of)
def test_golden_bytes_decode_to_what_was_written(example: Message, golden: dict[str, bytes]) -> None:
    assert tag_of(example) in golden, "no golden bytes yet: run python -m tests.wire.golden"
    assert bare(decode(tag_of(example), golden[tag_of(example)])) == bare(example)


@pytest.mark.parametrize("example", examples_2.EXAMPLES, ids=tag_of)
def test_today_the_same_bytes_are_written(example: Message) -> None:
    assert SCHEMA == 2, "a new schema has examples of its own"
    assert encode(example) == NEW[tag_of(example)]


def test_every_message_has_an_example_with_golden_bytes() -> None:
    tags = {kind.__struct_config__.tag for kind in message_types()}
    assert tags == NEWEST.keys() == OLD.keys() | NEW.keys()


@pytest.mark.parametrize("example", NEWEST.values(), ids=tag_of)
def test_an_example_leaves_no_field_at_its_default(example: Message) -> None:
    for field in msgspec.structs.fields(example):
        if field.name != "schema":
            assert getattr(example, field.name) not in (field.default, field.default_factory), f"{tag_of(example)}.{field.name}"


@pytest.mark.parametrize(("golden", "tag"), [(g, t) for g in (OLD, NEW) for t in sorted(g)], ids=lambda v: str(v)[:30])
def test_old_bytes_with_only_required_fields_decode(golden: dict[str, bytes], tag: str) -> None:
    """A sender older than a field with a default left it out."""
    example = decode(tag, golden[tag])
    raw = msgspec.msgpack.decode(golden[tag])
    for field in msgspec.structs.fields(example):
        if not field.required:
            raw.pop(field.encode_name, None)
    assert type(decode(tag, msgspec.msgpack.encode(raw))) is type(example)


def test_an_open_group_in_the_registry_decodes() -> None:
    group = OpenGroup(group_id="g0000042", prompt_id="p17", n_samples=2, attempt=1, step=5, source_index=17, epoch=2)
    assert msgspec.msgpack.decode(OPEN_GROUP, type=OpenGroup) == group


@pytest.mark.parametrize("file", [examples.GOLDEN, examples_2.GOLDEN], ids=lambda file: file.stem)
def test_the_file_holds_each_message_once(file: Path) -> None:
    tags = [line.split()[0] for line in file.read_text().splitlines() if not line.startswith("#")]
    assert len(tags) == len(set(tags))


def test_experts_of_a_response_decode() -> None:
    """Added within schema 2; unset they are not on the wire."""
    raw = bytes.fromhex(
        "85a6746f6b656e73c400a86c6f6770726f6273c400a96c6f73735f6d61736bc400a57370616e7390a76578706572747383a464617461c4"
        "0403010002a16e02a477696465c2"
    )
    made = msgspec.msgpack.decode(raw, type=Response)
    assert made == Response(experts=Routed(data=memoryview(bytes([3, 1, 0, 2])), n=2))
    assert msgspec.msgpack.encode(made) == raw
    assert b"experts" not in msgspec.msgpack.encode(Response())
