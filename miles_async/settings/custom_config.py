"""The file of --custom-config-path: a table of the user's own values, for functions written for Miles."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from miles_async.settings.errors import SettingsError, parsed

REMEDY = "Give a TOML, JSON or YAML file with one table, or leave it out."


def custom_config(path: str | None) -> dict[str, Any]:
    """Its values by name, none without a file. SettingsError says what is wrong with it."""
    if path is None:
        return {}
    try:
        found = read_document(Path(path))
        msgspec.msgpack.encode(found)
    except ImportError:
        raise SettingsError("YAML needs the package pyyaml", field="custom_config_path", value=path, remedy=REMEDY) from None
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SettingsError(f"cannot be read: {error}", field="custom_config_path", value=path, remedy=REMEDY) from error
    if not isinstance(found, dict):
        raise SettingsError("it holds no table", field="custom_config_path", value=path, remedy=REMEDY)
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def read_document(path: Path) -> Any:
    """What a file of TOML (.toml), JSON (.json) or YAML holds. OSError, or ValueError; ImportError where YAML cannot be read."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return parsed(tomllib.loads, text)
    if path.suffix == ".json":
        return parsed(json.loads, text)
    import yaml

    try:
        return parsed(yaml.safe_load, text)
    except (yaml.YAMLError, LookupError, AttributeError) as error:  # the latter for a tag whose value is not of its kind
        raise ValueError(str(error)) from error
