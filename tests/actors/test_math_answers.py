"""Kinds of answers that a grader meets: which our rule takes by itself, which math-verify adds, and what neither runs or takes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.reward.mathanswer import final_answer, verdict
from actors.reward.rules import RULES
from actors.reward.sample import Sample
from actors.reward.scorer import SECOND_LOOK_S, Scorers
from actors.reward.second_look import HOOK, number_only

NEEDED = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the extra `math` is not installed")

# fmt: off
OURS = (
    ("42", "42"), ("-7", "-7"), ("042", "42"), ("3.50", "3.5"), (".5", "1/2"), ("1,000,000", "1000000"), ("1e3", "1000"),
    (r"3\times10^5", "300000"), (r"2.5 \cdot 10^{-3}", "0.0025"), ("10^{-2}", "0.01"), (r"\frac{3}{4}", "0.75"),
    (r"\dfrac{7}{2}", "3.5"), (r"\frac34", "3/4"), (r"3\frac{1}{2}", r"\frac{7}{2}"), (r"-\tfrac{1}{3}", "-1/3"),
    (r"25\%", r"25\%"), (r"25\%", "0.25"), ("25", r"25\%"),
    (r"\$4.20", "4.2"), (r"45^\circ", "45"), (r"12\text{ cm}^2", "12"), ("60 mph", "60"),
    ("2^{10}", "1024"), ("2^{-3}", r"\frac18"), ("0.1+0.2", "0.3"), ("1+2+3+4", "10"),
    (r"\frac{1}{2}+\frac{1}{3}", r"\frac{5}{6}"), (r"\sqrt{16}", "4"), (r"\sqrt[3]{27}", "3"), (r"\sqrt{50}", r"5\sqrt{2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), ("3!", "6"), (r"\frac{5!}{2!3!}", "10"), (r"\binom52", "10"),
    (r"\binom{10}{3}", "120"), (r"\dbinom{6}{2}", "15"), (r"2\pi", r"\pi\cdot 2"), (r"\frac{\pi}{2}", r"0.5\pi"),
    ("e^{2}e", "e^3"), ("ab", "ba"), ("xy+1", "1+yx"), ("(x+1)(x-1)", "x^2-1"), (r"\frac{x^2-1}{x-1}", "x+1"),
    ("x^{1/2}", r"\sqrt{x}"), ("2+3i", "3i+2"), (r"0.\overline{3}", r"\frac13"), ("x=5", "5"), ("y = 2x+1", "y=1+2x"),
    ("x = 1, x = 2", "1, 2"), (r"x=1 \text{ or } x=2", r"\{1,2\}"), (r"\pm 3", "3, -3"), ("(1,2)", r"\left( 1, 2 \right)"),
    (r"\{3,1,2\}", r"\{1,2,3\}"), (r"x\in(1,3)", "(1,3)"), (r"(-\infty,1)\cup(3,\infty)", r"(3,\infty) \cup (-\infty, 1)"),
    ("3>x", "x<3"), (r"1 \le x < 3", "[1,3)"), (r"x \geq 2", r"[2,\infty)"), (r"\emptyset", r"\{\}"), (r"\text{(B)}", "B"),
    ("|-5|", "5"),
)
"""(answer, reference) that our rule finds equal."""
SECOND = (
    (r"\lfloor 3.7 \rfloor", "3"), (r"\sum_{k=1}^{4} k", "10"), (r"\int_0^1 x\,dx", r"\frac12"), (r"\gcd(12, 18)", "6"),
    (r"\lim_{x\to0}\frac{\sin x}{x}", "1"), (r"\sin\pi/6", r"\frac12"), ("x+y<5", "5>x+y"),
)
"""What it does not read and math-verify finds equal."""
NEITHER = (
    (r"\lfloor 3.7 \rfloor", "4"), (r"\sum_{k=1}^{4} k", "11"), ("5!!", "15"), (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "2"),
)
"""What stays wrong: false but for the double factorial, which neither reads."""
# fmt: on


def same_answer(given: str, wanted: str, question: str = "") -> bool:
    return verdict(given, wanted, question) is True


def undecided(given: str, wanted: str, question: str = "") -> bool:
    return verdict(given, wanted, question) is None


@pytest.mark.parametrize(("given", "wanted"), OURS)
def test_our_rule_reads(given: str, wanted: str) -> None:
    assert same_answer(given, wanted) and same_answer(wanted, wanted)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("a0=0d1=1e0", "0"), ("a1=1b3=4e12", "12"), ("so x=1e6.", "1e6"), ("it is 2.5e-3 volts", "2.5e-3")],
)
def test_an_e_within_a_chain_is_no_exponent(text: str, answer: str) -> None:
    assert final_answer(text) == answer
    assert RULES["math"](sample("a0=0b0=0c0=0d1=1e0", "1")) == 0.0


@pytest.mark.parametrize(("given", "wanted"), [*SECOND, *NEITHER])
def test_our_rule_leaves_open(given: str, wanted: str) -> None:
    assert not same_answer(given, wanted) and undecided(given, wanted)
    assert RULES["math_whole"](sample(given, wanted)) == 0.0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (r"\log_2 8", "4"), (r"\sin(\pi/6)", "1"), (r"\begin{pmatrix}1\\2\end{pmatrix}", "1"), ("42 43", "42"), (r"42\to 43", "43"),
        (r"\lfloor 41.5 \rfloor = 41 = 42", "42"), (r"\lfloor x \rfloor", "3.5"), (r"42 \ne 43", "43"), ("41", "42"),
        ("6/8", "3/4"), ("evil", "live"), ("no", "on"), ("", "1"), ("1" * 1001, "1"), (r"\text{red}", "blue"),
        (r"3\times10^5", "30000"), ("1e3", "100"),
    ],
)  # fmt: skip
def test_what_our_rule_decides_is_asked_no_further(given: str, wanted: str) -> None:
    assert not same_answer(given, wanted) and not undecided(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("2^{10}", "1025"), ("3!", "7"), (r"\binom52", "20"), ("4000!", "1"), (r"\binom{4000}{2000}", "1"),
        ("0.1+0.2", "0.30001"), ("3>x", "x>3"), (r"x\le 3", "x<3"), (r"1<x\le 3", "[1,3)"), ("x<3, y<4", "x<4, y<3"),
        (r"0.\overline{3}", "0.3"), ("|5", "5"), ("1<2", "3<4"), ("(-1)!", "1"), ("2.5!", "2"),
    ],
)  # fmt: skip
def test_what_looks_alike_is_not_the_same(given: str, wanted: str) -> None:
    assert not same_answer(given, wanted)


def sample(given: str, wanted: str, question: str = "") -> Sample:
    return Sample(sample_id="g1/0", prompt=question, response=given, label=wanted)


@pytest.mark.parametrize(
    "code", ["__import__ ('os' ).system ('x' )", "Symbol ('x' )", "Integer (2 )**Integer (9 )", "Float ('1'.x )", ""]
)
def test_no_code_is_evaluated_for_the_second_look(code: str) -> None:
    with pytest.raises(ValueError, match="not a number"):
        number_only(code, {}, {})
    assert number_only("Integer (2 )", {}, {}) == 2 and number_only("-Float ('0.5' )", {}, {}) == -0.5


async def test_without_math_verify_our_rule_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.reward.second_look.installed", lambda: False)
    async with Scorers(rm_type="math_whole") as scorers:
        assert scorers.lacks_second_look
        assert [await scorers.named("").score(sample(*pair), 1.0) for pair in (SECOND[0], OURS[0])] == [0.0, 1.0]
    async with Scorers(rm_type="f1") as scorers:
        assert not scorers.lacks_second_look


@pytest.fixture
async def asked() -> AsyncIterator[tuple[Scorers, Counter[str]]]:
    counts: Counter[str] = Counter()
    async with Scorers(rm_type="math_whole", count=lambda name: counts.update([name])) as scorers:
        yield scorers, counts


@NEEDED
async def test_math_verify_is_asked_on_our_no_and_adds_what_it_knows(asked: tuple[Scorers, Counter[str]]) -> None:
    scorers, counts = asked
    assert not scorers.lacks_second_look
    rule = scorers.named("")
    assert [await rule.score(sample(*pair), 10.0) for pair in (*SECOND, *NEITHER)] == [1.0] * len(SECOND) + [0.0] * len(NEITHER)
    assert counts == {"second_look/right": len(SECOND), "second_look/wrong": len(NEITHER)}
    assert await scorers.named("dapo").score(sample(r"Answer: \gcd(12, 18)", "6"), 10.0) == {"score": 1.0, "acc": 1.0}
    assert await scorers.named("boxed_math").score(sample(r"\boxed{\gcd(12, 18)}", "6"), 10.0) == 1.0
    before = counts.total()
    for pair in (*OURS, ("41", "42"), ("evil", "live")):
        await rule.score(sample(*pair), 10.0)
    assert await rule.score(sample(r"\gcd(12, 18)", "6", "Find the gcd of 12 and 18."), 10.0) == 0.0, "the question is no answer"
    assert counts.total() == before, "not asked"


@NEEDED
def test_all_that_a_second_look_needs_is_loaded_before_the_first() -> None:
    code = f"""
