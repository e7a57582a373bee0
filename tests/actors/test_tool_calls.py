"""Tool calls in what models write: read where they stand, and what is broken is told to the model."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generation.endpoint.calls import FORMATS, ToolCall, fault, parse, without

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"expression": {"type": "string"}, "n": {"type": "integer"}}, "required": ["expression"]}}}
    for name in ("calculator", "python")
]  # fmt: skip
D1, D2, D3, D4, SEP = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    "<｜tool▁sep｜>",
)
ONE = '{"name": "calculator", "arguments": {"expression": "1+2", "n": 3}}'
TWO = '{"name": "python", "arguments": {"expression": "print(\\"}\\")"}}'
WRITTEN = {
    "hermes": f"I ask.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>",
    "glm": "I ask.\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1+2</arg_value>\n<arg_key>n</arg_key>\n"
    '<arg_value>3</arg_value>\n</tool_call><tool_call>python\n<arg_key>expression</arg_key><arg_value>print("}")</arg_value></tool_call>',
    "llama3": f"I ask.<|python_tag|>{ONE.replace('arguments', 'parameters')}; {TWO.replace('arguments', 'parameters')}",
    "deepseek": f'I ask.{D1}{D2}function{SEP}calculator\n```json\n{{"expression": "1+2", "n": 3}}\n```{D3}\n'
    f'{D2}python{SEP}{{"expression": "print(\\"}}\\")"}}{D3}{D4}',
    "qwen3_coder": "I ask.\n<tool_call>\n<function=calculator>\n<parameter=expression>\n1+2\n</parameter>\n<parameter=n>\n3\n"
    '</parameter>\n</function>\n</tool_call>\n<function=python><parameter=expression>print("}")</parameter></function>',
    "gpt-oss": "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant to=functions.calculator<|channel|>commentary json"
    '<|message|>{"expression": "1+2", "n": 3}<|call|><|start|>assistant<|channel|>commentary to=functions.python '
    '<|constrain|>json<|message|>{"expression": "print(\\"}\\")"}',
    "lfm2": "I ask.<|tool_call_start|>[calculator(expression='1+2', n=3), python(expression='print(\"}\")')]<|tool_call_end|>",
}


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_gives_the_calls_and_the_text_beside_them(kind: str) -> None:
    text = WRITTEN[kind]
    calls = parse(text, kind, TOOLS)
    assert [(c.name, c.arguments, c.error) for c in calls] == [
        ("calculator", {"expression": "1+2", "n": 3}, ""),
        ("python", {"expression": 'print("}")'}, ""),
    ]
    assert without(text, calls).removeprefix("<|channel|>analysis<|message|>").removesuffix("<|end|>") == "I ask."
    assert all("1+2" in text[c.start : c.end] or "print" in text[c.start : c.end] for c in calls)
    assert not any(fault(call, TOOLS) for call in calls)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("hermes", '<tool_call>{"name": "calculator", "arguments": {"expression": }}</tool_call>', "Expecting value"),
        ("hermes", '<tool_call>{"name": "calculator", "argum', "cannot be read"),  # cut off by the limit of tokens
        ("hermes", '<tool_call>["calculator"]</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>', "no object"),
        ("hermes", '<tool_call>{"name": "calculator", "arguments": "{\\"a\\""}</tool_call>', "cannot be read"),
        ("hermes", '<tool_call>{"name": "oracle", "arguments": {}}</tool_call>', "no tool 'oracle'. Tools: calculator, python."),
        ("hermes", '<tool_call>{"name": "python"}</tool_call>', "argument 'expression' is missing"),
        ("hermes", f"<tool_call>{ONE[:-2]}, \"m\": 1}}}}</tool_call>", "there is no argument 'm'"),
        ("glm", "<tool_call>two words\n<arg_key>a</arg_key></tool_call>", "cannot be read"),
        ("llama3", '<|python_tag|>{"name": "calculator", ', "cannot be read"),
        ("llama3", "<|python_tag|>print(1)", "cannot be read"),
        ("qwen3_coder", f"<tool_call>\n{ONE}\n</tool_call>", "no <function=name>"),
        ("qwen3_coder", "<tool_call>\n<function=calculator>\n<parameter=expression>\n1+", "no <parameter=name> or </function>"),
        ("qwen3_coder", "<function=two words></function>", "no name in"),
        ("qwen3_coder", "<function=", "no name in"),
        ("gpt-oss", '<|channel|>commentary to=functions.calculator<|message|>{"expression": <|call|>', "Expecting value"),
        ("gpt-oss", "<|channel|>commentary to=functions.calculator<|message|>[1]", "no object"),
        ("lfm2", "<|tool_call_start|>[calculator(1+2)]<|tool_call_end|>", "not a call with named arguments"),
        ("lfm2", "<|tool_call_start|>[calculator(expression=f())]", "malformed"),
        ("lfm2", "<|tool_call_start|>[calculator(expression='1+", "cannot be read"),
        ("deepseek", f"{D1}{D2}calculator {{}}{D3}{D4}", "no name before"),
        ("deepseek", f"{D1}{D2}function{SEP}calculator\n```json\n{{\"a\"", "cannot be read"),
    ],
)  # fmt: skip
def test_a_broken_call_is_an_error_for_the_model(kind: str, text: str, says: str) -> None:
    [call] = parse(text, kind, TOOLS)
    assert says in fault(call, TOOLS) and "\n" not in fault(call, TOOLS)


def test_an_answer_without_a_call_has_none() -> None:
    for kind in FORMATS:
        for text in ("", "the sum is 3", '{"answer": 3}'):
            assert parse(text, kind) == [] and without(text, []) == text
    [call] = parse('  {"name": "calculator", "parameters": {"n": 1}}', "llama3")  # without its tag, as Llama 3.1 often writes
    assert (call.name, call.arguments) == ("calculator", {"n": 1})


MARKS = (*"{[}\"':,;<>", "<tool_call>", "</tool_call>", "<arg_key>", D1, D2, D3, SEP, "<|python_tag|>", "name", "[" * 5000)
MARKS += ("<function=", "</function>", "<parameter=", "</parameter>", "<|message|>", "to=functions.", "<|call|>", "f(x=1)")
MARKS += ("<|tool_call_start|>", "<|tool_call_end|>")
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
texts = st.text(st.characters(exclude_characters="<>`｜"))
objects = st.dictionaries(names, st.one_of(st.integers(-(2**63), 2**64 - 1), st.booleans(), texts, st.none()))


@given(name=names, arguments=objects, before=st.text(st.characters(exclude_characters="<{`")))
def test_what_is_written_in_a_format_is_read_back(name: str, arguments: dict[str, object], before: str) -> None:
    body = json.dumps(arguments, ensure_ascii=False)
    for kind, text in (
        ("hermes", f'{before}<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>'),
        ("llama3", f'{before}<|python_tag|>{{"name": "{name}", "parameters": {body}}}'),
        ("deepseek", f"{before}{D1}{D2}{name}{SEP}{body}{D3}{D4}"),
    ):
        [call] = parse(text, kind)
        assert (call.name, call.arguments, call.error) == (name, arguments, "")
        assert without(text, [call]) == before.strip()


@given(text=st.lists(st.sampled_from(MARKS)).map("".join))
def test_no_text_breaks_a_parser(text: str) -> None:
    for kind in FORMATS:
        calls: list[ToolCall] = parse(text, kind)
        assert all(0 <= call.start < call.end <= len(text) for call in calls)
        without(text, calls)


@pytest.mark.parametrize("parameters", [None, {"properties": None}, {"properties": {"a": True}}])
def test_tools_that_describe_no_parameters_are_called(parameters: Any) -> None:
    """As clients send them whose tools take none."""
    tools = [{"type": "function", "function": {"name": "t", "parameters": parameters}}]
    [call] = parse("<tool_call>t<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "glm", tools)
    assert (call.arguments, call.error) == ({"a": 1}, "")


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("qwen3_coder", "<function=a><parameter=b></function>"),
        ("qwen3_coder", "<tool_call><function=a>"),
        ("qwen3_coder", "<tool_call>"),
        ("gpt-oss", "to=functions.a<|message|>"),
        ("gpt-oss", "<|message|>"),
        ("lfm2", "<|tool_call_start|>"),
        ("lfm2", "<|tool_call_start|>[f(x=" + "(" * 200),
    ],
)
def test_a_long_answer_of_beginnings_is_read_at_once(kind: str, part: str) -> None:
    """One pass: twenty times as long is far from four hundred times as long."""
    began = time.process_time()
    parse(part * 100_000, kind)
    assert time.process_time() - began < 15


def test_values_that_a_tool_calls_texts_stay_texts() -> None:
    text = "<function=calculator><parameter=expression>\n12\n</parameter><parameter=n>true</parameter></function>"
    [call] = parse(text, "qwen3_coder", TOOLS)
    assert call.arguments == {"expression": "12", "n": True}
    [call] = parse("<|tool_call_start|>[a.b(x=True, y=null, z=-1.5, w=['a', {'b': 1}])]<|tool_call_end|>", "lfm2")
    assert (call.name, call.arguments) == ("a.b", {"x": True, "y": None, "z": -1.5, "w": ["a", {"b": 1}]})


def test_what_pythons_parser_thinks_of_an_answer_is_nobodys_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [call] = parse('<|tool_call_start|>[f(x="\\d")]<|tool_call_end|>', "lfm2")
    assert (call.name, call.arguments, call.error) == ("f", {"x": "\\d"}, "")
