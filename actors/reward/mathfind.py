"""From a response's text to its final answer (pure): at any distance from the end, in time linear in the text.

An answer that is denied (`the answer is not 42`) is none; one that offers several numbers (`42 or 43`) is handed on whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from actors.reward.mathtext import MAX_ANSWER_CHARS, normalize, plain_characters

MAX_BOXES = 32  # unclosed boxes looked at before giving up
SHORT_CHARS = 80  # a text up to this may be an expression as a whole
WINDOW_CHARS = 400  # around the last digit of a text
MARKERS_TRIED = 64  # from the end

_LONE_WORD = re.compile(r"(?<!\S)[A-Za-z]{2,}(?!\S)")  # `it is 5` is a sentence, not a product
_NUMBER = re.compile(
    r"-?\s?\\[dtc]?frac\s*\{\s*-?\d+\s*\}\s*\{\s*\d+\s*\}|-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|"
    r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?(?:\s*/\s*\d+)?|-?\.\d+"
)
_MARKERS = ("####", "answer", "Answer", "ANSWER")
_SAYS = re.compile(r"[\s*_]{0,16}(?:(is|was|equals|would be|must be|should be)(?![a-z])|[:=])[\s:*_]{0,16}", re.IGNORECASE)
_DENIED = re.compile(r"\b(?:not|never|neither|nor|cannot)\b|n['’]t\b", re.IGNORECASE)
_ABOUT_IT = re.compile(
    r"(?:correct|right|valid|wrong|incorrect|verified|consistent|reasonable|as follows|given|found|obtained)\b", re.IGNORECASE
)
_DENIES = re.compile(r"\s{1,4}(?:(?:is|was|can|does|could|would)n['’]?t\b|can ?not\b)", re.IGNORECASE)
_REFUSED = re.compile(r"\W{0,4}(?:is|was|would be|seems)(?:n['’]t| not| wrong| incorrect| false)\b", re.IGNORECASE)
_DENIAL_CHARS = 40  # between a denial and the number it denies
_SENTENCE_END = re.compile(r"(?:[.!?;]|\*\*)(?:\s|$)")
_ASSIGNMENT = re.compile(r"\$?\s*[A-Za-z](?:\([A-Za-z]\)|_\{?\w\}?)?\s*=[^=]*$")
_OTHER_SIDE = re.compile(r"(?:^|[=\n.:]|\b(?:so|thus|hence|then|therefore|that|is))\s*\$?(-?\d[\d.,]*)\s*=\s*\$?$")
_LAST_DIGIT = re.compile(r".*[\d½¼¾⅓⅔]", re.DOTALL)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_IS_RAISED = re.compile(r"\^\s?\{?\s?$")
_MORE = re.compile(r"\bor\b|\beither\b", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")


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


def final_answer(text: str, readable: Callable[[str], bool]) -> str | None:
    """What a response answers: its last box; else what follows its last `####` or `answer is`; else all of a short text that is
    one expression; else its last number. None where that is denied. `readable`: whether a text is mathematics as it stands."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    said, denied = _marked(text, readable)
    if said is not None or denied:
        return said
    whole = text.strip()
    one_thing = len(whole) <= SHORT_CHARS and ("=" not in whole or _ASSIGNMENT.match(whole))
    if one_thing and not _LONE_WORD.search(normalize(whole)) and readable(whole):
        return whole
    return _last_number(whole)


def _from_the_end(text: str) -> Iterator[tuple[str, int]]:
    """Markers and where they begin, the last one first."""
    places = {mark: text.rfind(mark) for mark in _MARKERS}
    for _ in range(MARKERS_TRIED):
        mark = max(_MARKERS, key=places.__getitem__)
        if places[mark] < 0:
            return
        yield mark, places[mark]
        places[mark] = text.rfind(mark, 0, places[mark])


def _marked(text: str, readable: Callable[[str], bool]) -> tuple[str | None, bool]:
    """What follows the last marker that says something; and whether one was there and denied what it said."""
    denied = False
    for mark, start in _from_the_end(text):
        at = start + len(mark)
        if mark != "####":
            if text[at : at + 1].isalpha() or text[max(0, start - 1) : start].isalpha():
                continue
            says = _SAYS.match(text, at)
            if says is None:
                denied = denied or _DENIES.match(text, at) is not None
                continue
            at = says.end()
        line = text[at : at + MAX_ANSWER_CHARS].lstrip().partition("\n")[0].strip().strip("*").strip()
        sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
        if not line or _ABOUT_IT.match(line):
            continue
        number = _NUMBER.search(sentence)
        if number and _DENIED.search(sentence[: number.start()]):
            denied = True
            continue
        return _trim_sentence(line, readable), denied
    return None, denied


def _trim_sentence(text: str, readable: Callable[[str], bool]) -> str:
    """`42. So ...` to `42`; formulas stay whole, and so does what offers more than one number."""
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0].strip()
    first, *others = dict.fromkeys(found.group().strip() for found in _NUMBER.finditer(plain_characters(sentence))) or [""]
    if others and _MORE.search(sentence):
        return sentence.replace("$", "")
    if readable(plain := sentence.replace("$", "")):
        return plain
    if (formula := _FORMULA.match(text)) and (inside := next(filter(None, formula.groups()), "")):
        return inside
    return first or sentence


def _last_number(text: str) -> str | None:
    """The last number in free text that is no exponent; None where it is denied, or another is said to be its equal.
    An `e` amid a chain (`d1=1e0`) is a name of the chain, not an exponent."""
    last = _LAST_DIGIT.match(text)
    if last is None:
        return None
    window = plain_characters(_RAISED.sub("", text[max(0, last.end() - WINDOW_CHARS) : last.end() + 8]))
    found = next((one for one in reversed(list(_NUMBER.finditer(window))) if not _IS_RAISED.search(window[: one.start()])), None)
    if found is None:
        return None
    before = window[: found.start()]
    near = _SENTENCE_END.split(before[-_DENIAL_CHARS:])[-1]
    if (denial := _DENIED.search(near)) and not _NUMBER.search(near, denial.end()):
        return None
    if _REFUSED.match(text, last.end()):
        return None
    number = found.group().strip()
    if (side := _OTHER_SIDE.search(before)) and side.group(1) != number:
        return None
    words = before.rsplit(maxsplit=1)
    in_chain = bool(words) and not before[-1].isspace() and any(char.isdigit() for char in words[-1])
    return re.split("[eE]", number)[-1] if in_chain else number


def reference_answer(label: str) -> str:
    """A label as the data sets write it: bare, boxed, or a worked solution that ends in `#### answer`."""
    if (boxed := last_boxed(label)) is not None:
        return boxed
    return label.rpartition("####")[2].strip()
