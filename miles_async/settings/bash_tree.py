"""(pure) Tokens of bash as a tree of commands. Nothing is expanded and nothing run.

Always true: commands stand in the order of the text, and each knows its line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from miles_async.settings.bash import Lexer, Token
from miles_async.settings.errors import SettingsError

Body = tuple["Node", ...]


class Simple(NamedTuple):
    """Assignments, a program and its words. given: what stands behind `<<<`, `<<` or `<`, its input. written: where its output
    goes instead, "" where it does not."""

    words: tuple[Token, ...]
    given: tuple[tuple[str, Token], ...]
    written: str
    line: int


class Pipe(NamedTuple):
    parts: Body
    negated: bool


class Chain(NamedTuple):
    """`a && b || c`. rest: operator and command."""

    first: Node
    rest: tuple[tuple[str, Node], ...]
    line: int


class If(NamedTuple):
    """arms: test and what follows it."""

    arms: tuple[tuple[Body, Body], ...]
    otherwise: Body
    line: int


class For(NamedTuple):
    """`for NAME in WORDS`, or over the arguments where `words` is None. kind: for, select."""

    kind: str
    name: str
    words: tuple[Token, ...] | None
    body: Body
    line: int


class Count(NamedTuple):
    """`for ((begin; test; step))`."""

    begin: str
    test: str
    step: str
    body: Body
    line: int


class While(NamedTuple):
    kind: str
    test: Body
    body: Body
    line: int


class Case(NamedTuple):
    word: Token
    arms: tuple[tuple[tuple[Token, ...], Body], ...]
    line: int


class CommandGroup(NamedTuple):
    """`{ ...; }`, or `( ... )`, a shell of its own."""

    body: Body
    own_shell: bool


class Function(NamedTuple):
    name: str
    body: Node


class Test(NamedTuple):
    """`[[ ... ]]`."""

    tokens: tuple[Token, ...]
    line: int


class Sum(NamedTuple):
    """`(( ... ))`."""

    text: str
    line: int


Node = Simple | Pipe | Chain | If | For | Count | While | Case | CommandGroup | Function | Test | Sum
_REDIRECTED = re.compile(r"\d*(<<<|<<-?|<&?|>>|>&?)|&>>?")
_ENDS = ("fi", "done", "esac", "then", "else", "elif", "do", "}")


def parse(text: str, name: str) -> Body:
    """The commands of `text`; `name` says in which file. SettingsError where it is no bash."""
    parser = _Parser([*Lexer(text, name).tokens(), Token(0, "\n")], name)
    body = parser.list(())
    parser.end()
    return body


class _Parser:
    def __init__(self, tokens: list[Token], name: str) -> None:
        self._tokens, self._i, self._name = tokens, 0, name

    def _now(self) -> Token:
        return self._tokens[min(self._i, len(self._tokens) - 1)]

    def _is(self, *texts: str) -> bool:
        """Whether an operator, or a word that ends or begins a block, stands here."""
        return self._i < len(self._tokens) and self._now().text in texts

    def _take(self, text: str) -> None:
        if not self._is(text):
            at = f"{self._name}:{self._now().line}" if self._i < len(self._tokens) - 1 else f"{self._name} ends"
            where = at if at.endswith("ends") else f"{at}: {self._now().text!r} stands"
            raise SettingsError(f"{where} before {text!r}", remedy="Close the block; it must be a bash script.")
        self._i += 1

    def _pass(self, *texts: str) -> None:
        while self._is(*texts):
            self._i += 1

    def end(self) -> None:
        if self._i < len(self._tokens):
            token = self._now()
            said = f"{self._name}:{token.line}: {token.text!r} ends nothing"
            raise SettingsError(said, remedy="Take it out; it must be a bash script.")

    def list(self, until: tuple[str, ...]) -> Body:
        """Commands up to a word of `until`, which stays."""
        found: list[Node] = []
        while True:
            self._pass("\n", ";", "&")
            if self._i >= len(self._tokens) or self._is(*until, ")", ";;"):
                return tuple(found)
            if self._is(*_ENDS):
                return tuple(found)
            found.append(self._chain())

    def _chain(self) -> Node:
        line = self._now().line
        first = self._pipe()
        rest: list[tuple[str, Node]] = []
        while self._is("&&", "||"):
            sign = self._now().text
            self._i += 1
            self._pass("\n")
            rest.append((sign, self._pipe()))
        return Chain(first, tuple(rest), line) if rest else first

    def _pipe(self) -> Node:
        negated = False
        while self._is("!", "time"):
            negated ^= self._is("!")
            self._i += 1
        parts = [self._command()]
        while self._is("|"):
            self._i += 1
            self._pass("&", "\n")
            parts.append(self._command())
        return Pipe(tuple(parts), negated) if negated or len(parts) > 1 else parts[0]

    def _command(self) -> Node:
        token = self._now()
        line, head = token.line, token.text
        if head == "(":
            self._i += 1
            body = self.list(())
            self._take(")")
            return self._behind(CommandGroup(body, own_shell=True))
        if token.parts is None:
            if _REDIRECTED.fullmatch(head):
                return self._simple()
            raise SettingsError(
                f"{self._name}:{line}: {head!r} stands where a command is due",
                remedy="Correct it; it must be a bash script.",
            )
        if head == "((":
            self._i += 1
            return self._behind(Sum(token.parts[0].text, line))
        if head == "[[":
            return self._test()
        reader = {"if": self._if, "for": self._for, "select": self._for, "while": self._while, "until": self._while}
        if head in reader:
            self._i += 1
            return self._behind(reader[head](head, line))
        if head == "case":
            self._i += 1
            return self._behind(self._case(line))
        if head == "{":
            self._i += 1
            body = self.list(("}",))
            self._take("}")
            return self._behind(CommandGroup(body, own_shell=False))
        if head == "function":
            self._i += 1
            name = self._word().text
            if self._is("("):
                self._i += 1
                self._take(")")
            return self._function(name)
        then = self._tokens[self._i + 1 : self._i + 3]
        if token.assigned is None and [one.text for one in then] == ["(", ")"]:
            self._i += 3
            return self._function(head)
        return self._simple()

    def _function(self, name: str) -> Node:
        self._pass("\n")
        return Function(name, self._command())

    def _word(self) -> Token:
        token = self._now()
        if token.parts is None:
            raise SettingsError(
                f"{self._name}:{token.line}: {token.text!r} stands where a word is due",
                remedy="Correct it; it must be bash.",
            )
        self._i += 1
        return token

    def _redirected(self) -> tuple[str, Token] | None:
        """Pass one `> file`: the sign and the file, None of `<(command)`."""
        sign = self._now().text
        self._i += 1
        if self._is("("):
            depth = 0
            while self._i < len(self._tokens):
                depth += (self._now().text == "(") - (self._now().text == ")")
                self._i += 1
                if depth == 0:
                    return None
        return sign, self._word()

    def _redirects(self) -> bool:
        return self._i < len(self._tokens) and self._now().parts is None and bool(_REDIRECTED.fullmatch(self._now().text))

    def _behind(self, node: Node) -> Node:
        """`node`, with what is redirected behind it passed."""
        while self._redirects():
            self._redirected()
        return node

    def _simple(self) -> Node:
        words: list[Token] = []
        given: list[tuple[str, Token]] = []
        written, line = "", self._now().line
        while self._i < len(self._tokens):
            if self._now().parts is not None:
                words.append(self._word())
            elif not self._redirects():
                break
            elif (one := self._redirected()) is not None:
                sign, word = one
                given += [one] if sign in ("<", "<<", "<<-", "<<<") else []
                to_file = sign in (">", ">>", "1>", "1>>", "&>", "&>>") or (sign in (">&", "1>&") and word.text != "1")
                written = ("" if sign.endswith(">&") and word.text.isdigit() else word.text) or "&" if to_file else written
        return Simple(tuple(words), tuple(given), written, line)

    def _test(self) -> Node:
        line, start = self._now().line, self._i + 1
        while self._i < len(self._tokens) and self._now().text != "]]":
            self._i += 1
        tokens = tuple(one for one in self._tokens[start : self._i] if one.text != "\n")
        self._take("]]")
        return self._behind(Test(tokens, line))

    def _if(self, _: str, line: int) -> Node:
        arms: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        while True:
            test = self.list(("then",))
            self._take("then")
            arms.append((test, self.list(("elif", "else", "fi"))))
            if self._is("elif"):
                self._i += 1
                continue
            if self._is("else"):
                self._i += 1
                otherwise = self.list(("fi",))
            self._take("fi")
            return If(tuple(arms), otherwise, line)

    def _do(self) -> Body:
        self._pass("\n", ";")
        self._take("do")
        body = self.list(("done",))
        self._take("done")
        return body

    def _for(self, kind: str, line: int) -> Node:
        head = self._word()
        if head.text == "((" and head.parts:
            parts = head.parts[0].text.split(";")
            if len(parts) != 3:
                raise SettingsError(f"{self._name}:{line}: `for ((` needs two `;`", remedy="Correct it; it must be bash.")
            begin, test, step = parts
            return Count(begin, test, step, self._do(), line)
        words: tuple[Token, ...] | None = None
        self._pass("\n")
        if self._is("in"):
            self._i += 1
            start = self._i
            while self._now().parts is not None:
                self._i += 1
            words = tuple(self._tokens[start : self._i])
        return For(kind, head.text, words, self._do(), line)

    def _while(self, kind: str, line: int) -> Node:
        test = self.list(("do",))
        return While(kind, test, self._do(), line)

    def _case(self, line: int) -> Node:
        word = self._word()
        self._pass("\n")
        self._take("in")
        arms: list[tuple[tuple[Token, ...], Body]] = []
        self._pass("\n")
        while not self._is("esac"):
            self._pass("(")
            patterns = [self._word()]
            while self._is("|"):
                self._i += 1
                patterns.append(self._word())
            self._take(")")
            arms.append((tuple(patterns), self.list(("esac",))))
            self._pass("\n", ";;", ";", "&")
        self._take("esac")
        return Case(word, tuple(arms), line)
