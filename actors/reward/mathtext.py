"""One spelling for what reads the same, words, and units (pure): LaTeX and plain text of an answer, of at most MAX_ANSWER_CHARS.

Words set as text (`\\text{ cm}`) keep a mark until their place is known, so that `5\\text{ m}` is five metres and `5m` a product.
A unit is found by rule: words behind a number or formula, without a digit, of which none changes a value.
"""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction

from actors.reward.mathexpr import FUNCTIONS

MAX_ANSWER_CHARS = 1000
TEXT, END, ROW, GRID, GRID_END = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"  # marks of this module, never from outside

_UNICODE = {
    "−": "-",
    "–": "-",
    "—": "-",
    "×": "*",
    "·": "*",
    "⋅": "*",
    "÷": "/",
    "º": "°",
    "∘": "°",
    "⁄": "/",
    "’": "'",
    "′": "'",
    "≤": "<=",
    "⩽": "<=",
    "≥": ">=",
    "⩾": ">=",
    "∅": "\\{\\}",
    "π": "\\pi ",
    "∞": "\\infty ",
    "±": "\\pm ",
    "∪": "\\cup ",
    "∈": "\\in ",
    "≈": "\\approx ",
    "≠": "\\neq ",
    "ℝ": "\\mathbb{R}",
    "√": "\\sqrt ",
    "θ": "\\theta ",
    "α": "\\alpha ",
    "β": "\\beta ",
    "λ": "\\lambda ",
    "…": "...",
    "‰": " permille ",
    "\u200b": "",
    "\ufeff": "",
    **dict.fromkeys("€£¥₹₽₩", "$"),
    **dict.fromkeys(map(chr, range(0xE000, 0xE005)), " "),
}
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_RAISED_LETTERS = {"⁺": "+", "⁻": "-", "ⁿ": "n"}
_BEHIND = r"(?![A-Za-z])"
_NAMES = "|".join(name for name in (*FUNCTIONS, "sqrt", "pi") if name != "sec")  # `15 sec` is a time
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_COMMANDS = (
    (re.compile(rf"\\(?:left|right|middle|[dD]isplaystyle|textstyle|limits|[bB]igg?[lr]?){_BEHIND}"), ""),
    (re.compile(rf"\\(?:tiny|scriptsize|small|normalsize|large|Large|LARGE|huge|Huge|rm|bf|it|sf|tt|bfseries){_BEHIND}"), " "),
    (re.compile(rf"\\(?:boxed|fbox|underline|boldsymbol|bm|mathbf|mathit|mathsf|mathtt|mathnormal|ensuremath|emph){_BEHIND}"), ""),
    (re.compile(r"\\(?:(?:text)?color|[hv]?phantom)\s*\{[^{}]*\}"), ""),
    (re.compile(rf"\\[dtc]frac{_BEHIND}"), r"\\frac"),
    (re.compile(rf"\\[dt]binom{_BEHIND}"), r"\\binom"),
    (re.compile(rf"\{{([^{{}}]*)\\over{_BEHIND}([^{{}}]*)\}}"), r"\\frac{\1}{\2}"),
    (re.compile(rf"\\leq?(?:slant)?{_BEHIND}|=<"), "<="),
    (re.compile(rf"\\geq?(?:slant)?{_BEHIND}|=>"), ">="),
    (re.compile(rf"\\lt{_BEHIND}"), "<"),
    (re.compile(rf"\\gt{_BEHIND}"), ">"),
    (re.compile(rf"\\neq?{_BEHIND}|!="), "≠"),
    (re.compile(rf"\\(?:approx|thickapprox|sim|simeq){_BEHIND}"), "≈"),
    (re.compile(rf"^\s*[A-Za-z]\s*\\in{_BEHIND}"), ""),
    (re.compile(rf"\\(?:emptyset|varnothing){_BEHIND}"), r"\\{\\}"),
    (re.compile(r"\\mathbb\s*\{?R\}?|\\R(?![A-Za-z])"), r"(-\\infty,\\infty)"),
    (re.compile(rf"\\(?:cdot|times|ast){_BEHIND}|\*(?=\s*\*\s*\*)"), "*"),
    (re.compile(rf"\\div{_BEHIND}"), "/"),
    (re.compile(rf"\\(?:lvert|rvert|vert|mid){_BEHIND}"), "|"),
    (re.compile(rf"\\(?:langle|rangle){_BEHIND}"), lambda m: "(" if "l" in m.group()[:2] else ")"),
    (re.compile(rf"\^\s*(?:\\circ{_BEHIND}|\{{\s*\\circ\s*\}})|\^?\s*\\(?:text)?degrees?{_BEHIND}|\^\s*°"), "°"),
    (re.compile(r"\\%"), "%"),
    (re.compile(rf"\\(?:lor|vee|land|wedge){_BEHIND}|[∨∧]"), " or "),
    (re.compile(r"(?<=\d)(?:\\,|\\ |\\;|\\:|~|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))"), " "),
    (re.compile(rf"\\(?:quad|qquad|hspace\{{[^{{}}]*\}}){_BEHIND}|\\[,;: >\n]|\\\\|~"), " "),
    (re.compile(r"\\!|\{,\}|\\#|<\|\w{1,20}\|>|^\s*(?:an?|the)\s+(?=\d)"), ""),
    (re.compile(r"(?<![.\\])[.,:]\s*$"), ""),
    (re.compile(rf"\\[lc]?dots{_BEHIND}"), "..."),
    (re.compile(rf"\\colon{_BEHIND}|(?<=[\d}}])\s*{TEXT}?\s*(?<![A-Za-z])to{_BEHIND}\s*{END}?\s*(?=[\d\\])"), ":"),
    (re.compile(rf"\\equiv{_BEHIND}|≡"), "="),
    (re.compile(r"(?<![A-Za-z])([AaPp])\.\s?[Mm]\b\.?"), r"\1m"),
    (re.compile(rf"[(\[]\s*({GRID}[^{GRID}{GRID_END}]*{GRID_END})\s*[)\]]"), r"\1"),
    (re.compile(r"(?:\b(?:US|NT|HK|CA|AU|A|C|S))?\\?\$|\\[()\[\]](?=\s|$)|^\\[(\[]"), ""),
    (re.compile(r"^\s*(?:Rs\.?|USD|EUR|GBP|INR|RMB|CNY|JPY)\s*(?=[\d.])"), ""),
    (re.compile(r"\*\*"), "^"),
    (re.compile(rf"(?<![A-Za-z\\])(?:({_NAMES}){_BEHIND}|(sec)(?=\s*[(\\^]|\s*[a-z]{_BEHIND}))"), r"\\\1\2 "),
    (re.compile(r"^\\\{\s*\(?([A-Za-z])\)?\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?[|:](.*)\\\}$"), r"\2"),
)
_ROMAN = re.compile(r"\{\s*\\(?:rm|bf|it)(?![A-Za-z])([^{}]*)\}")
_SPACING = re.compile(r"\\[,;: !]|~")
_STYLED = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mathrm|mbox|hbox|operatorname\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_FREE_DIGIT = re.compile(r"(?<![\^{-])(?<!\^\{-)\d|[\\=<>]")
_GRID_NAME = r"\{(?:[pbB]?matrix|smallmatrix|array)\}"
_GRIDS = re.compile(rf"\\begin\s*{_GRID_NAME}(?:\s*\{{[lcr|\s]*\}})?(.*?)\\end\s*{_GRID_NAME}", re.DOTALL)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?: \d{3})+(?!\s*[/\d])")
_REPEATING = re.compile(
    r"(\d{0,40})\.(\d{0,40}?)(?:\\(?:overline|bar|dot)\s*(?:\{(\d{1,60})\}|(\d))|\((\d{1,60})\)|(\d{1,6}?)\6\6{1,20}(?:\.\.\.|\\[lc]?dots))"
)
_SCALE = re.compile(rf"(?<=[\d}}])\s*{TEXT}?\s*({'|'.join(_SCALES)}){_BEHIND}")
_OR = re.compile(r",? ?(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])")
_ORDINAL = re.compile(rf"(?<=\d)(?:\s*\^\s*\{{?\s*)?{TEXT}?\s*(?:st|nd|rd|th)\s*{END}?\}}?$")
_LEAD_IN = re.compile(
    rf"^(?:{TEXT}(?:(?!\bnot\b|\bleast\b|\bmost\b)[A-Za-z ])*"
    rf"(?::|\b(?:is|are|about|approximately|exactly|equals))\s*{END}\s*)(?=.)"
)
_MODULO = re.compile(r",? ?\(? ?(?:\\[pb]?mod|(?<![A-Za-z\\])mod(?:ulo)?) ?(?:\{ ?\d+ ?\}|\d+) ?\)?$")
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}")
_SMALL_WORD = re.compile(r"(?<!\S)(?:a[nst]|b[ey]|do|go|he|i[fnst]|m[ey]|no|o[fnr]|so|to|u[ps]|we)(?!\S)", re.IGNORECASE)
_PRODUCT = re.compile(r"[a-dkmnp-z]{2}")  # `ab` is a product of two letters; what has an o, an i or an e is a word
_LETTERS = frozenset("abcdkmnpqrstuvwxyz")
_ABBREVIATIONS = {
    "mm": "millimeter",
    "cm": "centimeter",
    "dm": "decimeter",
    "km": "kilometer",
    "m": "meter",
    "s": "second",
    "sec": "second",
    "secs": "second",
    "min": "minute",
    "mins": "minute",
    "h": "hour",
    "hr": "hour",
    "hrs": "hour",
    "g": "gram",
    "kg": "kilogram",
    "mg": "milligram",
    "l": "liter",
    "ml": "milliliter",
    "ft": "foot",
    "feet": "foot",
    "inches": "inch",
    "yd": "yard",
    "yds": "yard",
    "mi": "mile",
    "lb": "pound",
    "lbs": "pound",
    "oz": "ounce",
    "am": "am",
    "pm": "pm",
    "metre": "meter",
    "millimetre": "millimeter",
    "centimetre": "centimeter",
    "kilometre": "kilometer",
    "litre": "liter",
    "millilitre": "milliliter",
    "amp": "ampere",
}
"""What is short for what. Only to tell `5 cm` from `5 m`, and for what could be a product of letters; a unit need not be here."""
_NAMED_UNITS = frozenset(_ABBREVIATIONS.values())
_SHORT = frozenset(_ABBREVIATIONS) | {"mph", "kph", "rpm", "bps", "kw", "mw", "kv", "mv", "pa", "hz", "ms", "ns", "cc", "sq", "cu"}
_LONE = frozenset("msghlLNJWVKCFA")  # letters that may be a unit behind a space: 100 m
_CHANGES = frozenset(
    (
        *("or", "and", "not", "no", "nor", "never", "cannot", "isn", "aren", "doesn", "wrong", "incorrect", "false", "maybe"),
        *("perhaps", "possibly", "but", "except", "without", "plus", "minus", "factorial", "half", "halves", "thirds", "root"),
        *("below", "negative", "infinity", "undefined", "least", "most", "mod", "modulo", "base", "vs", "versus"),
    )
)
"""Words behind a number that say another value, or none."""
_UNIT_WORD = (
    rf"(?:{TEXT}[^{TEXT}{END}]*{END}|(?<![A-Za-z\\])[A-Za-z]+\.?(?![A-Za-z])"
    rf"|\([A-Za-z][A-Za-z .'-]*\)|°|%|\\Omega|\\mu(?= ?{TEXT}))"
)
_UNIT_ONE = rf"(?:\\frac ?\{{ ?{_UNIT_WORD} ?\}} ?\{{ ?{_UNIT_WORD} ?\}}|{_UNIT_WORD})(?: ?\^ ?(?:\{{ ?-? ?\d ?\}}|-?\d))?"
_UNITS = re.compile(rf"{_UNIT_ONE}(?:(?: ?[/*-] ?| )?{_UNIT_ONE})*")  # one way to part each text: no backtracking
_UNIT_START = re.compile(
    rf"\\Omega|\\mu(?= ?{TEXT})|\\frac(?= ?\{{ ?{TEXT})|{TEXT}|(?<![A-Za-z\\])[A-Za-z]+|\((?=[A-Za-z]{{3}})|°|%"
)
_UNIT_TRIES = 24  # places tried where a unit may begin
_PERCENT = frozenset(("percent", "percentage", "pct", "pc"))
_FACTORS = {"dozen": Fraction(12), "ppm": Fraction(1, 10**6), "permille": Fraction(1, 1000), "basis point": Fraction(1, 10**4)}
"""Units that are factors, and which ones."""
_NUMERAL = re.compile(r"\d|\\pi|\\sqrt|\\frac")
_SPELLED = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_SAYINGS = {
    **{word: str(n) for n, word in enumerate(_SPELLED)},
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions"), "\\{\\}"),
    **dict.fromkeys(("empty set", "the empty set"), "\\{\\}"),
    **dict.fromkeys(("all real numbers", "all reals", "all real number"), "(-\\infty,\\infty)"),
    "dne": "does not exist",
    "infinity": "\\infty",
    "positive infinity": "\\infty",
    "negative infinity": "-\\infty",
}


