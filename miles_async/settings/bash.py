"""(pure) Bash source as tokens: words with their pieces, array assignments, operators. Nothing is expanded and nothing run.

Always true: the pieces of a word are in order, and each says whether it stood in quotes, on which splitting depends.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from miles_async.settings.errors import SettingsError

SEPARATORS = ("\n", ";", "&", "|", "||", "&&", "(", ")", ";;")
OPERATOR = re.compile(r"<<<|<<-?|&>>?|>>|>&|<&|\|\||&&|;;|[;&|()<>\n]")
ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^\]\s]*\])?(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
_BRACES = re.compile(r"([A-Za-z_]\w*|[0-9@*])(?:\[([@*0])\])?(?:(:?[-=+?])|(?=\}))")
_SUM = re.compile(r"\$\(\([\w\s$+*/%(){}-]{1,200}\)\)")
_SUM_NAME = re.compile(r"\$\{([A-Za-z_]\w*)\}|\$?\b([A-Za-z_]\w*)")
_ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class Part(NamedTuple):
    """A piece of a word. lit: `text` itself. var, all: the variable `text`, or every element of it; `default` and `operator` as in
    `${X:-default}`. sub: the command `text`. no: what is not read. `raw`: as written."""

    kind: Literal["lit", "var", "all", "sub", "no"]
    text: str
    quoted: bool
    raw: str = ""
    operator: str = ""
    default: tuple[Part, ...] = ()


class Token(NamedTuple):
    """A word (`parts`), or an operator (`parts` is None). `text`: as written. Of a word that may be an assignment `assigned` is
    what stands before the value, and `parts` the value; of an array that is `elements`."""

    line: int
    text: str
    parts: tuple[Part, ...] | None = None
    assigned: re.Match[str] | None = None
    elements: tuple[Token, ...] | None = None


class Lexer:
    """Text to tokens. SettingsError for a quote or a bracket that is not closed; `name` says in which file."""

    def __init__(self, text: str, name: str) -> None:
        self._s, self._i, self._name = text.replace("\r\n", "\n"), 0, name

    def tokens(self, end: str = "") -> list[Token]:
        """All up to the operator `end`, by default to the end."""
        found: list[Token] = []
        documents: list[str] = []  # what ends the here-documents that begin with the next line
        while self._i < len(self._s):
            c = self._s[self._i]
            if c in " \t":
                self._i += 1
            elif self._s.startswith("\\\n", self._i):
                self._i += 2
            elif c == "#":
                self._i = self._find("\n")
            elif (operator := OPERATOR.match(self._s, self._i)) is None:
                found.append(self._word())
            else:
                if c in "<>" and found and found[-1].text.isdigit() and self._s[self._i - 1].isdigit():
                    found.pop()  # the 2 of 2> is no word
                line, self._i = self._line(), operator.end()
                if operator[0] == end:
                    return found
                found.append(Token(line, operator[0]))
                if operator[0] in ("<<", "<<-"):
                    self._i += len(self._s[self._i :]) - len(self._s[self._i :].lstrip(" \t"))
                    found.append(self._word())
                    documents.append(found[-1].text.strip("'\"\\"))
                while operator[0] == "\n" and documents:
                    stop = self._find("\n")
                    text, self._i = self._s[self._i : stop], stop + 1
                    if text.strip() == documents[0] or self._i >= len(self._s):
                        documents.pop(0)
        if end:
            raise self._unclosed(end)
        return found

    def _line(self) -> int:
        return self._s.count("\n", 0, self._i) + 1

    def _find(self, text: str) -> int:
        at = self._s.find(text, self._i)
        return len(self._s) if at < 0 else at

    def _unclosed(self, what: str) -> SettingsError:
        return SettingsError(
            f"{self._name} ends before {what!r}", remedy="Close the quote or bracket; it must be a bash script."
        )

    def _pass(self, at: int, what: str) -> None:
        """Go on behind what stands at `at`."""
        if not self._s.startswith(what, at):
            raise self._unclosed(what)
        self._i = at + len(what)

    def _word(self) -> Token:
        line, start = self._line(), self._i
        assigned = ASSIGNED.match(self._s, start)
        if assigned is not None:
            self._i = assigned.end()
            if self._s.startswith("(", self._i):
                self._i += 1
                elements = tuple(one for one in self.tokens(end=")") if one.parts is not None)
                return Token(line, self._s[start : self._i], (), assigned, elements)
        parts = self._parts(" \t\n;&|()<>", quoted=False)
        return Token(line, self._s[start : self._i], tuple(parts), assigned)

    def _parts(self, stops: str, *, quoted: bool) -> list[Part]:
        """Pieces up to a character of `stops`, which stays."""
        s, found = self._s, list[Part]()
        while self._i < len(s) and s[self._i] not in stops:
            c, then = s[self._i], s[self._i + 1 : self._i + 2]
            self._i += 1
            if c == "\\" and not (quoted and then not in '$`"\\\n'):
                self._i += 1
                if then != "\n":
                    found.append(Part("lit", then, True))
            elif c == "'" and not quoted:
                end = self._find("'")
                found.append(Part("lit", s[self._i : end], True))
                self._pass(end, "'")
            elif c == '"':
                found += self._parts('"', quoted=True) or [Part("lit", "", True)]
                self._pass(self._i, '"')
            elif c == "`":
                end = self._find("`")
                found.append(Part("sub", s[self._i : end], quoted, s[self._i - 1 : end + 1]))
                self._pass(end, "`")
            elif c == "$":
                found.append(self._dollar(quoted))
            else:
                found.append(Part("lit", c, quoted))
        return found

    def _dollar(self, quoted: bool) -> Part:
        s, start = self._s, self._i - 1
        then = s[self._i : self._i + 1]
        if name := NAME.match(s, self._i):
            self._i = name.end()
            return Part("var", name[0], quoted, s[start : self._i])
        if then == "(":
            self._i += 1
            self._skip(")")
            raw = s[start : self._i]
            return Part("no" if raw.startswith("$((") else "sub", raw[2:-1], quoted, raw)
        if then == "{":
            self._i += 1
            return self._braces(start, quoted)
        if then == "'" and not quoted:
            body = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL).match(s, self._i)
            if body is None:
                raise self._unclosed("'")
            self._i = body.end()
            if all(escaped in _ANSI for escaped in re.findall(r"\\(.)", body[1], re.DOTALL)):
                return Part("lit", re.sub(r"\\(.)", lambda m: _ANSI[m[1]], body[1]), True)
            return Part("no", body[0], True, s[start : self._i])
        if then and then in "0123456789@*#?$!-":
            self._i += 1
            return Part("var" if then.isdigit() else "all" if then in "@*" else "no", then, quoted, s[start : self._i])
        return Part("lit", "" if then == '"' and not quoted else "$", quoted)

    def _braces(self, start: int, quoted: bool) -> Part:
        head = _BRACES.match(self._s, self._i)
        if head is None:
            self._skip("}")
            return Part("no", self._s[start : self._i], quoted, self._s[start : self._i])
        self._i = head.end()
        default = tuple(self._parts("}", quoted=quoted))
        self._pass(self._i, "}")
        kind: Literal["all", "var"] = "all" if head[2] in ("@", "*") or head[1] in "@*" else "var"
        return Part(kind, head[1], quoted, self._s[start : self._i], head[3] or "", default)

    def _skip(self, close: str) -> None:
        """To behind the bracket or quote that closes what was opened."""
        s = self._s
        while self._i < len(s):
            c = s[self._i]
            self._i += 1
            if c == close:
                return
            if c == "\\":
                self._i += 1
            elif c == "'" and close != '"':
                self._pass(self._find("'"), "'")
            elif c == '"':
                self._skip('"')
            elif c == "(" and (close == ")" or s[self._i - 2] == "$"):
                self._skip(")")
            elif c == "{" and s[self._i - 2] == "$":
                self._skip("}")
        raise self._unclosed(close)


def arithmetic(raw: str, known: Callable[[str], str]) -> str | None:
    """The value of `$((2 * N))`: whole numbers, names, + - * / % and parentheses. None for anything else, and where `known` gives
    no whole number for a name."""
    if not _SUM.fullmatch(raw):
        return None
    text = _SUM_NAME.sub(lambda found: f"({known(found[1] or found[2]) or '?'})", raw[3:-2])
    try:
        return str(_whole(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _quotient(a: int, b: int) -> int:
    """Cut towards zero, as in a shell."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def _whole(node: ast.expr) -> int:
    """A whole number of 64 bits, as in a shell; ValueError for what is none."""
    match node:
        case ast.Constant(value=int(value)):
            number = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = -_whole(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            number = _OPERATIONS[type(op)](_whole(left), _whole(right))
        case _:
            raise ValueError("not read")
    if not -(2**63) <= number < 2**63:
        raise ValueError("more than 64 bits")
    return number
