"""What is encoded is what is decoded, whatever it holds; and what is not a message is refused, never run."""

from __future__ import annotations

import pickle
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.errors import BadMessage
from bus.messages.base import EMPTY, SCHEMA, Message, join, pack_floats, pack_ints, unpack_floats, unpack_ints
from bus.messages.codec import Decoder, encode
from bus.messages.groups import GroupKept
from bus.messages.samples import Response, RolloutDone, Scored
from bus.messages.versions import PolicyVersion, VersionSpan, extend_spans, spans_cover
from bus.topology import BY_NAME, STREAMS
from tests.bus.strategies import instances_of, message_types
from tests.bus.suite.messages import a_group, a_response, a_rollout, a_task, more

STREAM_OF: dict[type[Message], str] = {}
for _stream in STREAMS:
    for _kind in getattr(_stream.union, "__args__", (_stream.union,)):
        STREAM_OF.setdefault(_kind, _stream.name)


def decode(stream: str, body: bytes) -> Any:
    return Decoder[Any](BY_NAME[stream].union, stream).decode(body)


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type[Message]) -> None:
    @settings(max_examples=40, deadline=None)
    @given(instances_of(kind))
    def survives(message: Message) -> None:
        body = encode(message)
        again = decode(STREAM_OF[kind], body)
        assert again == message and type(again) is kind
        assert encode(again) == body
        flat = message.header().fields()
        assert len(flat) % 2 == 0 and not {"type", "body", "blob"} & set(flat[::2])

    survives()


@pytest.mark.parametrize("n_tokens", [0, 1, 100_000])
def test_samples_of_any_length_survive_and_are_not_copied(n_tokens: int) -> None:
    rollout = a_rollout(a_task(prompt_tokens=n_tokens), n_tokens)
    body = encode(rollout)
    again = decode("rollouts", body)
    assert again == rollout and again.response.n_tokens == n_tokens
    assert unpack_ints(again.task.prompt_tokens) == list(range(n_tokens))
    assert spans_cover(again.response.spans, n_tokens)
    if n_tokens > 1:
        assert again.response.tokens.obj is body, "arrays are views into the received bytes"


def test_a_group_of_long_samples_survives() -> None:
    group = a_group(n_samples=4, n_tokens=100_000)
    again = decode("groups", encode(group))
    assert again == group and again.header().tokens == 400_000


def test_unknown_fields_of_a_newer_release_are_ignored() -> None:
    raw = msgspec.msgpack.decode(encode(a_rollout(a_task())))
    raw |= {"from_the_future": {"deep": [1, 2]}}
    raw["task"]["new_too"] = True
    assert decode("rollouts", msgspec.msgpack.encode(raw)).task == a_task()


def test_a_message_whose_meaning_this_release_does_not_know_is_refused_as_content() -> None:
    raw = msgspec.msgpack.decode(encode(a_rollout(a_task()))) | {"schema": SCHEMA + 1}
    with pytest.raises(BadMessage, match=f"schema {SCHEMA + 1}, this release reads up to {SCHEMA}"):
        decode("rollouts", msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x00",
        b"\x81\xa4type\xacrollout.done",
        b"\x81\xa4type\xa7unknown",
        pickle.dumps(print),
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        encode(a_group()),  # a message, but of another stream
        msgspec.msgpack.encode({"type": "rollout.done", "task": 7}),
        msgspec.msgpack.encode({"type": "rollout.lost", "sample_id": b"\xff", "group_id": "", "n_samples": 1}),
    ],
    ids=range(11),
)
def test_bytes_that_are_no_message_are_refused_in_one_line(body: bytes) -> None:
    with pytest.raises(BadMessage, match="rollouts") as refusal:
        decode("rollouts", body)
    assert "\n" not in str(refusal.value)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_do_anything_but_decode_or_be_refused(body: bytes) -> None:
    for stream in STREAMS:
        try:
            assert isinstance(decode(stream.name, body), Message)
        except BadMessage:
            continue


def test_a_refusal_quotes_bytes_from_outside_in_one_line_and_without_control_codes() -> None:
    body = encode(a_group()).replace(b"group.kept", b"\n\x1b[2J.kept")
    with pytest.raises(BadMessage, match=r"undecodable message on stream groups: .*\\n\\x1b\[2J.kept") as caught:
        decode("groups", body)
    assert str(caught.value).isprintable()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_messages_are_refused_or_decode_but_never_raise_anything_else(data: st.DataObject) -> None:
    body = bytearray(encode(a_group()))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    try:
        assert isinstance(decode("groups", bytes(body)), GroupKept)
    except BadMessage as error:
        assert "\n" not in str(error)


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1)))
def test_packed_ints_come_back(values: list[int]) -> None:
    assert unpack_ints(pack_ints(values)) == values
    assert join([pack_ints(values), EMPTY, pack_ints(values)]) == pack_ints(values * 2)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_packed_floats_come_back(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == values


def test_arrays_are_little_endian_on_the_wire() -> None:
    assert bytes(pack_ints([1, -2])) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert array("f", [1.0]).tobytes() == bytes(pack_floats([1.0])) == b"\x00\x00\x80?"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=12))
def test_spans_grow_with_the_tokens(pieces: list[tuple[int, int]]) -> None:
    response, made = Response(), []
    for grown, n in pieces:
        version = PolicyVersion(id=10 + grown, step=grown)
        response = more(response, n, version)
        made += [grown] * n
    assert spans_cover(response.spans, response.n_tokens) and response.n_tokens == len(made)
    assert all(a.version != b.version for a, b in zip(response.spans, response.spans[1:], strict=False))


def test_spans_of_one_version_stay_one_span() -> None:
    spans = extend_spans(extend_spans((), PolicyVersion(3, 2), 4), PolicyVersion(3, 2), 5)
    assert spans == (VersionSpan(3, 2, 9),) and extend_spans(spans, PolicyVersion(9, 9), 0) == spans
    assert not spans_cover(spans, 8)


def test_headers_say_what_an_operator_looks_for() -> None:
    rollout = a_rollout(a_task(3, "g0000007"), 5, version=12)
    flat = Scored(rollout=rollout, reward=0.5).header().fields()
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    assert fields == {
        "id": "g0000007/3",
        "group": "g0000007",
        "version": 12,
        "tokens": 5,
        "knob": 0,
        "note": "reward=0.5",
    }
    empty = RolloutDone(task=a_task(), response=a_response(0), finish="stop")
    assert empty.header().version == -1 and "version" not in empty.header().fields()
