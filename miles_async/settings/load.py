"""Settings file and flags -> RunSettings. Precedence: flag over file over default; then derivations; then rules.

`load` is what the command line calls, `settings_from` what programs call. Both raise SettingsError, one line.
"""

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from miles_async.settings import megatron_fields
from miles_async.settings.addresses import take_password
from miles_async.settings.catalog import NO_DEFAULT, FieldSpec, catalog, groups, names, passed_on
from miles_async.settings.derive import fill
from miles_async.settings.errors import Refusals, SettingsError, nearest, parsed
from miles_async.settings.functions import HOOK, RECORD
from miles_async.settings.miles import as_ours
from miles_async.settings.rules import check_rules, notes
from miles_async.settings.run import RunSettings
from miles_async.settings.run_names import fresh_name
from miles_async.settings.theirs import in_our_words

Origin = Literal["default", "file", "flag", "derived"]
UNSET_WORD = "none"
LARGEST = 1 << 62
SMALLEST, GREATEST = 1.2e-38, 3.4e38  # of single precision
SHIPPED = Path(__file__).parents[1] / "configs"
"""Settings files that come with the package, and their data; in a checkout a link to the folder at its top."""
NUMBER = re.compile(r"([+-]?)(\d*)(\.?\d*)((?:[eE][+-]?\d+)?)")
"""A number as a shell script may write it: .5, 5., +5, 1e-6."""


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


def load(
    config: Path | None,
    flags: Sequence[FlagValue] = (),
    found: Refusals | None = None,
    *,
    values: Mapping[str, Any] | None = None,
) -> Loaded:
    """Read `config` (TOML, may be None), lay the flags over it, or `values` (a program's, by name), resolve and check.

    SettingsError with all that is wrong. With `found` it is raised only for what cannot be read; broken rules are left in
    there, for who goes on to look for more.
    """
    refused = Refusals()
    from_file = refused.attempt(read_file, config) if config is not None else {}
    from_flags: dict[str, Any] = {}
    for name, value in (values or {}).items():
        for spec, typed in refused.attempt(_of_program, name, value) or ():
            from_flags[spec.name] = {**(from_file or {}).get(spec.name, {}), **typed} if spec.kind == "table" else typed
    for flag in flags:
        for value in refused.attempt(lambda flag: [value_of_words(flag)], flag) or ():
            if flag.spec.kind == "table":  # flags add to the table of the file, name by name
                value = {**from_flags.get(flag.spec.name, (from_file or {}).get(flag.spec.name, {})), **value}
            from_flags[flag.spec.name] = value
    refused.raise_all()
    given = {**(from_file or {}), **from_flags}
    origins: dict[str, Origin] = dict.fromkeys(from_file or {}, "file")
    origins.update(dict.fromkeys(from_flags, "flag"))
    return _resolve(given, origins, config, found)


def settings_from(**fields: Any) -> RunSettings:
    """RunSettings from keywords: `settings_from(hf_checkpoint=..., prompt_data=..., num_rollout=3, rm_type=...)`."""
    return load(None, values=fields).settings


def _of_program(name: str, value: object) -> list[tuple[FieldSpec, Any]]:
    """A setting by name with its value, or a whole table of them."""
    if not isinstance(name, str):
        raise SettingsError(f"settings: {name!r} is not a setting", remedy="Names of settings are texts.")
    if isinstance(value, Mapping) and name in groups():
        return [pair for inner, one in value.items() for pair in _of_program(inner, one)]
    spec = find(name, "settings:")
    if callable(value):
        remedy = "Other processes call it: save it in a file, and write FILE.py:NAME."
        raise SettingsError(f"must be {spec.expected}", field=spec.name, value=value, remedy=remedy)
    return [(spec, coerce(spec, plain(value), spec.name))]


