"""The second look at an answer about which the math rule has no verdict: math-verify (`pip install 'miles-async[math]'`).

`verify` runs in a verifier process only (pool.py), which is killed at its deadline. Nothing received is executed: only the LaTeX
grammar reads the answers, and sympy's own `eval`, which it uses to make numbers out of digits, is replaced here by one that takes
nothing but digits. Memory is bounded by the process's limits, since a tower of powers is quickly written.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import Any

HOOK = f"{__name__}.verify"
_DIGITS = re.compile(r"\s*(-?)\s*(?:Integer|Float)\s*\(\s*'?(\d+\.?\d*(?:[eE][+-]?\d{1,3})?|\.\d+)'?\s*\)\s*")


def installed() -> bool:
    """Whether there is a second look."""
    return importlib.util.find_spec("math_verify") is not None


def number_only(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
    """In place of `sympy.parsing.sympy_parser.eval_expr`: a number written out, ValueError for any other code."""
    from sympy import Float, Integer

    if (found := _DIGITS.fullmatch(code)) is None:
        raise ValueError(f"not a number: {code[:40]!r}")
    sign, digits = found.groups()
    value = Integer(int(digits)) if digits.isdecimal() else Float(digits)
    return -value if sign else value


def load() -> Any:
    """The comparing function of two LaTeX answers (given, wanted) -> bool. For this process alone."""
    import sympy.parsing.sympy_parser
    from math_verify import parse
    from math_verify import verify as equal
    from math_verify.parser import LatexExtractionConfig

    sympy.parsing.sympy_parser.eval_expr = number_only
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def compare(given: str, wanted: str) -> bool:
        # Its own alarms would not end a C call; the pool's deadline ends the process.
        options: dict[str, Any] = {"fallback_mode": "no_fallback", "parsing_timeout": None}
        gold, answer = (parse(f"\\boxed{{{text}}}", latex, **options) for text in (wanted, given))
        return bool(gold) and bool(answer) and bool(equal(gold, answer, timeout_seconds=None))

    return compare


def __getattr__(name: str) -> Any:
    """`verify(sample)`: 1 when `response`, an answer, equals `label`, the reference. Made when a process asks for it, which is
    before it says that it is ready: sympy's import and its first answer take seconds of a busy host, and no answer's time."""
    if name != "verify":
        raise AttributeError(name)
    compare = load()
    compare("1", "1")

    def verify(sample: dict[str, Any]) -> float:
        return float(compare(sample["response"], sample["label"]))

    return verify
