"""The reward rules: what earns a reward and what does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.reward.mathanswer import final_answer, last_boxed, verdict
from actors.reward.mathtext import normalize
from actors.reward.rules import BOXED_RULES, DEFAULT_KEYS, MATH_RULES, RULES
from actors.reward.sample import BadLabel, Sample, ScorerFailed, settle
from actors.reward.scorer import Scorers, UnknownScorer
from actors.runtime.run import Refused


def same_answer(given: str, wanted: str, question: str = "") -> bool:
    return verdict(given, wanted, question) is True


def undecided(given: str, wanted: str, question: str = "") -> bool:
    return verdict(given, wanted, question) is None


def sample(response: str, label: str = "", **fields: Any) -> Sample:
    return Sample(**{"sample_id": "g1/0", "prompt": "", "response": response, "label": label, **fields})


def score(rule: str, response: str, label: str = "", **fields: Any) -> Any:
    return RULES[rule](sample(response, label, **fields))


@pytest.mark.parametrize(
    ("given_answer", "wanted"),
    [
        ("42", "42"),
        ("42.0", "42"),
        ("+7", "7"),
        ("−3", "-3"),
        ("-0", "0"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        ("1e3", "1000"),
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", "1/2"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}"),
        ("3/4", "6/8"),
        ("7 3/4", "31/4"),
        (r"7\frac34", "7.75"),
        ("-1 1/2", "-1.5"),
        ("50", r"50\%"),
        ("$18", "18"),
        (r"\$18.00", "18"),
        (r"90^\circ", "90"),
        (r"5\text{ cm}", "5"),
        ("100 m", "100"),
        ("x = 5", "5"),
        (r"3\sqrt{2}", r"\sqrt{18}"),
        (r"\sqrt[3]{8}", "2^1"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        ("1024", "2^{10}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("2x/3", r"\frac{2x}{3}"),
        ("y=2x+1", "y = 1 + 2x"),
        (r"2\pi", r"\pi \cdot 2"),
        ("(1, 2)", r"\left(1,2\right)"),
        ("1,2", "2, 1"),
        (r"\{1, 2, 3\}", r"\{3,2,1\}"),
        ("[0, 1)", "[0,1)"),
        (r"(-\infty,0)\cup(1,2)", r"(1,2) \cup (-\infty, 0)"),
        (r"1 \pm \sqrt{2}", r"1-\sqrt 2, 1+\sqrt 2"),
        (r"\text{Monday}", "monday"),
        ("(A)", "A"),
        (r"\textbf{(A)}", "A"),
    ],
)
def test_answers_that_are_the_same(given_answer: str, wanted: str) -> None:
    assert same_answer(given_answer, wanted)


@pytest.mark.parametrize(
    ("given_answer", "wanted"),
    [
        ("", ""),
        ("", "0"),
        ("41", "42"),
        ("1 2", "12"),
        ("12", "1 2"),
        ("8/2", "4"),
        ("6/8", "3/4"),
        ("0.333", "1/3"),
        (r"\frac{1}{23}", r"\frac{12}{3}"),
        ("(1, 2)", "(2, 1)"),
        ("[0, 1)", "(0, 1)"),
        ("1, 2", "1, 2, 3"),
        ("1, 1", "1, 2"),
        ("(x+1)^2", "x^2+2x+2"),
        ("2x", "2X"),
        ("no", "on"),
        ("evil", "live"),
        ("10_2", "2"),
        (r"\pi", "3.14159"),
        (r"\sqrt{-1}", "1"),
        ("1/0", "1"),
        ("x^{9999999}", "1"),
        ("9^{9^{9^{9}}}", "1"),
        ("(" * 390, "1"),
        ("{" * 390, "1"),
        ("-" * 390, "1"),
        ("9" * 399, "9" * 398),
    ],
)
def test_answers_that_are_not(given_answer: str, wanted: str) -> None:
    assert not same_answer(given_answer, wanted)


@pytest.mark.parametrize(
    "given_answer",
    ["12+7", "7+12", "12+7+0", "12+6+1", "1{,}200+7", r"\frac{12}{1}+7", r"\sqrt{12^2}+7", "12*1+7", "2(12)-5", "6!-701+7-7"],
)
def test_the_question_is_no_answer_to_itself_however_it_is_turned(given_answer: str) -> None:
    question = "What is 12 + 7? (1,200+7 is another question.)"
    wanted = "1207" if "200" in given_answer else "19"
    assert not same_answer(given_answer, wanted, question) and not undecided(given_answer, wanted, question)
    assert same_answer("19", "19", question) and same_answer(r"\frac{38}{2}+0", "19", question)


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_is_too_odd_to_compare(left: str, right: str) -> None:
    assert same_answer(left, right) in (True, False)
    assert same_answer(left, right) or left != right or not normalize(left)


@given(st.text(alphabet=r"0123456789+-*/^(){}[]\frac sqrt,.xy=$%", max_size=80))
def test_no_formula_is_too_odd_to_compare(text: str) -> None:
    assert not same_answer(text, "12345678987654321") or "1" in text
    final_answer(text)


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_a_fraction_is_its_value_however_it_is_written(top: int, low: int) -> None:
    top, low = top // math.gcd(top, low), low // math.gcd(top, low)
    if low > 1:
        sign = "-" if top < 0 else ""
        assert same_answer(rf"{sign}\frac{{{abs(top)}}}{{{low}}}", f"{top}/{low}")
    assert not same_answer(f"{top + 1}/{low}", f"{top}/{low}")
    assert same_answer(f"{top:,}", str(top))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 42\n" + "and so on. " * 9000, "42"),
        ("The answer is 42." + " We saw 7 of them." * 6000, "42"),
        (r"\boxed{42}" + " 7" * 50_000, "42"),
        ("It is 42." + " so we are done" * 7000, "42"),
        ("The answer is 42. Check: the answer is correct.", "42"),
        ("The answer is (1, 2).", "(1, 2)"),
        ("The answer is $3$, $4$ and $5$.", "3, 4 and 5"),
        ("The area is 5 m^2.", "5"),
        ("The area is 5 m².", "5"),
        ("y = 2x+1", "y = 2x+1"),
        ("**Final answer**: 7", "7"),
        (r"So $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{3} then \boxed{broken", "3"),
        (r"\boxed{ \{1,2\} }", r"\{1,2\}"),
        (r"it is \boxed 7 ok", "7"),
        ("19", "19"),
        ("-6", "-6"),
        ("3 and 4 give 12.", "12"),
        ("7+5=12", "12"),
        ("The answer is 3\\sqrt{2}. Done", "3\\sqrt{2}"),
        ("**Answer:** 5", "5"),
        ("The final answer is: $12$", "12"),
        ("The answer is about 5 apples in 3 bags.", "5"),
        ("so 6 * 12 = 72\n#### 72", "72"),
        ("the total is $1,234.", "1,234"),
        ("it is -3/4.", "-3/4"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_final_answer_of_a_response(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "The answer is not 42.", "The answer is definitely not 42", "It is not 42.", "The answer isn't 42.",
        "42 is not the answer.", "The answer is 43. It is not 42.", "43 = 42", "so x = 41 = 42", "The answer is 42 or 43.",
        "The answer is $42$ or $43$.", "The answer is either 42 or maybe 43", "#### 42 or 43", "Answer: 42, 43",
        r"\boxed{42\text{ or 43}}", r"\boxed{\text{not } 42}",
    ],
)  # fmt: skip
def test_what_is_denied_or_hedged_earns_nothing(text: str) -> None:
    assert score("math", text, "42") == score("gemma_math", text, "42") == 0.0


def test_what_was_denied_before_does_no_harm() -> None:
    assert score("math", "It is not 41. The answer is 42.", "42") == 1.0
    assert score("math", "The answer is 42, not 41.", "42") == 1.0
    assert score("math", "6*7 = 42", "42") == score("math", "x = 6*7 = 42", "42") == 1.0


def test_math_reads_labels_as_data_sets_write_them() -> None:
    assert score("math", r"\boxed{72}", "48 + 24 = 72\n#### 72") == 1.0
    assert score("math", r"\boxed{72}", r"Thus \boxed{72}.") == 1.0
    assert score("math", "36-9=27", "27") == 1.0
    assert score("math", "3*9+0", "27", prompt="3*9=") == 0.0
    assert score("math", "", "27") == 0.0


def test_the_whole_response_must_be_the_answer_when_asked_so() -> None:
    assert score("math_whole", "27", "27.0") == 1.0
    assert score("math_whole", "I think 27", "27") == 0.0


def test_exact_match_and_contains() -> None:
    assert score("exact_match", " 27\n", "27") == 1.0
    assert score("exact_match", "27.", "27") == 0.0
    assert score("contains", "it is blue", "blue") == 1.0
    assert score("contains", "it is blue", " ") == 0.0


def test_dapo_reads_the_last_answer_line_near_the_end() -> None:
    assert score("dapo", "Answer: 3\nno, Answer: 4", "4") == {"score": 1.0, "acc": 1.0}
    assert score("dapo", r"Answer: $\boxed{4}$", "4")["acc"] == 1.0
    for said in ("Answer: 4,", "**Answer**: 4", "Answer: **4**.", "Answer: 4 books", "Answer: x = 4", "Answer: 4<|im_end|>"):
        assert score("dapo", said, "4")["acc"] == 1.0, said
    for said in ("Answer: 3 or 4", "Answer: 3 = 4", "Answer: not 4"):
        assert score("dapo", said, "4")["acc"] == 0.0, said
    assert score("dapo", "Answer: 1,234,", "1234")["acc"] == 1.0
    assert score("dapo", "4", "4") == {"score": -1.0, "acc": 0.0}
    assert score("dapo", "Answer: 4" + " ." * 200, "4")["acc"] == 0.0


def test_deepscaler_wants_a_box_after_the_thinking() -> None:
    assert score("deepscaler", r"hm \boxed{4} </think> so \boxed{5}", "5") == 1.0
    assert score("deepscaler", r"hm \boxed{5} </think> so 5", "5") == 0.0
    assert score("deepscaler", r"\boxed{5}", "5") == 0.0
    assert score("deepscaler", r"###Response \boxed{5}", "5") == 1.0


def test_f1_counts_common_words() -> None:
    assert score("f1", "The cat, sat!", "a cat sat") == 1.0
    assert score("f1", "a cat ran", "the cat sat down") == pytest.approx(2 * 1 / (2 + 3))
    assert score("f1", "dog", "cat") == 0.0
    assert score("f1", "yes it is", "yes") == 0.0
    assert score("f1", "Yes.", "yes") == 1.0
    assert score("f1", "", "") == 0.0


def test_length_is_best_at_its_target() -> None:
    assert [score("length", "", "10", n_tokens=n) for n in (0, 5, 10, 15, 30)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    with pytest.raises(BadLabel):
        score("length", "", "ten")


def test_chance_follows_from_seed_and_sample_only() -> None:
    ids = [f"g{n}/0" for n in range(64)]
    bits = [score("random", "x", sample_id=i, run_seed=1) for i in ids]
    assert bits == [score("random", "x", sample_id=i, run_seed=1) for i in ids]
    assert bits != [score("random", "x", sample_id=i, run_seed=2) for i in ids]
    fixed = [score("deterministic_random", "x", sample_id=i, run_seed=1) for i in ids]
    assert fixed == [score("deterministic_random", "y", sample_id=i, run_seed=2) for i in ids]
    assert set(bits) == set(fixed) == {0.0, 1.0}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize(
    "response",
    [
        pytest.param("", id="empty"),
        pytest.param("\\boxed{" * 80_000, id="boxes"),
        pytest.param("answer: " * 60_000, id="answers"),
        pytest.param(" " * 500_000, id="spaces"),
        pytest.param("1," * 250_000, id="commas"),
        pytest.param("(" * 500_000, id="brackets"),
        pytest.param("</think>" * 60_000, id="thinks"),
        pytest.param("\n" * 500_000, id="lines"),
        pytest.param("answer is" + "\n" * 500_000, id="answer and lines"),
        pytest.param("answer\n" * 70_000, id="lines of answers"),
        pytest.param("#### not " * 60_000, id="denials"),
        pytest.param("½" * 500_000, id="halves"),
        pytest.param("42 = " * 100_000, id="equals"),
        pytest.param("x" * 500_000, id="letters"),
        pytest.param(r"\boxed{" + "x(" * 450 + "}", id="products"),
        pytest.param(r"\boxed{" + "1+" * 199 + "1}", id="sums"),
        pytest.param(r"\boxed{" + r"\ln 2+" * 55 + "1}", id="logarithms"),
        pytest.param(r"\boxed{" + "a b," * 240 + "}", id="lists"),
        pytest.param(r"\boxed{5 " + "cm " * 320 + "!}", id="units"),
        pytest.param(r"\boxed{5 " + "a.b." * 200 + "!}", id="short units"),
        pytest.param(r"\boxed{5" + r"\text{a}" * 119 + "!}", id="texts"),
        pytest.param(r"\boxed{" + "½" * 900 + "}", id="boxed halves"),
        pytest.param(r"\boxed{0." + "1" * 900 + "}", id="digits"),
        pytest.param(r"\boxed{" + "9^" * 190 + "9}", id="towers"),
    ],
)
def test_no_response_is_an_error_or_takes_for_ever(name: str, response: str) -> None:
    label = "10" if name == "length" else r"\frac{1}{3}x, 1+\ln 3" if name in MATH_RULES else "A"
    metadata = {"instruction_id_list": ["detectable_format:title", "detectable_content:number_placeholders"]}
    given = sample(response, label, metadata=metadata | {"kwargs": [{}, {"num_placeholders": 1}]})
    for rule in (RULES[name], BOXED_RULES[name]):
        settle(rule(given), DEFAULT_KEYS.get(name, ""), name)


def test_last_boxed_keeps_nested_braces() -> None:
    assert last_boxed(r"a \boxed{x^{2}_{1}} b") == "x^{2}_{1}"
    assert last_boxed("no box") is None


# -- rewards from values ------------------------------------------------------------------------------------------


def test_a_table_gives_its_key_and_keeps_every_number() -> None:
    reward = settle({"score": 0.5, "acc": True, "why": "because", "n": 3}, "score", "x")
    assert reward.scalar == 0.5 and reward.parts == {"score": 0.5, "acc": 1.0, "n": 3.0}


def test_a_plain_number_needs_no_key() -> None:
    assert settle(1, "score", "x").scalar == 1.0
    assert settle(True, "", "x").scalar == 1.0
    assert math.isnan(settle(float("nan"), "", "x").scalar)
    assert math.isnan(settle({"s": float("nan")}, "s", "x").scalar)


@pytest.mark.parametrize(
    ("value", "key", "text"),
    [
        (None, "", "gave None, not a number"),
        ("1", "", "gave str '1', not a number"),
        ([1.0], "", "gave list"),
        (10**400, "", "not a number"),
        ({"a": 1.0}, "", r"table \(keys: a\); name the reward with --reward-key"),
        ({"a": 1.0}, "b", r"without reward_key 'b' \(keys: a\)"),
        ({"b": None}, "b", "gave None under 'b'"),
        ({"b": "x"}, "b", "gave str 'x' under 'b'"),
        ({}, "b", r"without reward_key 'b' \(keys: none\)"),
    ],
)
def test_what_is_no_reward_is_a_clear_failure(value: Any, key: str, text: str) -> None:
    with pytest.raises(ScorerFailed, match=text):
        settle(value, key, "mine")


# -- scorers by name ----------------------------------------------------------------------------------------------


async def test_the_sample_names_its_scorer_and_boxed_takes_the_box_first() -> None:
    async with Scorers(rm_type="math") as scorers:
        assert scorers.named("").name == "math"
        assert scorers.named("f1").name == "f1"
        boxed = scorers.named("boxed_exact_match")
        assert await boxed.score(sample(r"so \boxed{blue}", "blue"), 1.0) == 1.0
        assert await boxed.score(sample("blue", "blue"), 1.0) == 0.0
        assert await scorers.named("boxed_math").score(sample(r"\boxed{(1,2)}", "(1, 2)"), 1.0) == 1.0
        with pytest.raises(UnknownScorer, match="no rm_type 'maths'; known are contains, dapo"):
            scorers.named("maths")
        with pytest.raises(UnknownScorer, match="--rm-url"):
            scorers.named("remote_rm")


async def test_a_default_that_cannot_work_is_refused_at_start() -> None:
    for name in ("maths", "remote_rm"):
        with pytest.raises(Refused):
            await Scorers(rm_type=name).__aenter__()
