"""Held-out data sets of a run, from --eval-prompt-data or the file --eval-config. Of a set holds what its own table says, else the
file's defaults, else the --eval-* settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from actors.evaluator.schedule import Issued, is_under_way
from bus import Bus
from miles_async.settings.custom_config import read_document
from miles_async.settings.errors import SettingsError, nearest
from miles_async.settings.hub_names import names_data
from miles_async.settings.run import RunSettings


class SetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data set. Names are those of the file, which are Miles'."""

    name: str
    path: str
    input_key: str
    label_key: str | None
    tool_key: str | None
    metadata_key: str | None
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    rm_type: str | None = None
    reward_key: str | None = None
    metadata_overrides: dict[str, Any] = {}

    @property
    def metadata(self) -> dict[str, Any]:
        """What is laid over the metadata of each prompt."""
        own = {name: value for name in ("rm_type", "reward_key") if (value := getattr(self, name)) is not None}
        return self.metadata_overrides | own


def eval_sets(settings: RunSettings) -> list[SetSpec]:
    """All held-out data sets. SettingsError when the file says what cannot be."""
    r, e = settings.rollout, settings.eval
    base = {
        "input_key": e.eval_input_key,
        "label_key": e.eval_label_key,
        "tool_key": e.eval_tool_key,
        "metadata_key": r.metadata_key,
        "n_samples_per_eval_prompt": e.n_samples_per_eval_prompt,
        "temperature": e.eval_temperature,
        "top_p": e.eval_top_p,
        "top_k": e.eval_top_k,
        "max_response_len": e.eval_max_response_len,
    }
    if e.eval_config is None:
        return [msgspec.convert(base | {"name": name, "path": path}, SetSpec) for name, path in settings.flat.datasets]
    defaults, tables = _read(e.eval_config)
    found = [_here(_one(base | defaults | table, e.eval_config), settings) for table in tables]
    names = [one.name for one in found]
    if not found or len(set(names)) < len(names):
        why = "two data sets have one name" if found else "it names no data set"
        raise settings.flat.refusal("eval_config", why, "Give each its own name under eval.datasets.")
    return found


def _here(one: SetSpec, settings: RunSettings) -> SetSpec:
    """With the path in the Hub's cache in place of a name of the Hub, once it was fetched (`with_models`)."""
    if not names_data(one.path):
        return one
    from miles_async.launcher.began_file import read_began
    from miles_async.launcher.hub import data_paths

    began = read_began(settings.run_dir)
    path = data_paths(one.path, "eval_config", began.revisions if began else {}, fetch=False)
    return msgspec.structs.replace(one, path=path)


async def is_evaluating(bus: Bus) -> bool:
    """Whether samples of an evaluation are still under way."""
    return await is_under_way(bus, await bus.state_as("eval", Issued.parse))


def _one(given: dict[str, Any], file: str) -> SetSpec:
    known = [field.name for field in msgspec.structs.fields(SetSpec)]
    where = f"data set {given.get('name', '?')}"
    for name in given:
        if name not in known:
            hint = nearest(name, known) or f"Known are {', '.join(known)}."
            raise SettingsError(f"{where} has no {name} here", field="eval_config", value=file, remedy=hint)
    try:
        return msgspec.convert(given, SetSpec)
    except msgspec.ValidationError as error:
        remedy = "Each of eval.datasets has name and path; what else it may have is in docs/data.md."
        raise SettingsError(f"{where}: {error}", field="eval_config", value=file, remedy=remedy) from None


def _read(file: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Defaults and tables of a file {eval: {defaults, datasets: []}}, TOML or YAML."""
    try:
        found = read_document(Path(file))
    except FileNotFoundError:
        why = f"no such file (looked in {Path.cwd()})"
        raise SettingsError(why, field="eval_config", value=file, remedy="Give a TOML or YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"
        raise SettingsError(why, field="eval_config", value=file, remedy="Give a TOML or YAML file.") from None
    except (ImportError, ValueError, TypeError, OverflowError, RecursionError) as error:
        why = f"neither TOML (.toml) nor YAML: {error}"
        raise SettingsError(why, field="eval_config", value=file, remedy="Correct it.") from None
    table = found.get("eval", found) if isinstance(found, Mapping) else None
    defaults = table.get("defaults") or {} if isinstance(table, Mapping) else None
    tables = table.get("datasets") or [] if isinstance(table, Mapping) else None
    if not isinstance(defaults, dict) or not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        problem = "it must hold eval.datasets, a list of tables, and may hold eval.defaults"
        raise SettingsError(problem, field="eval_config", value=file)
    return defaults, tables
