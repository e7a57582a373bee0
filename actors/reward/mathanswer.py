"""From a response's text to its final answer, and is that answer the reference (pure)? LaTeX and plain text.

Repeating the question earns nothing: where the reference is a number, an unreduced `8/2` is not it, nor is anything unevaluated
that uses a number of the question.
"""

from __future__ import annotations

import math
import re

from actors.reward.mathexpr import Node, NoExpression, is_literal, is_reduced, parse, same_value

TAIL_CHARS = 2000  # free text is searched this far from its end
MAX_ANSWER_CHARS = 1000
MAX_PARTS = 32
MAX_BOXES = 32  # unclosed boxes looked at before giving up

_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "°": " ", "\u00a0": " ", "\u202f": " "}
)
_COMMANDS = (
    (re.compile(r"\\(?:left|right|displaystyle|limits|big|Big|bigg|Bigg)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\leq?(?:slant)?(?![A-Za-z])|≤"), "<="),
    (re.compile(r"\\geq?(?:slant)?(?![A-Za-z])|≥"), ">="),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"^\s*[A-Za-z]\s*(?:\\in(?![A-Za-z])|∈)"), ""),
    (re.compile(r"\\(?:emptyset|varnothing)(?![A-Za-z])|∅"), r"\\{\\}"),
    (re.compile(r"\\(?:cdot|times|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;: ]|\\\\|~"), " "),
    (re.compile(r"\\!|\{,\}"), ""),
    (re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])"), ""),
    (re.compile(r"\\?%"), ""),
    (re.compile(r"\\?\$|\\[()\[\]](?=\s|$)|^\\[(\[]"), ""),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"∞"), r"\\infty "),
    (re.compile(r"√\s*(?=[\d(])"), r"\\sqrt "),
    (re.compile(r"\*\*"), "^"),
)
_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|bf|rm)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d)}])\s*(?:cm|mm|km|m|kg|g|mg|lb|lbs|oz|s|sec|seconds?|min|minutes?|hours?|days?|weeks?|months?|years?|inch|"
    r"inches|feet|foot|ft|yards?|miles?|meters?|metres?|cents?|dollars?|usd|degrees?|percent|units?|points?|mph|kmh|"
    r"cm\^2|m\^2|square\s+(?:units|cm|m|feet|inches|meters)|people|students|apples|ways)\s*(?:\^\{?[23]\}?)?$",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LEFT_SIDE = re.compile(r"^(?:[A-Za-z]|[A-Za-z]\([A-Za-z]\)|[A-Za-z]_\{?\w\}?)\s*=\s*([^=]+)$")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_RELATION = re.compile(r"(<=|>=|<|>)")
_OR = re.compile(r"(?<=[\s\d)}])(?:or|and)(?=\s)")
_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PRODUCT = re.compile(r"[a-dkmnp-z]{2}")  # `ab` is a product of two letters; what has an o, an i or an e is a word
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-z]+\}")
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_LONE_WORD = re.compile(r"(?<!\S)[A-Za-z]+(?!\S)")  # `it is 5` is a sentence, not a product
_NUMBER = re.compile(
    r"-?\s?\\[dtc]?frac\s*\{\s*-?\d+\s*\}\s*\{\s*\d+\s*\}|-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|"
    r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?(?:\s*/\s*\d+)?|-?\.\d+"
)
_MARKER = re.compile(r"(?:####|(?i:\banswer\b)\s*(?i:is|[:=])\s*:?)\s*([^\n]+)")


def last_boxed(text: str) -> str | None:
    """Content of the last complete \\boxed{...} (or \\fbox); None without one."""
    end = len(text)
    for _ in range(MAX_BOXES):
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            return None
        rest = text[start : start + 6 + MAX_ANSWER_CHARS]
        after = rest[6:] if rest.startswith("\\boxed") else rest[5:]
        if (content := _braced(after.lstrip())) is not None:
            return content
        if bare := re.match(r" ([^\s${}]+)", after):
            return bare.group(1)
        end = start
    return None


def _braced(text: str) -> str | None:
    if not text.startswith("{"):
        return None
    depth = 0
    for at, char in enumerate(text):
        if char in "{}" and text[at - 1 : at] != "\\":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return text[1:at].strip()
    return None


