"""Settings file and flags -> RunSettings. Precedence: flag over file over default; then derivations; then rules.

`load` is what the command line calls, `settings_from` what programs call. Both raise SettingsError, one line.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from miles_async.settings.catalog import NO_DEFAULT, FieldSpec, catalog, groups, names
from miles_async.settings.derive import fill
from miles_async.settings.errors import SettingsError, nearest
from miles_async.settings.rules import check_rules, notes
from miles_async.settings.run import RunSettings
from miles_async.settings.secrets import take_password

Origin = Literal["default", "file", "flag", "derived"]
UNSET_WORD = "none"


@dataclass(frozen=True, slots=True)
class FlagValue:
    """One flag as typed: the field, its words on the command line, and the flag itself for messages. The field of a flag
    that is passed on is its table."""

    spec: FieldSpec
    words: tuple[str, ...]
    typed: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Resolved settings, and for every field name where its value came from."""

    settings: RunSettings
    origins: Mapping[str, Origin]
    config: Path | None
    notes: tuple[str, ...]


def load(config: Path | None, flags: Sequence[FlagValue] = ()) -> Loaded:
    """Read `config` (TOML, may be None), lay the flags over it, resolve and check."""
    from_file = read_file(config) if config is not None else {}
    from_flags: dict[str, Any] = {}
    for flag in flags:
        value = value_of_words(flag)
        if flag.spec.kind == "table":  # flags add to the table of the file, name by name
            value = {**from_flags.get(flag.spec.name, from_file.get(flag.spec.name, {})), **value}
        from_flags[flag.spec.name] = value
    origins: dict[str, Origin] = dict.fromkeys(from_file, "file")
    origins.update(dict.fromkeys(from_flags, "flag"))
    return _resolve({**from_file, **from_flags}, origins, config)


def settings_from(**fields: Any) -> RunSettings:
    """RunSettings from keywords: `settings_from(hf_checkpoint=..., prompt_data=..., num_rollout=3, rm_type=...)`."""
    given: dict[str, Any] = {}
    for name, value in fields.items():
        spec = _find(name, "settings_from")
        given[spec.name] = coerce(spec, value, spec.name)
    return _resolve(given, {}, None).settings


def _resolve(given: dict[str, Any], origins: dict[str, Origin], config: Path | None) -> Loaded:
    for spec in catalog().values():
        if spec.required and spec.name not in given:
            raise SettingsError(
                f"required: {spec.text.partition('.')[0]}",
                field=spec.name,
                remedy=f"Set {spec.flag} or {spec.name} in [{spec.group}].",
            )
    defaults = {name: spec.default for name, spec in catalog().items() if spec.default is not NO_DEFAULT}
    values = fill(given, defaults, run_name=config.stem if config is not None else "run")
    if values.get("bus_url"):
        values["bus_url"] = take_password(values["bus_url"])
    full: dict[str, Origin] = {
        name: origins.get(name, "file" if name in given else "default" if name in defaults else "derived")
        for name in catalog()
    }
    tables = {
        group: {spec.name: coerce(spec, values[spec.name], spec.name) for spec in specs}
        for group, specs in groups().items()
    }
    settings = msgspec.convert(tables, RunSettings)
    check_rules(settings)
    return Loaded(settings, full, config, tuple(notes(settings)))


def read_file(path: Path) -> dict[str, Any]:
    """Field name -> value of a TOML settings file; types and bounds checked, names checked against their tables."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"no such settings file: {path} (looked in {Path.cwd()})", remedy="Check the path."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text", remedy="Give a TOML settings file.") from None
    except OSError as error:
        raise SettingsError(f"cannot read settings file {path}: {error.strerror}") from None

    given: dict[str, Any] = {}
    typed_as: dict[str, str] = {}
    for table, content in document.items():
        if table not in groups():
            raise _unknown_table(table, content, path)
        if not isinstance(content, dict):
            raise SettingsError(f"{path}: {table} must be a table", remedy=f"Write [{table}].")
        for name, value in content.items():
            where = f"{path} [{table}]"
            spec = _find(name, where)
            if spec.group != table:
                raise SettingsError(f"{where} {name} is in the wrong table", remedy=f"Move it to [{spec.group}].")
            if spec.name in given:
                raise SettingsError(f"{where} {name} and {typed_as[spec.name]} are one setting", remedy="Keep one.")
            given[spec.name] = coerce(spec, value, f"{where} {name}")
            typed_as[spec.name] = name
    return given


def _unknown_table(table: str, content: object, path: Path) -> SettingsError:
    if table in names():
        return SettingsError(
            f"{path}: {table} stands outside its table", remedy=f"Move it to [{names()[table].group}]."
        )
    what = f"[{table}]" if isinstance(content, dict) else table
    hint = nearest(table, groups()) or f"Tables are {', '.join(groups())}."
    return SettingsError(f"{path}: {what} is not a settings table", remedy=hint)


def _find(name: str, where: str) -> FieldSpec:
    spec = names().get(name) or names().get(name.replace("-", "_"))
    if spec is None:
        raise SettingsError(f"{where} {name} is not a setting", remedy=nearest(name.replace("-", "_"), names()))
    return spec


def coerce(spec: FieldSpec, value: object, where: str, *, text: bool = False) -> Any:
    """`value` as the field's type. With `text`, strings are read as numbers and booleans, as flags need it."""
    if spec.auto is not None and value == "auto":
        return spec.auto
    try:
        result = msgspec.convert(value, spec.type, strict=not text)
    except msgspec.ValidationError:
        hint = nearest(value, spec.shape.choices) if spec.kind == "choice" and isinstance(value, str) else ""
        raise SettingsError(f"must be {spec.expected}", field=where, value=value, remedy=hint) from None
    if spec.kind == "table":
        return {name.replace("_", "-"): item for name, item in result.items()}
    if isinstance(result, float) and not math.isfinite(result):
        raise SettingsError("must be a finite number", field=where, value=value)
    if result == "":
        raise SettingsError("must not be empty", field=where, value=value, remedy="Leave it out instead.")
    return result


def value_of_words(flag: FlagValue) -> Any:
    """The value of a flag. `none` unsets an optional field."""
    spec, words = flag.spec, flag.words
    if spec.kind == "table":
        name = flag.typed.removeprefix(spec.prefix)
        return {name: _passed_on(words)}
    if spec.kind == "list":
        return coerce(spec, words, flag.typed, text=True)
    if spec.optional and words[0].lower() == UNSET_WORD:
        return None
    # A string field must not turn "null" into nothing, so only numbers and booleans are read from text.
    return coerce(spec, words[0], flag.typed, text=spec.kind in ("bool", "int", "float"))


def _passed_on(words: tuple[str, ...]) -> bool | str | tuple[str, ...]:
    """No word is the bare flag; the program that gets it reads its numbers itself."""
    if len(words) > 1:
        return words
    return {"true": True, "false": False}.get(words[0], words[0]) if words else True
