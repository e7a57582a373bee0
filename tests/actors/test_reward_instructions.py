"""Instructions that a program can check: each is told from its violation, and one that is unknown is no wrong answer."""

from __future__ import annotations

from typing import Any

import pytest

from actors.reward.instructions import CHECKS, instructions
from actors.reward.sample import BadLabel, Sample

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sea", "sun"]}, "The Sea and the sun.", "The season and the sun."),
    ("keywords:frequency", {"keyword": "go", "relation": "at least", "frequency": 2}, "go Go", "go gone"),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "badly", "a bad one"),
    ("keywords:letter_frequency", {"letter": "z", "let_relation": "less than", "let_frequency": 2}, "Zoo", "zZ"),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 3}, "A. B! C?", "A. B"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "it's two", "now there are four"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "a\n\n*Then* b",
        "a\n\nb then",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b c]", "[a] []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP. S. y", "x"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", "*a* and ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, "SECTION 1 SECTION 2", "SECTION 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "a ****** b", "a ****** a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, "say it. It.", "It. Say it"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'so. "the end."', "The end. No."),
    ("startend:quotation", {}, '"all"', '"all'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "A BC d", "A d"),
    ("change_case:english_capital", {}, "ALL 3.", "ALl"),
    ("change_case:english_lowercase", {}, "all 3.", "aLl"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES, ids=[case[0] for case in CASES])
def test_an_instruction_is_told_from_its_violation(name: str, arguments: dict[str, Any], right: str, wrong: str) -> None:
    def score(response: str) -> Any:
        metadata = {"instruction_id_list": [name, "punctuation:no_comma"], "kwargs": [arguments, None]}
        return instructions(Sample(sample_id="g/0", prompt="", response=f"<think>,</think>{response}", label="", metadata=metadata))

    assert score(right) == {"score": 1.0, "followed": 1.0}
    assert score(wrong)["score"] == 0.0 and score("")["followed"] == 0.0


def test_all_are_tried_and_what_cannot_be_checked_is_an_error() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)
    for metadata, says in (
        ({"instruction_id_list": ["count:emoji"], "kwargs": [{}]}, "'count:emoji' is not known here"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "arguments of keywords:existence: KeyError"),
        ({}, "no instruction_id_list"),
    ):
        with pytest.raises(BadLabel, match=says):
            instructions(Sample(sample_id="g/0", prompt="", response="x", label="", metadata=metadata))