import sys
from actors.runtime.hooks import load_hook

before = "sympy" in sys.modules
verify = load_hook({HOOK!r})
known = set(sys.modules)
assert not before and "sympy" in known and verify({{"response": "\\\\log_2 8", "label": "3"}}) == 1.0
print(*sorted(name for name in set(sys.modules) - known if name.startswith(("antlr4", "math_verify", "latex2sympy"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


@NEEDED
async def test_an_answer_that_math_verify_chokes_on_costs_that_look_alone(
    asked: tuple[Scorers, Counter[str]], tmp_path: Path
) -> None:
    scorers, counts = asked
    rule, mark = scorers.named(""), tmp_path / "run"
    tower = r"\lfloor 10^{10^{10^{10}}} \rfloor \log_2 3"
    assert await rule.score(sample(tower, "3"), 0.5) == 0.0 and counts["second_look/failed"] == 1
    for code in (f"__import__('os').system('touch {mark}')", rf"\text{{open('{mark}','w')}}", f"\\sin open('{mark}', 'w')"):
        assert await rule.score(sample(code, r"\sin x"), 10.0) == 0.0
    assert not mark.exists()
    assert await rule.score(sample(*SECOND[0]), 10.0) == 1.0, "the next one has a process again"
    assert SECOND_LOOK_S < 10


PERCENT, MUCH = "What percent of 60 is 15?", "How much is it?"


@pytest.mark.parametrize("unit", [r"\%", "%", " percent", r"\text{ percent}", " per cent", " pct", " percentage points"])
def test_a_percentage_is_its_bare_number_only_where_it_is_asked_for_or_the_label_says_so(unit: str) -> None:
    text = f"25{unit}"
    assert same_answer(text, "25", PERCENT) and same_answer(text, "0.25", MUCH) and same_answer(text, r"\frac14", MUCH)
    assert same_answer("25", text, MUCH), "a label may say what the answer leaves out"
    assert same_answer(text, r"25\%", MUCH) and same_answer("x = 25", f"x = 25{unit}", MUCH)
    for given, wanted in ((text, "25"), (f"x = {text}", "25"), (text, "25 apples"), (f"({text}, 1)", "(25, 1)"), (text, "2500")):
        assert verdict(given, wanted, MUCH) is False, (given, wanted)
    assert RULES["math"](sample(rf"It is \boxed{{{text}}}.", "25", MUCH)) == 0.0
    assert RULES["math"](sample(rf"It is \boxed{{{text}}}.", "25", PERCENT)) == 1.0


FACTORS = [("5 dozen", "60"), ("20 basis points", "0.002"), ("5‰", "0.005"), ("3 ppm", "0.000003")]


@pytest.mark.parametrize(("given", "value"), FACTORS)
def test_a_unit_that_is_a_factor_is_one(given: str, value: str) -> None:
    number = given.rstrip("‰").split()[0]
    assert same_answer(given, value, MUCH) and same_answer(value, given, MUCH) and verdict(given, number, MUCH) is False
    assert same_answer("5 dozen", "5", "How many dozen eggs?") and same_answer(number, given, MUCH)


@pytest.mark.parametrize(
    ("date", "value"),
    [
        ("2024-01-02", "2021"), ("2024/01/02", "1012"), ("01/02/2024", r"\frac{1}{4048}"), ("31-12-1999", "-1980"),
        ("2024-01", "2023"), ("06-10", "-4"), ("1-800-555-1234", "-2588"), ("1/2/2024", "1/4048"),
    ],
)  # fmt: skip
def test_a_date_is_no_difference_and_no_quotient(date: str, value: str) -> None:
    assert verdict(date, value) is False and verdict(value, date) is False
    assert verdict(f"d = {date}", value) is False
    assert same_answer(date, date)
    assert RULES["math"](sample(rf"It is \boxed{{{date}}}.", value)) == 0.0 == RULES["math"](sample(value, date))


def test_dates_are_the_same_by_their_numbers_and_arithmetic_stays_arithmetic() -> None:
    assert same_answer("2024-1-2", "2024-01-02") and same_answer("2024/01/02", "2024-01-02")
    assert verdict("2024-02-01", "2024-01-02") is False and verdict("2024-01-03", "2024-01-02") is False
    for given, wanted in (("10-3", "7"), ("3-5", "-2"), ("21/7/3", "1"), ("100-5-2", "93"), ("1/2", "0.5"), ("007", "7")):
        assert same_answer(given, wanted), given
