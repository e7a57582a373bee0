"""RunSettings -> TOML that loads back to the same settings. Optional fields that are unset stand in comments."""

import json
import re
from collections.abc import Mapping, Sequence

from miles_async.settings.catalog import groups
from miles_async.settings.load import Loaded, Origin
from miles_async.settings.run import RunSettings


def toml_value(value: object) -> str:
    """One TOML value: bool, int, float, string, list or table of these."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_key(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"no TOML form for {type(value).__name__}")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def dump_toml(settings: RunSettings, origins: Mapping[str, Origin] | None = None) -> str:
    """The ten tables; with `origins` each line says where its value came from."""
    lines: list[str] = []
    for group, specs in groups().items():
        lines.append(f"[{group}]")
        table = getattr(settings, group)
        rows = []
        for spec in specs:
            value = getattr(table, spec.name)
            if spec.auto is not None and value == spec.auto:
                value = "auto"
            row = f"# {spec.name} is unset" if value is None else f"{spec.name} = {toml_value(value)}"
            rows.append((row, origins[spec.name] if origins else ""))
        width = max((len(row) for row, _ in rows if len(row) <= 60), default=0)
        lines.extend(f"{row:<{width}}  # {origin}" if origin else row for row, origin in rows)
        lines.append("")
    return "\n".join(lines)


def dry_run_text(loaded: Loaded, notes: Sequence[str] = ()) -> str:
    """What `miles-async train --dry-run` prints."""
    source = f"settings file {loaded.config}" if loaded.config else "no settings file"
    head = [
        f"# Resolved settings of run {loaded.settings.launch.name!r} ({source}).",
        "# Origins: default, file, flag, derived.",
    ]
    head.extend(f"# Note: {note}." for note in (*loaded.notes, *notes))
    return "\n".join(head) + "\n\n" + dump_toml(loaded.settings, loaded.origins)