def plain_characters(text: str) -> str:
    """ASCII for what has an ASCII reading: fullwidth digits, raised and lowered ones, `½`, signs."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda m: "^{" + "".join(_RAISED_LETTERS.get(c) or str(unicodedata.digit(c)) for c in m.group()) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + "".join(str(unicodedata.digit(c)) for c in m.group()) + "}", text)
    return "".join(c if c.isascii() else _plain_character(c) for c in text)


def _plain_character(char: str) -> str:
    if char in _UNICODE:
        return _UNICODE[char]
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if char.isspace():
        return " "
    folded = unicodedata.normalize("NFKC", char)
    if "⁄" in folded:
        top, _, low = folded.partition("⁄")
        return rf"\frac{{{top}}}{{{low}}}"
    return folded if folded.isascii() and folded else char


def normalize(answer: str) -> str:
    """One spelling for what reads the same: no layout commands, currency or thousands separators; styled words keep their marks."""
    text = plain_characters(answer).strip().strip("`").strip()
    while len(text) > 4 and text.startswith("**") and text.endswith("**"):
        text = text[2:-2].strip()
    if len(text) > 2 and text[0] == text[-1] == '"':
        text = text[1:-1]
    text = _ROMAN.sub(r"\\text{\1}", text)
    for _ in range(3):
        styled = _STYLED.sub(_styled, text)
        if styled == text:
            break
        text = styled
    text = _GRIDS.sub(lambda m: f"{GRID}{m.group(1).strip().removesuffix(chr(92) * 2).replace(chr(92) * 2, ROW)}{GRID_END}", text)
    for pattern, plain in _COMMANDS:
        text = pattern.sub(plain, text)
    text = _THOUSANDS.sub(lambda m: m.group(0).replace(",", ""), " ".join(text.split()))
    text = _SPACED.sub(lambda m: m.group(0).replace(" ", ""), text)
    text = _SCALE.sub(lambda m: f"*10^{_SCALES[m.group(1)]} {TEXT if TEXT in m.group(0) else ''}", _REPEATING.sub(_fraction, text))
    text = _OR.sub(",", text).replace(";", ",")
    while text.startswith("{") and text.endswith("}") and "," not in text and text.count("{") == 1:
        text = text[1:-1].strip()
    text = _ORDINAL.sub("", text.strip().rstrip(".,:").strip().removeprefix("≈").strip())
    text = _LEAD_IN.sub("", text)
    bare = words_of(text)
    if choice := re.fullmatch(r"(?:(?:[Oo]ption|[Cc]hoice) )?\(?\s*([A-Za-z])\s*[).]?", bare):
        return choice.group(1)
    return _SAYINGS.get(bare.casefold(), text)


def words_of(text: str) -> str:
    """Without the marks of styled words."""
    return " ".join(text.replace(TEXT, " ").replace(END, " ").split())


def _styled(found: re.Match[str]) -> str:
    command, raw = found.group(0), _SPACING.sub(" ", found.group(1).replace("\\cdot", "*"))
    inside = raw.strip()
    if command.startswith("\\operatorname") and inside in FUNCTIONS:
        return f"\\{inside} "
    plain = inside in ("e", "i") or _FREE_DIGIT.search(inside) or re.search(r"\b(?:or|and)\b", inside)
    if plain or re.fullmatch(r"\(?[A-Z]\)?\.?:?|\\?\$|%|Rs\.?", inside) or not inside:
        return f" {raw} "
    return f"{TEXT}{raw}{END}"


def _fraction(repeating: re.Match[str]) -> str:
    """0.1\\overline{6} as a fraction."""
    whole, once, *cycles = repeating.groups()
    again = next(cycle for cycle in cycles if cycle)
    low = (10 ** len(again) - 1) * 10 ** len(once)
    top = int(whole + once + again) - int(f"0{whole}{once}")
    common = math.gcd(top, low)
    return rf"\frac{{{top // common}}}{{{low // common}}}" if low != common else str(top // common)


def fold(text: str) -> str:
    """Spaces go where they part nothing (`1 2` is not 12); case goes from words and choices only (2x is not 2X)."""
    text = _IDLE_SPACE.sub("", words_of(text))
    return text.casefold() if is_text(text) or text.isalpha() else text


def _is_product(letters: str) -> bool:
    """Whether a run of letters reads as a product: `xyz`, `ab`, `mn`; words have an o, an i, an e or another order."""
    if len(letters) == 2:
        return bool(_PRODUCT.fullmatch(letters.lower()))
    small = letters.lower()
    if set(small) <= set("xyz") or set(small) <= set("abc"):
        return len(letters) <= 4
    return len(letters) <= 4 and letters in (small, letters.upper()) and set(small) <= _LETTERS and list(small) == sorted(small)


def is_text(text: str) -> bool:
    """Words are compared as words, never as products of letters."""
    if TEXT in text or _SMALL_WORD.search(text):
        return True
    words = _WORD.findall(_ENVIRONMENT.sub("", text))
    return any(not _is_product(word) for word in words) or (len(text) > 1 and text.isalpha() and not _is_product(text))


def split_unit(text: str, bare_letter: bool = False) -> tuple[str, str]:
    """A number or formula, and the unit or words behind it; the whole text and "" without one. `bare_letter`: also `15m`."""
    for tries, start in enumerate(_UNIT_START.finditer(text)):
        if tries == _UNIT_TRIES:
            break
        at = start.start()
        if at and _UNITS.fullmatch(text, at) and _is_unit(text[:at], text[at:], bare_letter):
            return text[:at].rstrip(" -*/,"), text[at:]
    return text, ""


def _is_unit(head: str, tail: str, bare_letter: bool) -> bool:
    styled = tail[0] == TEXT or tail.startswith("\\frac")
    bare = re.sub(r"(?<=[\d}])-$|(?<=[\d} ])/$", "", head.rstrip()).rstrip()  # 15-inch, 15/hour
    if not bare or bare[-1] in "+-*/^_=<>,([{" or is_text(head) or not (styled or _NUMERAL.search(bare)):
        return False
    first, *others = [word.casefold() for word in re.findall("[A-Za-z]+", tail.removeprefix("\\frac"))] or [""]
    if not _CHANGES.isdisjoint((first, *others)) or first in ("squared", "cubed"):
        return False
    if styled or tail[0] in "°%\\":
        return True
    found = re.match("[A-Za-z]+", tail.removeprefix("("))
    run = found.group() if found else ""
    if len(run) == 1:
        return "/" in tail or (run in _LONE and (bare_letter or head.endswith(" ")) and bare[-1].isdigit())
    return run.casefold() in _SHORT or not _is_product(run)


def same_unit(left: str, right: str) -> bool:
    """Whether two units may be the same: only what is known to be another one is not."""
    names = []
    for unit in (left, right):
        word = words_of(unit).strip(" .()").casefold()
        if re.fullmatch("[ap] ?[.] ?m", word):
            word = word[0] + "m"
        names.append(_ABBREVIATIONS.get(word) or _ABBREVIATIONS.get(word.removesuffix("s")) or word.removesuffix("s"))
    return names[0] == names[1] or not (names[0] in _NAMED_UNITS and names[1] in _NAMED_UNITS)


def scale_of(unit: str) -> tuple[str, Fraction] | None:
    """What a unit that is a factor calls itself, and the factor: percent, a dozen. None of any other."""
    word = words_of(unit).strip(" .()").casefold()
    if "%" in word or (word.partition(" ")[0].rstrip(".") in _PERCENT) or word.startswith("per cent"):
        return "percent", Fraction(1, 100)
    found = next((name for name in _FACTORS if re.match(rf"{name}s?(?![a-z])", word)), None)
    return (found, _FACTORS[found]) if found else None


def asks_for(scale: str, question: str) -> bool:
    """Whether a question speaks of percent, of dozens: then `25\\%` is a way to say the 25 that it asks for."""
    asked = question.casefold()
    return scale in asked or (scale == "percent" and any(word in asked for word in ("%", "per cent", "pct")))


def strip_modulus(text: str) -> str:
    """Without the `\\pmod{7}` behind a residue."""
    return _MODULO.sub("", words_of(text)).strip()
