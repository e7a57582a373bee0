"""Every settings field with its name, table, type, default and documentation, read off the group structs.

The one source for flags, help text, `--dry-run`, unknown-name suggestions and the list of live fields.
Field names are unique over all groups, because each is also a flag and a name on the knob stream.
"""

import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from miles_async.settings import megatron_fields
from miles_async.settings.doc import Facts
from miles_async.settings.run import RunSettings

Kind = Literal["bool", "int", "float", "str", "choice", "list", "table"]
NO_DEFAULT = msgspec.NODEFAULT

_KINDS: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "str"}
_HINTS = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false"}
_PLURALS = {"int": "whole numbers", "str": "strings"}


# Tables that hold another program's flags -> what these begin with on our command line, and on that of Miles.
PREFIXES = {"router_args": ("--router-", "--sglang-router-"), "server_args": ("--sglang-",)}


def passed_on(flag: str) -> tuple[str, str] | None:
    """(table, name there) of a flag that goes to another program."""
    for table, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if flag.startswith(prefix) and len(flag) > len(prefix):
                return table, flag.removeprefix(prefix)
    if (field := megatron_fields.named(flag)) is not None:
        return "megatron", field[0]
    return None


@dataclass(frozen=True, kw_only=True)
class FieldSpec(Facts):
    """One settings field. `type` is its annotation with bounds, as msgspec converts to it; `text` its meaning; `item` the kind of a
    list's items; `optional`: it may be unset."""

    name: str
    group: str
    type: Any
    default: Any
    text: str
    kind: Kind
    item: Kind
    optional: bool
    choices: tuple[str, ...] = ()
    limits: msgspec.Meta
    """Where its bounds stand."""

    @property
    def flag(self) -> str:
        return f"{self.prefix}NAME" if self.kind == "table" else "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str | None:
        """`--no-use-tis` for `--use-tis`; None for other kinds and for names that are negations already."""
        return "--no-" + self.flag[2:] if self.kind == "bool" and not self.name.startswith("no_") else None

    @property
    def prefix(self) -> str:
        """Of a table: what its flags begin with, `--sglang-` for server_args."""
        return PREFIXES.get(self.name, ("--",))[0]

    @property
    def bounds(self) -> tuple[tuple[str, str, float], ...]:
        """(sign, msgspec's word for it, bound) of each bound of a number."""
        found = ((sign, word, getattr(self.limits, word)) for sign, word in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")))
        return tuple((sign, word, float(bound)) for sign, word, bound in found if bound is not None)

    @property
    def required(self) -> bool:
        return self.default is NO_DEFAULT and not self.derived

    @property
    def expected(self) -> str:
        """What a value must look like, for error messages."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "table":
            return "a table of names and values (text, numbers, true, false or a list of texts)"
        if self.kind == "list":
            return f"a list of {', '.join(self.choices) or _PLURALS[self.item]}"
        if self.shipped:
            return f"one of {', '.join(self.shipped)}, or {'my.module:RECORD' if self.record else 'package.module.function'}"
        bounds = " and ".join(f"{sign} {bound:g}" for sign, _, bound in self.bounds)
        if self.auto is not None:
            return f"auto or {_HINTS[self.kind]} > {self.auto}"
        return f"{_HINTS[self.kind]} {bounds}".rstrip()


def _read(annotation: Any, meta: msgspec.Meta) -> dict[str, Any]:
    """What a field's type says, and its documentation."""
    optional = False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        arms = [arm for arm in typing.get_args(annotation) if arm is not type(None)]
        if len(arms) != 1:
            raise TypeError(f"settings fields have one type, got {annotation}")
        annotation, optional = arms[0], True
    if typing.get_origin(annotation) is Annotated:
        annotation, meta = typing.get_args(annotation)
    found = {"optional": optional, "limits": meta}
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return found | {"kind": "choice", "item": "str", "choices": typing.get_args(annotation)}
    if origin is tuple:
        item = typing.get_args(annotation)[0]
        return found | {"kind": "list", "item": "int" if item is int else "str", "choices": typing.get_args(item)}
    if origin is dict:
        return found | {"kind": "table", "item": "str"}
    return found | {"kind": _KINDS[annotation], "item": _KINDS[annotation]}


@cache
def catalog() -> dict[str, FieldSpec]:
    """Field name -> spec, in the order of the groups and of the fields in them."""
    specs: dict[str, FieldSpec] = {}
    for table in msgspec.structs.fields(RunSettings):
        for field in msgspec.structs.fields(table.type):
            bare, meta = typing.get_args(field.type)
            default = field.default if field.default_factory is NO_DEFAULT else field.default_factory()
            if field.name in specs:
                raise TypeError(f"field {field.name} stands in [{specs[field.name].group}] and [{table.name}]")
            told = {"name": field.name, "group": table.name, "type": field.type, "default": default, "text": meta.description}
            specs[field.name] = FieldSpec(**told, **_read(bare, meta), **meta.extra)
    return specs


@cache
def groups() -> dict[str, tuple[FieldSpec, ...]]:
    """TOML table name -> its fields."""
    tables: dict[str, list[FieldSpec]] = {}
    for spec in catalog().values():
        tables.setdefault(spec.group, []).append(spec)
    return {name: tuple(specs) for name, specs in tables.items()}


@cache
def names() -> dict[str, FieldSpec]:
    """Every accepted field name, aliases included -> spec."""
    found = dict(catalog())
    for spec in catalog().values():
        for alias in spec.aliases:
            found[alias] = spec
    return found


@cache
def live_fields() -> tuple[str, ...]:
    """Names of the fields that may be changed while the run goes on."""
    return tuple(spec.name for spec in catalog().values() if spec.live)


def kinds() -> dict[str, dict[str, Any]]:
    """Live field -> what its value must be, as the knob stream says it to actors (`bus.messages.control.Kind`)."""
    found: dict[str, dict[str, Any]] = {}
    for name in live_fields():
        spec = catalog()[name]
        kind = {"type": "str" if spec.kind == "choice" else spec.kind, "optional": spec.optional}
        found[name] = kind | {"choices": spec.choices} | {word: bound for _, word, bound in spec.bounds}
    return found


def shown_value(value: object, spec: FieldSpec | None = None) -> str:
    """A value as the user would write it."""
    if spec is not None and spec.auto is not None and value == spec.auto:
        return "auto"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