def final_answer(text: str) -> str | None:
    """What a response answers: its last box; else what follows its last `####` or `answer is`; else all of a short text
    that is one expression; else its last number."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    tail = text[-TAIL_CHARS:]
    if marked := list(_MARKER.finditer(tail)):
        return _trim_sentence(marked[-1].group(1))
    whole = tail.strip()
    if len(whole) <= 80 and not _LONE_WORD.search(normalize(whole)) and _expression(whole) is not None:
        return whole
    numbers = list(_NUMBER.finditer(tail.translate(_UNICODE)))
    return _last_number(numbers[-1]) if numbers else None


def _last_number(found: re.Match[str]) -> str:
    """Text of a number found in free text. An `e` amid a chain (`d1=1e0`) is a name of the chain, not an exponent."""
    number = found.group().strip()
    words = found.string[: found.start()].rsplit(maxsplit=1)
    before = words[-1] if words and not found.string[found.start() - 1].isspace() else ""
    in_chain = any(char.isdigit() for char in before)
    return re.split("[eE]", number)[-1] if in_chain else number


def reference_answer(label: str) -> str:
    """A label as the data sets write it: bare, boxed, or a worked solution that ends in `#### answer`."""
    if (boxed := last_boxed(label)) is not None:
        return boxed
    return label.rpartition("####")[2].strip()


def _trim_sentence(text: str) -> str:
    """`42. So ...` to `42`; formulas stay whole."""
    text = text.strip().strip("*").strip()
    if math := re.match(r"\$([^$]+)\$", text):
        return math.group(1)
    text = re.split(r"(?:[.!?;]|\*\*)(?:\s|$)", text, maxsplit=1)[0].strip()
    if _expression(text) is not None:
        return text
    first = _NUMBER.search(text.translate(_UNICODE))
    return first.group(0) if first else text


def normalize(answer: str) -> str:
    """One spelling for what reads the same: no layout commands, currency, percent, degrees, units or thousands commas."""
    text = answer.strip().translate(_UNICODE)
    text = _STYLED.sub(r" \1 ", text)
    for pattern, plain in _COMMANDS:
        text = pattern.sub(plain, text)
    text = _THOUSANDS.sub(lambda m: m.group(0).replace(",", ""), text.strip())
    text = _REPEATING.sub(_fraction, _OR.sub(",", text))
    text = _UNIT.sub("", text.strip().rstrip(".").strip())
    if side := _LEFT_SIDE.match(text):
        text = side.group(1)
    if choice := re.fullmatch(r"\(\s*([A-Za-z])\s*\)", text.strip()):
        text = choice.group(1)
    return " ".join(text.split())


def _fraction(repeating: re.Match[str]) -> str:
    """0.1\\overline{6} as a fraction."""
    whole, once, again = repeating.groups()
    low = (10 ** len(again) - 1) * 10 ** len(once)
    top = int(whole + once + again) - int(f"0{whole}{once}")
    common = math.gcd(top, low)
    return rf"\frac{{{top // common}}}{{{low // common}}}"


def _fold(text: str) -> str:
    """Spaces go where they part nothing (`1 2` is not 12); case goes from words and choices only (2x is not 2X)."""
    text = _IDLE_SPACE.sub("", text)
    return text.casefold() if _WORD.search(text) or text.isalpha() else text


def _is_text(text: str) -> bool:
    """Words are compared as words, never as products of letters."""
    return bool(_WORD.search(_ENVIRONMENT.sub("", text))) or (text.isalpha() and not _PRODUCT.fullmatch(text))


def _expression(text: str) -> Node | None:
    text = normalize(text)
    if _is_text(text):
        return None
    try:
        return parse(text)
    except NoExpression:
        return None


def same_answer(given: str, wanted: str, question: str = "") -> bool:
    """Is `given` the reference `wanted`? Texts by spelling, numbers by value, formulas by identity, lists and sets by parts."""
    if len(given) > MAX_ANSWER_CHARS or len(wanted) > MAX_ANSWER_CHARS:
        return given.strip() == wanted.strip()
    return _same(normalize(given), normalize(wanted), question, 0)


def undecided(given: str, wanted: str, question: str = "") -> bool:
    """Whether what `same_answer` did not find equal may still be, to a reader that knows more mathematics. Words, numbers written
    out and the question repeated are decided."""
    if max(len(given), len(wanted)) > MAX_ANSWER_CHARS:
        return False
    mine, theirs = normalize(given), normalize(wanted)
    if not mine or not theirs or _is_text(mine) or _is_text(theirs):
        return False
    left, right = _expression(mine), _expression(theirs)
    if right is None or not is_literal(right):
        return True
    return not (left is not None and is_literal(left)) and not _repeats(mine, question)


def _repeats(text: str, question: str) -> bool:
    """Whether `text` takes a number from the question. `12+7` may not come back as `7+12`, `12+7+0` or `12+6+1`."""
    asked = _THOUSANDS.sub(lambda m: m.group(0).replace(",", ""), question.translate(_UNICODE))
    return not set(_PLAIN_NUMBER.findall(text)).isdisjoint(_PLAIN_NUMBER.findall(asked))


def _same(given: str, wanted: str, question: str, depth: int) -> bool:
    if not given or not wanted:
        return False
    if _fold(given) == _fold(wanted):
        return True
    (letter, given), (other, wanted) = _interval(given), _interval(wanted)
    if letter and other and letter != other:
        return False
    if depth < 3:
        mine, theirs = _parts(given), _parts(wanted)
        if mine is not None or theirs is not None:
            return mine is not None and theirs is not None and _same_parts(mine, theirs, question, depth + 1)
    left, right = _expression(given), _expression(wanted)
    if left is None or right is None:
        return False
    if is_literal(right) and not (is_reduced(left) if is_literal(left) else not _repeats(given, question)):
        return False
    return same_value(left, right)


def _interval(text: str) -> tuple[str, str]:
    """Letter and interval: `1 <= x < 3` as x in [1,3) and `2 > x` as x in (-\\infty,2); other text as it is, with no letter."""
    terms = [term.strip() for term in _RELATION.split(text)]
    if len(terms) not in (3, 5) or len({term[0] for term in terms[1::2]}) > 1:
        return "", text
    if terms[1][0] == ">":
        terms = [term.replace(">", "<") for term in reversed(terms)]
    if len(terms) == 3:
        left_is_letter = len(terms[0]) == 1 and terms[0].isalpha()
        terms = ["-\\infty", "<", *terms] if left_is_letter else [*terms, "<", "\\infty"]
    low, below, letter, above, high = terms
    if len(letter) != 1 or not letter.isalpha() or not low or not high:
        return "", text
    return letter, f"{'[' if below == '<=' else '('}{low},{high}{']' if above == '<=' else ')'}"


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Brackets and members of a tuple, interval, set or list; None for a single thing. Brackets "" mean a list."""
    if "\\pm" in text and text.count("\\pm") == 1:
        return "{}", [text.replace("\\pm", "+").removeprefix("+"), text.replace("\\pm", "-")]
    if len(union := re.split(r"\\cup(?![A-Za-z])|∪", text)) > 1:
        return "{}", [part.strip() for part in union]
    inner, brackets = text, "{}"  # a bare list has no order, as a set has none
    for opening, closing in (("\\{", "\\}"), ("{", "}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if text.startswith(opening) and text.endswith(closing):
            candidate = text[len(opening) : len(text) - len(closing)]
            if _balanced(candidate):
                inner, brackets = candidate, (opening + closing).replace("\\", "")
                break
    members = _split(inner)
    if len(members) < 2 and not (inner is not text and brackets == "{}"):
        return None
    return (brackets, members) if len(members) <= MAX_PARTS else None


def _balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    members, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            members.append(text[start:at].strip())
            start = at + 1
    return [*members, text[start:].strip()]


def _same_parts(given: tuple[str, list[str]], wanted: tuple[str, list[str]], question: str, depth: int) -> bool:
    if given[0] != wanted[0] or len(given[1]) != len(wanted[1]):
        return False
    if given[0] != "{}":
        return all(_same(a, b, question, depth) for a, b in zip(given[1], wanted[1], strict=True))
    open_parts = list(wanted[1])
    for part in given[1]:
        found = next((n for n, other in enumerate(open_parts) if _same(part, other, question, depth)), None)
        if found is None:
            return False
        del open_parts[found]
    return True