def plain(value: Any) -> Any:
    """A value that a program has, as a file would hold it: paths as texts, numbers and arrays of numpy or torch as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | range | set | frozenset):
        return tuple(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def _resolve(given: dict[str, Any], origins: dict[str, Origin], config: Path | None, found: Refusals | None) -> Loaded:
    refused = Refusals()
    given, said = in_our_words(given)
    for spec in catalog().values():
        if spec.required and spec.name not in given:
            refused.found.append(
                SettingsError(
                    f"required: {spec.text.partition('. ')[0].rstrip('.')}",
                    field=spec.name,
                    remedy=f"Set {spec.flag} or {spec.name} in [{spec.group}].",
                )
            )
    refused.raise_all()
    defaults = {name: spec.default for name, spec in catalog().items() if spec.default is not NO_DEFAULT}
    named = config is not None and config.is_file()  # a pipe has no name of its own
    runs_dir = str(given.get("runs_dir", defaults["runs_dir"]))
    run_name = config.stem if config is not None and named else fresh_name(given["hf_checkpoint"], runs_dir)
    values = fill(given, defaults, run_name=run_name, gpu=has_gpu())
    if values.get("bus_url"):
        values["bus_url"] = take_password(values["bus_url"])
    full: dict[str, Origin] = {
        name: (origins.get(name, "file") if name in given else "default" if name in defaults else "derived") for name in catalog()
    }
    tables = {group: {spec.name: coerce(spec, values[spec.name], spec.name) for spec in specs} for group, specs in groups().items()}
    settings = msgspec.convert(tables, RunSettings)
    refused = Refusals() if found is None else found
    check_rules(settings.flat, refused)
    if found is None:
        refused.raise_all()
    hints = said + ([] if refused.found else list(notes(settings.flat)))
    if settings.model.model_dtype == "float32" and settings.model.builtin_name is None and has_gpu():
        hints.append("model_dtype = float32 on a GPU takes twice the memory of bfloat16 and trains at a fraction of its speed")
    elif full["model_dtype"] == "derived" and settings.model.model_dtype == "bfloat16":
        hints.append("model_dtype is bfloat16, since this host has a GPU; --model-dtype float32 asks for the other")
    return Loaded(settings, full, config, tuple(hints))


def has_gpu() -> bool:
    """Whether a process started here finds a CUDA device; told without loading torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def shipped() -> list[str]:
    """Names of the settings files that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def config_path(word: str) -> Path:
    """The settings file that a word names: a path, or a shipped file by its name. What is neither is left to `read_file`."""
    path = Path(word)
    named = SHIPPED / f"{word}.toml"
    return named if not path.exists() and path.name == word and named.is_file() else path


def read_file(path: Path) -> dict[str, Any]:
    """Field name -> value of a TOML settings file; types and bounds checked, names checked against their tables."""
    try:
        document = parsed(tomllib.loads, path.read_text("utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"no such settings file: {path} (looked in {Path.cwd()})",
            remedy=nearest(path.name, shipped()) or f"Those that ship: {', '.join(shipped())}.",
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text", remedy="Give a TOML settings file.") from None
    except ValueError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(f"cannot read settings file {path}: {error.strerror}") from None

    refused = Refusals()
    given: dict[str, Any] = {}
    typed_as: dict[str, str] = {}
    ours = path.resolve().parent == SHIPPED.resolve()

    def take(table: str, name: str, value: object) -> None:
        where = f"{path} [{table}]"
        spec = find(name, where)
        if spec.group != table:
            raise SettingsError(f"{where} {name} is in the wrong table", remedy=f"Move it to [{spec.group}].")
        if spec.name in given:
            raise SettingsError(f"{where} {name} and {typed_as[spec.name]} are one setting", remedy="Keep one.")
        given[spec.name] = coerce(spec, _found(value) if ours else value, f"{where} {name}")
        typed_as[spec.name] = name

    for table, content in document.items():
        if table not in groups():
            refused.found.append(_unknown_table(table, content, path))
        elif not isinstance(content, dict):
            refused.found.append(SettingsError(f"{path}: {table} must be a table", remedy=f"Write [{table}]."))
        else:
            for name, value in content.items():
                refused.attempt(take, table, name, value)
    refused.raise_all()
    return given


def _found(value: object) -> object:
    """A value of a shipped file: data that ships too is found from any folder."""
    if isinstance(value, list):
        return [_found(item) for item in value]
    if not isinstance(value, str) or not value.startswith("configs/") or Path(value).exists():
        return value
    return str(SHIPPED / value.removeprefix("configs/"))


def _unknown_table(table: str, content: object, path: Path) -> SettingsError:
    if table in names():
        return SettingsError(f"{path}: {table} stands outside its table", remedy=f"Move it to [{names()[table].group}].")
    what = f"[{table}]" if isinstance(content, dict) else table
    hint = nearest(table, groups()) or f"Tables are {', '.join(groups())}."
    return SettingsError(f"{path}: {what} is not a settings table", remedy=hint)


def find(name: str, where: str) -> FieldSpec:
    """The field of that name or alias, dashes or not; SettingsError names the nearest one."""
    spec = names().get(name) or names().get(name.replace("-", "_"))
    if spec is None:
        table = passed_on("--" + name.replace("_", "-"))
        close = f"It belongs in the table {table[0]} of [{names()[table[0]].group}], as {table[1]}." if table else ""
        raise SettingsError(f"{where} {name} is not a setting", remedy=close or nearest(name.replace("-", "_"), names()))
    return spec


def coerce(spec: FieldSpec, value: object, where: str, *, text: bool = False) -> Any:
    """`value` as the field's type. With `text`, strings are read as numbers and booleans, as flags need it."""
    if spec.auto is not None and value == "auto":
        return spec.auto
    if spec.kind == "list" and isinstance(value, str):
        value = (value,)  # a list of one
    try:
        result = msgspec.convert(value, spec.type, strict=not text)
    except msgspec.ValidationError:
        hint = nearest(value, spec.choices) if spec.kind == "choice" and isinstance(value, str) else ""
        if spec.kind == "str" and isinstance(value, Mapping):
            hint = "Write a table as JSON in a text."
        raise SettingsError(f"must be {spec.expected}", field=where, value=value, remedy=hint) from None
    if not all(map(_is_plain, _texts(result))):
        raise SettingsError("must be UTF-8 text without NUL", field=where, value=value)
    if spec.kind == "table":
        return {name.replace("_", "-"): item for name, item in result.items()}
    if isinstance(result, float) and not math.isfinite(result):
        raise SettingsError("must be a finite number", field=where, value=value)
    if isinstance(result, float) and result != 0 and not SMALLEST <= abs(result) <= GREATEST:
        why = "no number of single precision, in which it would be computed"
        raise SettingsError(why, field=where, value=value, remedy=f"It must be {spec.expected}.")
    if isinstance(result, int) and abs(result) >= LARGEST:
        raise SettingsError("too large for a message", field=where, value=value, remedy=f"It must be {spec.expected}.")
    if isinstance(result, str):
        result = as_ours(spec.name, result)
    form = RECORD if spec.record else HOOK
    if spec.shipped and isinstance(result, str) and result not in spec.shipped and not form.fullmatch(result):
        close = nearest(result, spec.shipped) or f"It must be {spec.expected}."
        raise SettingsError("no such name", field=where, value=value, remedy=close)
    if result == "" or (spec.kind == "list" and "" in result):
        raise SettingsError("must not be empty", field=where, value=value, remedy="Leave it out instead.")
    return result


