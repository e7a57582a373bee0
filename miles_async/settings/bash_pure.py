"""What programs print whose output follows from their words and their input alone: `seq`, `basename`, `tr`, `[`, ...

Always true: nothing but the clock is read, for `date`, and nothing is started; None where the answer is not certain.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

LONGEST = 1 << 20  # characters of a word
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\\": "\\"}
_CLASSES = {
    "[:upper:]": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "[:lower:]": "abcdefghijklmnopqrstuvwxyz", "[:digit:]": "0123456789",
    "[:space:]": " \t\n\r\f\v",
}  # fmt: skip

Printed = tuple[str, bool] | None
"""What a program prints, and whether it succeeds. None: only a shell knows."""


def printed(name: str, words: Sequence[str], given: str | None) -> Printed:
    """The output of a program. `given`: its standard input, None where that is not known."""
    program = _PROGRAMS.get(name)
    try:
        return program(list(words), given) if program else None
    except (ValueError, IndexError, re.error):
        return None


def _seq(words: list[str], _: str | None) -> Printed:
    between = "\n"
    while words and words[0].startswith("-") and not re.fullmatch(r"-\d+", words[0]):
        option = words.pop(0)
        if option == "-s" or option == "--separator":
            between = words.pop(0)
        elif option.startswith("-s"):
            between = option[2:]
        else:
            return None
    numbers = [int(word) for word in words]
    first, step, last = {1: (1, 1, *numbers), 2: (numbers[0], 1, numbers[-1]), 3: tuple(numbers)}[len(numbers)]
    if any(re.fullmatch(r"-?(0|[1-9]\d*)", word) is None for word in words) or not step or (last - first) // step > LONGEST // 8:
        return None
    found = [str(number) for number in range(first, last + (1 if step > 0 else -1), step)]
    return between.join(found) + ("\n" if found else ""), True


def _basename(words: list[str], _: str | None) -> Printed:
    words = words[1:] if words[:1] == ["--"] else words
    if not 1 <= len(words) <= 2 or words[0].startswith("-"):
        return None
    name = posixpath.basename(words[0].rstrip("/")) or ("/" if words[0] else "")
    if len(words) == 2 and name != words[1]:
        name = name.removesuffix(words[1])
    return name + "\n", True


def _dirname(words: list[str], _: str | None) -> Printed:
    words = words[1:] if words[:1] == ["--"] else words
    if not words or words[0].startswith("-"):
        return None
    found = []
    for word in words:
        head, slash, _tail = word.rstrip("/").rpartition("/")
        found.append((head.rstrip("/") or "/") if slash else ("/" if word.startswith("/") else "."))
    return "\n".join(found) + "\n", True


def _echo(words: list[str], _: str | None) -> Printed:
    end, escapes = "\n", False
    while words and re.fullmatch(r"-[neE]+", words[0]):
        option = words.pop(0)
        end, escapes = "" if "n" in option else end, "E" not in option and (escapes or "e" in option)
    text = " ".join(words)
    if escapes and "\\" in text:
        return None
    return text + end, True


def format_text(words: list[str]) -> str:
    """The text of `printf FORMAT WORDS`, of %s, %d and %%. ValueError for more."""
    form, rest = words[0], words[1:]
    if form == "--":
        form, rest = rest[0], rest[1:]
    holes = len(re.findall(r"%[sd]", form))
    if re.search(r"%(?![sd%])|\\[^ntrabfv\\]", form):
        raise ValueError(form)
    found = []
    while True:
        used = iter(rest[:holes])

        def one(match: re.Match[str], used: object = used) -> str:
            kind = match[0]
            if kind[0] == "\\":
                return _ESCAPES[kind[1]]
            if kind == "%%":
                return "%"
            value = next(used, "" if kind == "%s" else "0")  # type: ignore[call-overload]
            return str(value) if kind == "%s" else str(int(value))

        found.append(re.sub(r"\\.|%.", one, form))
        rest = rest[holes:]
        if not rest or not holes:
            return "".join(found)


def _printf(words: list[str], _: str | None) -> Printed:
    return format_text(words), True


def _cat(words: list[str], given: str | None) -> Printed:
    return (given, True) if words in ([], ["-"]) and given is not None else None


def _characters(text: str) -> str:
    """A set of `tr`, spelled out. ValueError for what is not read."""
    for name, characters in _CLASSES.items():
        text = text.replace(name, characters)
    text = re.sub(r"\\([ntrabfv\\])", lambda found: _ESCAPES[found[1]], text)
    if "[:" in text or "[=" in text:
        raise ValueError(text)
    return re.sub(r"(.)-(.)", lambda found: "".join(map(chr, range(ord(found[1]), ord(found[2]) + 1))), text, flags=re.DOTALL)


def _tr(words: list[str], given: str | None) -> Printed:
    if given is None:
        return None
    if words[:1] == ["-d"] and len(words) == 2:
        gone = _characters(words[1])
        return "".join(character for character in given if character not in gone), True
    if len(words) != 2 or words[0].startswith("-") or not words[1]:
        return None
    before, after = _characters(words[0]), _characters(words[1])
    after += after[-1] * (len(before) - len(after))
    table: dict[str, str] = {}
    for a, b in zip(before, after, strict=False):
        table[a] = b  # the last one counts
    return "".join(table.get(character, character) for character in given), True


def _wc(words: list[str], given: str | None) -> Printed:
    if given is None or len(words) != 1 or words[0] not in ("-l", "-w"):
        return None
    return f"{given.count(chr(10)) if words[0] == '-l' else len(given.split())}\n", True


def _cut(words: list[str], given: str | None) -> Printed:
    match = re.fullmatch(r"-d ?(.) -f ?(\d+)", " ".join(words), re.DOTALL)
    if given is None or match is None:
        return None
    lines = given.splitlines()
    cut = [line.split(match[1]) for line in lines]
    wanted = int(match[2]) - 1
    return "".join((one[0] if len(one) == 1 else (one[wanted] if wanted < len(one) else "")) + "\n" for one in cut), True


_SUBSTITUTED = re.compile(r"s([/|#,])((?:(?!\1).)*)\1((?:(?!\1).)*)\1(g?)")


def _sed(words: list[str], given: str | None) -> Printed:
    """Substitutions of plain text alone."""
    words = words[1:] if words[:1] == ["-e"] else words
    if given is None or len(words) != 1:
        return None
    steps: list[re.Match[str]] = []
    rest = words[0]
    while rest:
        one = _SUBSTITUTED.match(rest)
        if one is None or not re.fullmatch(r"\^?[\w/ :,@=-]*\$?", one[2]) or re.search(r"[\\&]", one[3]):
            return None
        steps.append(one)
        rest = re.sub(r"^[;\s]+", "", rest[one.end() :])
    lines = []
    for line in given.splitlines():
        for one in steps:
            with_this = one[3]
            line = re.sub(one[2], lambda _, text=with_this: text, line, count=0 if one[4] else 1)
        lines.append(line)
    return "\n".join(lines) + ("\n" if given.endswith("\n") else ""), True


def _grep(words: list[str], given: str | None) -> Printed:
    """Whether a plain text is there: with `-q` alone, as nothing is printed then."""
    options = "".join(word[1:] for word in words if re.fullmatch(r"-[qwFiE]+", word))
    rest = [word for word in words if not re.fullmatch(r"-[qwFiE]+", word)]
    if given is None or "q" not in options or len(rest) != 1 or not re.fullmatch(r"[\w/ :,@=-]+", rest[0].replace(".", "_")):
        return None
    pattern = re.escape(rest[0]) if "F" in options else rest[0]
    pattern = rf"(?<!\w){pattern}(?!\w)" if "w" in options else pattern
    return "", re.search(pattern, given, re.IGNORECASE if "i" in options else 0) is not None


def _head(words: list[str], given: str | None) -> Printed:
    match = re.fullmatch(r"-(?:n ?)?(\d+)", " ".join(words))
    return None if given is None or match is None else ("".join(given.splitlines(True)[: int(match[1])]), True)


def _python(words: list[str], _: str | None) -> Printed:
    """A product of numbers alone, which shells without fractions ask Python for."""
    match = re.fullmatch(r"print\((int\()?([\d. *]+)\)?\)", words[1]) if len(words) == 2 and words[0] == "-c" else None
    factors = match[2].split("*") if match else []
    if match is None or not all(re.fullmatch(r" *(0|[1-9]\d*)(\.\d+)? *", factor) for factor in factors):
        return None
    product: float = 1
    for factor in factors:
        product *= float(factor) if "." in factor else int(factor)
    return f"{int(product) if match[1] else product}\n", True


def _date(words: list[str], _: str | None) -> Printed:
    """Now, as the shell would say it."""
    plain = len(words) == 1 and words[0].startswith("+") and not re.search(r"%[^YmdHMSFTsjy]", words[0])
    return (time.strftime(words[0][1:]) + "\n", True) if plain else None


_PROGRAMS: dict[str, Callable[[list[str], str | None], Printed]] = {
    "seq": _seq, "basename": _basename, "dirname": _dirname, "echo": _echo, "printf": _printf, "cat": _cat, "tr": _tr,
    "wc": _wc, "cut": _cut, "sed": _sed, "grep": _grep, "head": _head, "python3": _python, "python": _python, "date": _date,
    "true": lambda _words, _given: ("", True), ":": lambda _words, _given: ("", True), "false": lambda _words, _given: ("", False),
}  # fmt: skip

PRINTING = frozenset(_PROGRAMS)
"""Programs that do nothing but print."""

# -- tests ----------------------------------------------------------------------------------------------------------------

_ONE = ("-z", "-n", "-d", "-f", "-e", "-r", "-w", "-x", "-s", "-L", "-h", "-v", "-t")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b, "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
Item = tuple[str | None, str]
"""A word of a test, None where it is not known; and as the sign that it may be: "" where it stood in quotes."""


class Undecided(Exception):
    """A test that is not read."""


def both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def either(a: bool | None, b: bool | None) -> bool | None:
    return True if a is True or b is True else None if a is None or b is None else False


class Decider:
    """Decides the words of `[ ... ]` or `[[ ... ]]`. True, False, or None where only a shell knows."""

    def __init__(self, items: Sequence[Item], *, double: bool) -> None:
        self._items, self._i, self._double = items, 0, double

    def decide(self) -> bool | None:
        if not self._items:
            return False
        try:
            found = self._either()
        except (Undecided, IndexError):
            return None
        return found if self._i == len(self._items) else None

    def _sign(self, ahead: int = 0) -> str:
        at = self._i + ahead
        return self._items[at][1] if at < len(self._items) else ""

    def _either(self) -> bool | None:
        found = self._both()
        while self._sign() == ("||" if self._double else "-o"):
            self._i += 1
            found = either(found, self._both())
        return found

    def _both(self) -> bool | None:
        found = self._one()
        while self._sign() == ("&&" if self._double else "-a"):
            self._i += 1
            found = both(found, self._one())
        return found

    def _one(self) -> bool | None:
        sign, left = self._sign(), len(self._items) - self._i
        if sign == "!" and left > 1 and not (left == 3 and self._sign(1) in ("=", "==", "!=")):
            self._i += 1
            found = self._one()
            return None if found is None else not found
        if sign == "(":
            self._i += 1
            found = self._either()
            if self._sign() != ")":
                raise Undecided
            self._i += 1
            return found
        operator = self._sign(1)
        if operator in ("=", "==", "!=", "=~", "<", ">", *_NUMBERS) and left >= 3:
            return self._two(operator)
        if sign in _ONE and left >= 2:
            text = self._items[self._i + 1][0]
            self._i += 2
            return None if text is None or sign not in ("-z", "-n") else (text == "") == (sign == "-z")
        text = self._items[self._i][0]
        self._i += 1
        return None if text is None else text != ""

    def _two(self, operator: str) -> bool | None:
        a, (b, pattern) = self._items[self._i][0], self._items[self._i + 2]
        self._i += 3
        if a is None or b is None or operator in ("=~", "<", ">"):
            return None
        if operator in _NUMBERS:
            if not re.fullmatch(r"\s*[-+]?\d+\s*", a) or not re.fullmatch(r"\s*[-+]?\d+\s*", b):
                return False if not self._double else None  # `[` says so on stderr and fails
            return _NUMBERS[operator](int(a), int(b))
        same = fnmatchcase(a, b) if self._double and pattern and re.search(r"[*?\[]", b) else a == b
        return same == (operator != "!=")


def joined(folder: str, path: str) -> str:
    """Where `cd path` leads from `folder`, as the shell says it."""
    return os.path.normpath(posixpath.join(folder, path))
