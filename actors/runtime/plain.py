"""Values between a program and its examiner: plain data by value, everything else by a number that only its owner can open.

What is decoded is of exactly the types written here, whatever the other side sent: no object of the other side's comes along, so
none that compares equal to everything. Standard library only (numpy where it is installed, and already in use).
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

MOST_DEPTH = 200
MOST_ITEMS = 100_000  # of an iterator that is handed over
Word = Any  # what JSON has
_DATES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}


class Unsendable(TypeError):
    """A value that cannot be handed to the other side."""


def encode(value: Any, other: Callable[[Any], Word], depth: int = 0) -> Word:
    """`other`: the word for what is not plain data. Of subclasses the plain part is sent."""
    if depth > MOST_DEPTH:
        raise Unsendable(f"a value is nested more than {MOST_DEPTH} deep")

    def many(values: Any) -> list[Word]:
        return [encode(one, other, depth + 1) for one in values]

    if value is None or value is True or value is False:
        return value
    match value:
        case int():
            number = int.__int__(value)
            return number if -(1 << 53) < number < 1 << 53 else ["int", hex(number)]
        case float():
            return ["float", float.hex(float.__float__(value))]
        case str():
            return str.__str__(value)
        case bytes() | bytearray():
            return ["bytearray" if isinstance(value, bytearray) else "bytes", bytes(value).hex()]
        case list():
            return ["list", many(value)]
        case tuple():
            fields = getattr(type(value), "_fields", None)
            if fields:
                return ["named", type(value).__name__, list(fields), many(value)]
            return ["tuple", many(value)]
        case set():
            return ["set", many(value)]
        case frozenset():
            return ["frozenset", many(value)]
        case dict():
            return ["dict", many(value.keys()), many(value.values())]
        case complex():
            return ["complex", float.hex(value.real), float.hex(value.imag)]
        case collections.deque():
            return ["deque", many(value)]
        case range():
            return ["range", *(["int", hex(one)] for one in (value.start, value.stop, value.step))]
        case fractions.Fraction():
            return ["fraction", hex(value.numerator), hex(value.denominator)]
        case decimal.Decimal():
            return ["decimal", str(value)]
        case datetime.datetime() | datetime.date() | datetime.time():
            return ["date", type(value).__name__, value.isoformat()]
        case datetime.timedelta():
            return ["timedelta", value.days, value.seconds, value.microseconds]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufcSU":
        return encode(value.item(), other, depth)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcSU":
        return ["array", value.dtype.str, encode(value.tolist(), other, depth)]
    return other(value)


def handed(value: Any, other: Callable[[Any], Word], theirs: type) -> Word:
    """As `encode`, for arguments: an iterator is read to its end and handed over as one, but those of class `theirs`."""

    def iterator(one: Any) -> Word:
        if isinstance(one, Iterator) and not isinstance(one, theirs):
            items = list(itertools.islice(one, MOST_ITEMS + 1))
            if len(items) > MOST_ITEMS:
                raise Unsendable(f"an iterator gives more than {MOST_ITEMS:,} values")
            return ["iterator", [encode(item, iterator) for item in items]]
        return other(one)

    return encode(value, iterator)


def decode(word: Word, other: Callable[[str, list[Word]], Any], depth: int = 0) -> Any:
    """The value of a word. `other`: of a kind that is no plain data, which raises ValueError for what it does not know. Raises
    ValueError, TypeError, KeyError, IndexError for what is no word."""
    if depth > 2 * MOST_DEPTH:
        raise ValueError("too deep")
    if not isinstance(word, list):
        if word is None or isinstance(word, bool | int | str):
            return word
        raise ValueError("no word")
    kind, *rest = word

    def many(words: Word) -> list[Any]:
        return [decode(one, other, depth + 1) for one in words]

    match kind:
        case "int":
            return int(rest[0], 16)
        case "float":
            return float.fromhex(rest[0])
        case "complex":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        case "bytes":
            return bytes.fromhex(rest[0])
        case "bytearray":
            return bytearray.fromhex(rest[0])
        case "list":
            return many(rest[0])
        case "tuple":
            return tuple(many(rest[0]))
        case "named":
            return collections.namedtuple(str(rest[0]), [str(field) for field in rest[1]])(*many(rest[2]))
        case "set":
            return set(many(rest[0]))
        case "frozenset":
            return frozenset(many(rest[0]))
        case "dict":
            return dict(zip(many(rest[0]), many(rest[1]), strict=True))
        case "deque":
            return collections.deque(many(rest[0]))
        case "iterator":
            return iter(many(rest[0]))
        case "range":
            return range(*(int(one[1], 16) for one in rest))
        case "fraction":
            return fractions.Fraction(int(rest[0], 16), int(rest[1], 16))
        case "decimal":
            return decimal.Decimal(rest[0])
        case "date":
            return _DATES[rest[0]].fromisoformat(rest[1])
        case "timedelta":
            return datetime.timedelta(int(rest[0]), int(rest[1]), int(rest[2]))
        case "array":
            import numpy

            if str(rest[0])[1:2] not in "biufcSU":
                raise ValueError("no array of plain values")
            return numpy.array(decode(rest[1], other, depth), dtype=str(rest[0]))
    return other(kind, rest)