def _texts(value: object) -> Iterator[str]:
    """All texts of a value, in lists and tables too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


def _is_plain(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def value_of_words(flag: FlagValue) -> Any:
    """The value of a flag. `none` unsets an optional field."""
    spec, words = flag.spec, flag.words
    if spec.kind == "table":
        _, name = passed_on(flag.typed) or ("", flag.typed)
        return {name: _of_megatron(flag) if spec.name == "megatron" else _passed_on(words)}
    if spec.kind == "list":
        return coerce(spec, words, flag.typed, text=True)
    return value_of_text(spec, words[0], flag.typed)


def value_of_text(spec: FieldSpec, text: str, where: str) -> Any:
    """The value that a word of a command line means."""
    if spec.optional and text.strip().lower() == UNSET_WORD:
        return None
    # A string field must not turn "null" into nothing, so only numbers and booleans are read from text.
    number = spec.kind in ("bool", "int", "float")
    spelled = text.strip() if number else text
    if number and (found := NUMBER.fullmatch(spelled)) and (found[2] or found[3] not in ("", ".")):
        fraction = found[3] if len(found[3]) > 1 else ""
        spelled = f"{found[1].strip('+')}{found[2] or '0'}{fraction}{found[4]}"
    return coerce(spec, spelled, where, text=number)


def _of_megatron(flag: FlagValue) -> Any:
    """A field of megatron-core, as its table says what it is."""
    field, on = megatron_fields.named(flag.typed) or ("", True)
    if not on:
        return False
    try:
        return megatron_fields.typed(field, flag.words)
    except (ValueError, KeyError):
        kind = megatron_fields.WORDS[megatron_fields.FIELDS[field]]
        raise SettingsError(f"must be {kind}", field=flag.typed, value=" ".join(flag.words)) from None


def _passed_on(words: tuple[str, ...]) -> bool | str | tuple[str, ...]:
    """No word is the bare flag; the program that gets it reads its numbers itself."""
    if len(words) > 1:
        return words
    return {"true": True, "false": False}.get(words[0], words[0]) if words else True
