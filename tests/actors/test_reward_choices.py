"""Multiple choice: the letter that a response settles on, and which letter a label means."""

from __future__ import annotations

from typing import Any

import pytest

from actors.reward.rules import RULES, chosen_letter
from actors.reward.sample import BadLabel, Sample


def gpqa(response: str, label: str, **fields: Any) -> Any:
    return RULES["gpqa"](Sample(**{"sample_id": "g1/0", "prompt": "", "response": response, "label": label, **fields}))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("Answer: C", "C"),
        ("answer: **D**", "D"),
        (r"so \boxed{\text{A}}", "A"),
        ("First A. then\nthe correct option is C", "C"),
        ("B", "B"),
        ("C) because", "C"),
        ("I think (A) or rather (B)", "B"),
        ("A cat sat", None),
        ("I think C is correct", "C"),
        ("(D) is the right one", "D"),
        ("The answer is B." + " Indeed so." * 9000, "B"),
        ("The answer is Zinc", None),
        (r"\boxed{Z}", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_settles_on(text: str, letter: str | None) -> None:
    assert chosen_letter(text, set("ABCD")) == letter


def test_gpqa_knows_letters_and_choices() -> None:
    assert gpqa("<think>(A)</think> The answer is B", "(B)") == 1.0
    choices = {"choices": ["red", "green", "dark blue"]}
    assert gpqa("Answer: C", "dark blue", metadata=choices) == 1.0
    assert gpqa("It must be\ndark blue.", "C", metadata=choices) == 1.0
    assert gpqa("The answer is dark blue. It is late.", "C", metadata=choices) == 1.0
    assert gpqa("The answer is dark blue, not red", "A", metadata=choices) == 0.0
    assert gpqa("Answer: A", "B", metadata={"correct_letter": "A"}) == 1.0
    assert gpqa("Answer: A", "0") == gpqa("Answer: C", "2", metadata=choices) == 1.0
    assert gpqa("Answer: A", "1") == 0.0
    assert gpqa("Answer: A", "1", metadata={"choices": ["1", "0"]}) == 1.0, "the words of a choice come first"
    with pytest.raises(BadLabel, match="names none of the choices"):
        gpqa("Answer: A", "3", metadata=choices)
    with pytest.raises(BadLabel, match="names none of the choices"):
        gpqa("Answer: A", "purple", metadata=choices)
