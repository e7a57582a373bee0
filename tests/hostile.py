"""Texts of models that repeat themselves, and all that reads what a model wrote: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from actors.generation.endpoint import calls
from actors.generation.endpoint import request as wire
from actors.generation.rollouts.session import Segment
from actors.generation.rollouts.stops import until, watching
from actors.reward import code, instructions, judge, rules
from actors.reward.sample import Sample
from actors.runtime.calculator import calculate
from actors.runtime.refusals import _shape

UNITS = (
    # calls, by format
    "<tool_call>", "</tool_call>", "<tool_call></tool_call>", "<tool_call>x", '<tool_call>{"name": "', "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<arg_key>a</arg_key>", "<arg_key>a</arg_key><arg_value>", "<arg_key>a</arg_key> <arg_value>b",
    "<arg_key>a</arg_key><arg_value>b</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<|python_tag|>", "<|python_tag|>{}", '{"name": "a"}; ',
    '{"name": "a"} ; ', "; ", ";", '{"name"', '{"type": "function", "function": ', "<function=a>", "<parameter=b>",
    "</parameter>", "</function>",
    "<function=a><parameter=b>", "<|tool_call_start|>", "<|tool_call_start|>[f(", "<|message|>", "<|start|>", "to=functions.a",
    "<invoke>",
    # fences and blanks
    "```", "```json", "```json\n", "```python\n", "```\n", "``` \t", "\n", "\r\n", " ", "\t", " \n", "\u2028", "x\n", "\n\n",
    # JSON, brackets, escapes
    "{", "}", "[", "]", "{[", '{"a":', '{"a":[', "[1,", '"', '\\"', "\\", "\\u", "\\ud800", "\\u0000", "(", ")", "()", "<", ">",
    "<<", "<<x", "<<x>", "[x", "[[x]", "{{", "}}",
    # numbers
    "0", "9", "1.", "1e", "1e9", "-", "+", "--1", ".", "1,", "1,000", "1/", "0x", "NaN", "Infinity", "-Infinity",
    # marks of answers and thinking
    "<think>", "</think>", "<answer>", "</answer>", "#### ", "answer: ", "answer is ", "the answer is A ", "score: ",
    "score - ", "score",
    "\\boxed{", "\\boxed", "\\boxed{1}", "\\frac{", "\\frac{1}{", "\\text{", "$", "$$", "\\(", "(A)", "A", "A. ", "a A", "option ",
    # prose
    "a", "a ", "ab", "a-", "a'", "a.", "a!", "?", "...", "*", "**", "***", "* ", "- ", "*a", "*a ", "**a", "**a ", "* a\n",
    "- \n", "\n *", "''", "’", "_", "word ", "word, ", "é", "e\u0301",
    "\U0001f600", "\ufffd", "\x00", "\x1b[", "%s", "{prompt}", "stop", "STOP",
)  # fmt: skip
"""What is repeated."""
ENVELOPES = (
    ("", ""),
    ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'),
    ("<tool_call>calculator<arg_key>", "</arg_key></tool_call>"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>```json\n", "x"),
    ("<tool_call><function=calculator><parameter=expression>", "</parameter></function></tool_call>"),
    ("<|tool_call_start|>[calculator(expression=", ")]<|tool_call_end|>"),
    ("<|start|>assistant to=functions.calculator<|message|>", "<|call|>"),
    ('<|python_tag|>{"name": "calculator", "parameters": ', "}"),
    ("```json\n", "x"),
    ("</think>\n```python\n", "x"),
    ("The answer is ", "."),
)
"""What stands before and behind it: a parser that has begun is another than one that has not."""


def hostile(n: int) -> Iterator[tuple[str, str]]:
    """(name, text of some `n` characters): every unit alone, and in every envelope."""
    for before, behind in ENVELOPES:
        for unit in UNITS:
            yield f"{before[:24]!r} {unit!r}", before + unit * (n // len(unit)) + behind
    for unit in ("\ud800", "\udfff\ud800", "a\udc80"):  # halves of characters, as JSON can spell them
        yield f"surrogates {unit!a}", unit * (n // len(unit))


TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}]  # fmt: skip
ARGUMENTS: dict[str, Any] = {
    "keywords": ["word", "a"], "keyword": "a", "relation": "at least", "frequency": 1, "forbidden_words": ["a"], "letter": "a",
    "let_relation": "at least", "let_frequency": 1, "num_sentences": 3, "num_paragraphs": 2, "num_words": 3, "nth_paragraph": 1,
    "first_word": "a", "num_placeholders": 1, "postscript_marker": "P.S.", "num_bullets": 1, "num_highlights": 2,
    "section_spliter": "Section", "num_sections": 2, "prompt_to_repeat": "a", "end_phrase": "x", "capital_relation": "at least",
    "capital_frequency": 1,
}  # fmt: skip
"""Of every instruction of IFEval."""


def readers() -> dict[str, Callable[[str], object]]:
    """By name, all that looks at what a model wrote and runs in the loop of an actor of ours, or in a rule that ships."""
    found: dict[str, Callable[[str], object]] = {}
    for kind in calls.FORMATS:
        found[f"calls/{kind}"] = partial(_calls, kind)
        found[f"shown/{kind}"] = partial(wire.safe_length, stops=("stop\n\n",), opening=calls.OPENINGS[kind])
    for name, check in instructions.CHECKS.items():
        found[f"instruction/{name}"] = partial(_checked, check)
    for name, rule in rules.RULES.items():
        if name != "length":  # its label is a number
            found[f"rule/{name}"] = partial(_ruled, rule)
    return found | {
        "stops": _stopped, "unit tests": code.program_of, "judge": judge._SCORE.findall, "refusals": _shape,
        "calculator": calculate,
    }  # fmt: skip


def _calls(kind: str, text: str) -> None:
    made = calls.parse(text, kind, TOOLS)
    wire.message_of(text, made, "0")
    calls.without(text, made)
    for call in made:
        assert len(calls.fault(call, TOOLS)) < 2000


def _checked(check: instructions.Check, text: str) -> None:
    check(text, ARGUMENTS)


def _ruled(rule: rules.Rule, text: str) -> None:
    metadata = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "choices": ["x", "y"]}
    rule(Sample(sample_id="g/0", prompt="p", response=text, label="A", metadata=metadata))


def _stopped(text: str) -> None:
    """In eight chunks, and all at once."""

    def decode(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    tokens, stops = [*text.encode(errors="replace")], ("stop\n\n", "aaab")
    watch = watching(decode, stops)
    for n in range(1, 9):
        watch(tokens[: len(tokens) * n // 8])
    until(decode, Segment("model", tokens), stops)
