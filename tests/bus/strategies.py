"""Hypothesis strategies for any message: built from the types of its fields, not from a list that could fall behind."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from bus.messages.base import Message
from bus.topology import STREAMS

INTS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text(max_size=20)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def message_types() -> list[type[Message]]:
    """Every type that a stream of the house carries."""
    found: dict[str, type[Message]] = {}
    for stream in STREAMS:
        for kind in get_args(stream.union) or (stream.union,):
            found[kind.__struct_config__.tag] = kind
    return [found[tag] for tag in sorted(found)]


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of one field type as msgspec sees it."""
    match kind:
        case mi.IntType():
            return INTS
        case mi.FloatType():
            return FLOATS
        case mi.StrType():
            return TEXT
        case mi.BoolType():
            return st.booleans()
        case mi.BytesType():
            return st.binary(max_size=40)
        case mi.MemoryViewType():
            return st.binary(max_size=40).map(memoryview)
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.VarTupleType():
            return st.lists(values_of(kind.item_type), max_size=3).map(tuple)
        case mi.TupleType():
            return st.tuples(*(values_of(item) for item in kind.item_types))
        case mi.DictType():
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
        case mi.UnionType():
            return st.one_of(*(values_of(item) for item in kind.types))
        case mi.NoneType():
            return st.none()
        case mi.AnyType():
            return PLAIN
        case mi.StructType():
            return instances_of(kind.cls)
    raise TypeError(f"no strategy for {kind}")


def instances_of(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Instances with every field drawn, defaults included."""
    info = mi.type_info(cls)
    assert isinstance(info, mi.StructType)
    fields = {field.name: values_of(field.type) for field in info.fields if field.name != "schema"}
    return st.fixed_dictionaries(fields).map(lambda drawn: cls(**drawn))
