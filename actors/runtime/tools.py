"""Tools that ship: a calculator, a search over local texts, Python in the sandbox. What a model may call, and what answers.

Always true: a call gets a text, at most `ANSWER_CHARS` long; whatever is wrong with it is told in that text, for the model.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import msgspec

from actors.runtime.run import Refused
from actors.runtime.sandbox import Sandbox

ANSWER_CHARS = 4000
MAX_BITS = 4096  # of a number that the calculator handles
MAX_EXPRESSION = 500  # characters


class Tool(msgspec.Struct, frozen=True):
    """`parameters`: name -> (JSON type, description); all are required."""

    name: str
    description: str
    parameters: dict[str, tuple[str, str]]

    @property
    def spec(self) -> dict[str, Any]:
        """As the OpenAI interface and chat templates describe it."""
        properties = {name: {"type": kind, "description": text} for name, (kind, text) in self.parameters.items()}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }


CALCULATOR = Tool("calculator", "Evaluates an arithmetic expression.", {"expression": ("string", "for example 12*(3+4)")})
SEARCH = Tool("search", "Finds the passages of the corpus that fit a query best.", {"query": ("string", "words to look for")})
PYTHON = Tool("python", "Runs Python code and returns what it prints.", {"code": ("string", "a complete script")})
SHIPPED: Mapping[str, Tool] = {tool.name: tool for tool in (CALCULATOR, SEARCH, PYTHON)}


class Toolbox:
    """The tools of these names, ready to be called. `corpus`: a text or JSONL file for `search`; `weak`: as the sandbox has it. Use
    as `async with`; entering raises Refused for what cannot be."""

    def __init__(self, names: Sequence[str], *, corpus: str = "", python_deadline_s: float = 10.0, weak: bool = False) -> None:
        unknown = [name for name in names if name not in SHIPPED]
        if unknown:
            raise Refused(f"--tools {','.join(unknown)}: there is no such tool. Tools: {', '.join(SHIPPED)}.")
        self.specs = [SHIPPED[name].spec for name in names]
        self._names, self._corpus, self._python_deadline_s, self._weak = names, corpus, python_deadline_s, weak
        self._calls: dict[str, Callable[..., Awaitable[str]]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if "calculator" in self._names:
            self._calls["calculator"] = _calculator
        if "search" in self._names:
            passages = Passages(read_passages(self._corpus))

            async def search(query: str) -> str:
                return "\n\n".join(passages.best(query)) or "nothing found"

            self._calls["search"] = search
        if "python" in self._names:
            sandbox = await self._stack.enter_async_context(Sandbox(deadline_s=self._python_deadline_s, weak=self._weak))

            async def python(code: str) -> str:
                ran = await sandbox.run(code, echo=True)
                why = "" if ran.cause in ("ok", "raised") else f"\nended: {ran.cause}"
                return f"{ran.stdout}{ran.stderr}{why}".strip() or "(no output)"

            self._calls["python"] = python
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The answer to a call whose name and arguments fit `specs`."""
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        answer = as_text(await self._calls[name](**texts))
        return answer if len(answer) <= ANSWER_CHARS else f"{answer[:ANSWER_CHARS]}... ({len(answer)} characters)"


def as_text(said: str) -> str:
    """Without halves of surrogate pairs, which JSON can say and no text can hold: they are spelled."""
    return said.encode("utf-8", "backslashreplace").decode()


# -- calculator ---------------------------------------------------------------------------------------------------------

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": round, "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd, "factorial": math.factorial,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


async def _calculator(expression: str) -> str:
    return calculate(expression)


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, or what is wrong with it. Nothing is executed: the expression is parsed and only
    numbers, operators, brackets and a few functions are known."""
    if len(expression) > MAX_EXPRESSION:
        return f"error: the expression is longer than {MAX_EXPRESSION} characters"
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            value = int(value)
        return str(value)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        return f"error: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _small(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and isinstance(a, int) and isinstance(b, int) and a.bit_length() * abs(b) > MAX_BITS:
                raise OverflowError("the number is too large")
            return _small(_BINARY[type(op)](a, b))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [_value(arg) for arg in args]
            if name == "factorial" and values and values[0] > 300:
                raise OverflowError("the number is too large")
            return _small(_FUNCTIONS[name](*values))
    raise ValueError(f"cannot calculate {ast.unparse(node)[:40]!r}")


def _small(value: Any) -> Any:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError("the number is too large")
    return value


# -- search -------------------------------------------------------------------------------------------------------------


def read_passages(path: str) -> list[str]:
    """JSONL with a column `text`, or any text file, cut at blank lines. Refused when there is nothing to read."""
    try:
        content = Path(path).read_text(encoding="utf-8")
        if path.endswith(".jsonl"):
            found = [str(json.loads(line)["text"]) for line in content.splitlines() if line.strip()]
        else:
            found = [part.strip() for part in re.split(r"\n\s*\n", content) if part.strip()]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"--tool-corpus {path!r} cannot be read: {type(error).__name__}: {error}. Give a text file, or JSONL with a column "
            "'text'."
        ) from error
    if not found:
        raise Refused(f"--tool-corpus {path!r} holds no passage.")
    return found


class Passages:
    """Passages ranked by Okapi BM25 (Robertson and Zaragoza 2009, k1 = 1.5, b = 0.75)."""

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = passages
        counted = [Counter(_words(passage)) for passage in passages]
        self._mean = sum(map(Counter.total, counted)) / len(counted) or 1.0
        self._lengths = [words.total() for words in counted]
        self._holding: dict[str, list[tuple[int, int]]] = {}  # word -> (passage, how often)
        for index, words in enumerate(counted):
            for word, n in words.items():
                self._holding.setdefault(word, []).append((index, n))

    def best(self, query: str, most: int = 3) -> list[str]:
        """The passages that fit best, best first; equal ones in their order."""
        scores: Counter[int] = Counter()
        for word in set(_words(query)):
            holding = self._holding.get(word, [])
            weight = math.log(1 + (len(self._passages) - len(holding) + 0.5) / (len(holding) + 0.5))
            for index, n in holding:
                scores[index] += weight * n * 2.5 / (n + 1.5 * (0.25 + 0.75 * self._lengths[index] / self._mean))  # type: ignore[assignment]
        ranked = sorted(scores, key=lambda index: (-scores[index], index))
        return [self._passages[index] for index in ranked[:most]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
