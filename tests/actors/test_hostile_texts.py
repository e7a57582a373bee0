"""What a model writes costs linear time, whatever it repeats, and never an exception."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from actors.generation.endpoint.calls import MOST_CALLS, fault, parse
from actors.generation.endpoint.plain_json import MOST_DEPTH
from actors.generation.endpoint.request import message_of
from actors.generation.rollouts.session import Segment
from actors.generation.rollouts.stops import PENDING, Growing, until, watching
from actors.reward.instructions import CHECKS
from tests.hostile import TOOLS, hostile, readers

CHARACTERS = 8_000
HANGS_S = 0.5  # of CPU: linear work takes 3 ms at most, quadratic work a second and more


@pytest.mark.parametrize("reader", readers())
def test_no_text_of_a_model_holds_up_who_reads_it(reader: str) -> None:
    read = readers()[reader]
    texts = list(hostile(CHARACTERS))
    assert len(texts) > 300
    for name, text in texts:
        began = time.process_time()
        read(text)
        assert time.process_time() - began < HANGS_S, name


def test_an_answer_of_thousands_of_calls_is_read_up_to_a_bound() -> None:
    for kind, one in (
        ("hermes", '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'),
        ("glm", "<tool_call>calculator<arg_key>expression</arg_key><arg_value>1</arg_value></tool_call>"),
        ("llama3", '{"name": "calculator", "parameters": {"expression": "1"}};'),
    ):
        calls = parse(one * (MOST_CALLS + 3), kind, TOOLS)
        assert [fault(call, TOOLS) for call in calls[:-1]] == [""] * MOST_CALLS
        assert f"at most {MOST_CALLS} calls" in fault(calls[-1], TOOLS)
        assert not parse(one * MOST_CALLS, kind, TOOLS)[-1].error


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("NaN", "NaN is no JSON"), ("-Infinity", "is no JSON"), ("1e999", "too large a number"),
        ("-1" + "0" * 400 + ".5", "too large"),
        ("9" * 100_000, "an integer of 100000 characters"), (str(2**64), "an integer of 20 characters"),
        (f"-{2**63 + 1}", "is too large; give it as a text"),
        ('"\\ud800"', "half of a character"), ('"\ud800"', "half of a character"),
        ('{"\\udfff": 1}', "half of a character"), ("[" * MOST_DEPTH + "]" * MOST_DEPTH, "in each other"),
        ("[" * 100_000 + "]" * 100_000, "in each other"), ("[" * 100_000, "in each other"), ('{"a":' * 50_000, "in each other"),
    ],
)  # fmt: skip
def test_arguments_that_no_reader_takes_are_told_to_the_model(value: str, says: str) -> None:
    """A NaN is no JSON for the client, an integer of 65 bits and half of a character cannot travel, depth is recursion."""
    [call] = parse(f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {value}}}}}</tool_call>', "hermes", TOOLS)
    assert says in call.error and len(fault(call, TOOLS)) < 400
    fault(call, TOOLS).encode()


@pytest.mark.parametrize("value", [str(2**64 - 1), str(-(2**63)), '"\\ud83d\\ude00"', '"\\\\ud800"', "1e308", "[" * 60 + "]" * 60])
def test_arguments_within_bounds_travel(value: str) -> None:
    text = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {value}}}}}</tool_call>'
    [call] = parse(text, "hermes", TOOLS)
    assert call.error == "" and call.arguments["expression"] == json.loads(value)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(call.arguments)) == call.arguments
    assert json.loads(message_of(text, [call], "0")["tool_calls"][0]["function"]["arguments"]) == call.arguments


def test_a_fault_of_a_call_is_short() -> None:
    names = {f"no_such_{i}": 1 for i in range(500)} | {"x" * 5000: 2}
    [call] = parse("<tool_call>" + json.dumps({"name": "calculator", "arguments": names}) + "</tool_call>", "hermes", TOOLS)
    assert "and 497 further faults" in fault(call, TOOLS) and len(fault(call, TOOLS)) < 400
    [call] = parse('<tool_call>{"name": "' + "n" * 9000 + '"}</tool_call>', "hermes", TOOLS)
    assert len(fault(call, TOOLS)) < 200


def test_a_key_of_glm_without_a_value_is_passed_over() -> None:
    text = (
        "<tool_call>calculator<arg_key>a</arg_key><arg_key>b</arg_key> \n<arg_value>1</arg_value>"
        "<arg_key>c</arg_key>x<arg_value>2</arg_value><arg_key>d</arg_key><arg_value>3"
    )
    [call] = parse(text, "glm", [])
    assert (call.arguments, call.error) == ({"b": 1}, "")


def text_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


class Counted:
    """Decodes bytes, and counts them."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, tokens: Sequence[int]) -> str:
        self.tokens += len(tokens)
        return text_of(tokens)


@pytest.mark.parametrize("token", [0xE2, ord("a")])
def test_tokens_are_decoded_a_few_times_only(token: int) -> None:
    """Also those that never become a character: a policy that repeats a byte."""
    decode, n = Counted(), 2000
    growing = Growing(decode)
    for end in range(1, n + 1):
        growing.read([token] * end)
    assert decode.tokens < n * (PENDING + 4) * 3
    assert len(growing.read([token] * n)) >= n - PENDING - 1


def test_a_character_that_comes_in_parts_is_whole() -> None:
    growing, tokens = Growing(text_of), list("a\u20ac\U0001f600b".encode())
    assert [growing.read(tokens[:n]) for n in range(1, len(tokens) + 1)] == [
        "a", "a", "a", "a\u20ac", "a\u20ac", "a\u20ac", "a\u20ac", "a\u20ac\U0001f600", "a\u20ac\U0001f600b",
    ]  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
@pytest.mark.parametrize("stops", [("stop",), ("xy", "stop"), ("p", "stop and"), ("none",)])
def test_a_stop_is_found_wherever_a_chunk_ends(chunk: int, stops: tuple[str, ...]) -> None:
    tokens = list(b"go on, then stop and xy")
    watch = watching(text_of, stops)
    ended = next((n for n in range(chunk, len(tokens) + chunk, chunk) if watch(tokens[:n])), 0)
    text = text_of(tokens)
    first = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=0)
    assert (ended > 0) == (first > 0) and first <= max(ended, first) < first + chunk + (first == 0)
    made = until(text_of, Segment("model", tokens), stops)
    assert text_of(made.tokens) == text[: first or len(text)]


def test_a_stop_at_the_start_of_one_long_chunk_is_found_in_few_looks() -> None:
    decode, n = Counted(), 20_000
    made = until(decode, Segment("model", [*b"stop", *[0x61] * n]), ("stop",))
    assert text_of(made.tokens) == "stop" and decode.tokens < 20 * n


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('```json\n{"a": 1}\n```', True), ('```\n[1]```', True), ('{"a": 1}', True), ("```JSON  \n1\n```", True),
        ("```json\n{\n```", False),
        ("[" * 100_000, False), ("```json\n1", False), ("nothing", False),
    ],
)  # fmt: skip
def test_an_answer_in_json_is_known(text: str, follows: bool) -> None:
    assert CHECKS["detectable_format:json_format"](text, {}) is follows


@pytest.mark.parametrize(
    ("text", "n"), [("* a\n\n\n * b\n- c", 3), ("*a\n-b", 0), ("** a", 0), ("\n\n* a\n", 1), ("a * b", 0), ("*\na", 1)]
)
def test_bullets_are_counted_by_line(text: str, n: int) -> None:
    arguments: dict[str, Any] = {"num_bullets": n}
    assert CHECKS["detectable_format:number_bullet_lists"](text, arguments)
