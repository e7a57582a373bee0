"""Models and data sets by their names on the Hugging Face Hub become paths of this host, by huggingface_hub: its cache, its tokens,
its variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).

Reads  the Hub    Owns  links to a split of several files, beside the cache of fetched models. Always true: nothing that is fetched
is executed (weights as safetensors only, no code), and a run that goes on takes the revision that it began with.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from actors.runtime.rows import SUFFIXES, BadData, sources_of
from miles_async.quickstart.fetched import kept_in
from miles_async.settings.errors import SettingsError
from miles_async.settings.hub_names import HubName, data_name, model_name

T = TypeVar("T")
OF_A_MODEL = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
CARD = "README.md"
FIRST = ("default", "main")  # configurations that are meant where none is said


def model_path(text: str, field: str, kept: Mapping[str, str], *, fetch: bool) -> str:
    """The directory of a model that the Hub has; any other text as it is, and so is a name that is not in the cache without
    `fetch`. `kept`: revisions that the run began with. SettingsError where it cannot be had."""
    name = model_name(text)
    if name is None:
        return text
    revision = name.revision or kept.get(name.key, "")
    folder = _snapshot(name, revision, OF_A_MODEL, field, text, fetch=fetch)
    if folder is None:
        return text
    if fetch and not any(folder.glob("*.safetensors")):
        remedy = "Choose a model with *.safetensors: other weights can hold code, and are not fetched."
        raise SettingsError(f"{name.repo} on the Hub has no safetensors", field=field, value=text, remedy=remedy)
    return str(folder)


def data_paths(text: str, field: str, kept: Mapping[str, str], *, fetch: bool) -> str:
    """The same of a --prompt-data, source by source."""
    if os.path.exists(text):
        return text
    try:
        sources = sources_of(text)
    except BadData:  # refused elsewhere
        return text
    names = [data_name(source.path) for source in sources]
    if not any(names):
        return text
    parts = []
    for source, name in zip(sources, names, strict=True):
        path = source.path if name is None else _split_path(name, field, text, kept, fetch=fetch)
        cut = "" if source.start is None and source.stop is None else f"@[{_at(source.start)}:{_at(source.stop)}]"
        parts.append(f"{f'{source.weight:g}*' if source.weight else ''}{path}{cut}")
    return ", ".join(parts)


def _at(number: int | None) -> str:
    return "" if number is None else str(number)


def _split_path(name: HubName, field: str, value: str, kept: Mapping[str, str], *, fetch: bool) -> str:
    """The file of one split, or a folder of its files; the name itself where the cache lacks it and nothing is fetched."""
    card = _snapshot(name, kept.get(name.key, ""), (CARD,), field, value, fetch=fetch)
    if card is None:
        return _as_typed(name)
    revision = card.name
    listed = _asked(lambda: _files(name, revision, card, fetch=fetch), name, field, value)
    files, config, split, note = chosen(name, listed, _configs(card), field, value)
    folder = _snapshot(name, revision, files, field, value, fetch=fetch)
    if folder is None or not all((folder / file).is_file() for file in files):
        return _as_typed(name)
    if note and fetch:
        print(f"note: {note}", file=sys.stderr)
    if len(files) == 1:
        return str(folder / files[0])
    return str(_linked(folder, name, revision, f"{config or 'data'}-{split}", files))


def _as_typed(name: HubName) -> str:
    tail = f"{name.config}/{name.split}" if name.config else name.split
    return f"{name.repo}:{tail}" if tail else name.repo


def _linked(folder: Path, name: HubName, revision: str, split: str, files: Sequence[str]) -> Path:
    """A folder of links to these files alone, in their order."""
    place = kept_in().parent / "data" / f"datasets--{name.repo.replace('/', '--')}" / "snapshots" / revision / split
    place.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        link = place / f"{number:05d}-{Path(file).name}"
        if not link.exists():
            fresh = link.with_name(f".{link.name}.{os.getpid()}")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to((folder / file).resolve())
            fresh.rename(link)
    return place


def _files(name: HubName, revision: str, folder: Path, *, fetch: bool) -> list[str]:
    """Files of the data set: those that the Hub lists, or without it those that lie in the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    if fetch:
        try:
            return sorted(HfApi().list_repo_files(name.repo, repo_type="dataset", revision=revision))
        except (OfflineModeIsEnabled, ConnectionError, OSError) as error:
            if getattr(error, "response", None) is not None:
                raise
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def _configs(folder: Path) -> list[dict[str, Any]]:
    """What the data set's card says of its configurations."""
    try:
        text = (folder / CARD).read_text("utf-8")
        head = text.split("---", 2)[1] if text.startswith("---") else ""
        found = yaml.safe_load(head)
    except (OSError, ValueError, IndexError, yaml.YAMLError, RecursionError):
        return []
    configs = found.get("configs") if isinstance(found, dict) else None
    return [one for one in configs if isinstance(one, dict)] if isinstance(configs, list) else []


def chosen(
    name: HubName, listed: Sequence[str], configs: Sequence[Mapping[str, Any]], field: str, value: str
) -> tuple[list[str], str, str, str]:
    """(files, configuration, split, note) that a name means, of the files and configurations that its repository has."""

    def refuse(why: str, remedy: str) -> SettingsError:
        return SettingsError(why, field=field, value=value, remedy=remedy)

    data = [file for file in listed if file.endswith(SUFFIXES) and not Path(file).name.startswith(("dataset_info", "."))]
    known = {str(one.get("config_name", "default")): _splits(one.get("data_files"), data) for one in configs}
    known = {config: splits for config, splits in known.items() if splits}
    if not known:
        known = {"": _guessed(data)}
    config, note = name.config, ""
    if not config:
        marked = [str(one.get("config_name", "default")) for one in configs if one.get("default") is True]
        config = next((one for one in (*marked, *FIRST) if one in known), next(iter(known)))
        if len(known) > 1:
            others = ", ".join(one for one in known if one != config)
            note = f"{name.repo} has several configurations, and {config} is read; write {name.repo}:CONFIG/SPLIT for {others}"
    if config not in known:
        raise refuse(f"{name.repo} has no configuration {config}", f"It has {', '.join(filter(None, known)) or 'none'}.")
    splits = known[config]
    split = name.split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if split not in splits:
        if not splits:
            raise refuse(f"{name.repo} holds no files of {', '.join(SUFFIXES)}", "Download it and convert it, and give the file.")
        raise refuse(f"{name.repo} has no split {split}", f"It has {', '.join(splits)}: write {name.repo}:{next(iter(splits))}.")
    files = splits[split]
    suffixes = {Path(file).suffix for file in files}
    best = next(suffix for suffix in (".parquet", ".jsonl", ".json", ".csv", ".arrow") if suffix in suffixes)
    return [file for file in files if file.endswith(best)], config, split, note


def _splits(given: Any, data: Sequence[str]) -> dict[str, list[str]]:
    """Files by split, of a card's data_files: a pattern, a list of them, or a list of tables of a split and its patterns."""
    rows = given if isinstance(given, list) and all(isinstance(one, dict) for one in given) else [{"split": "train", "path": given}]
    found: dict[str, list[str]] = {}
    for row in rows:
        paths = row.get("path")
        patterns = [paths] if isinstance(paths, str) else paths if isinstance(paths, list) else []
        files = [file for file in data if any(fnmatch.fnmatchcase(file, str(one)) for one in patterns)]
        if files:
            found.setdefault(str(row.get("split", "train")), []).extend(files)
    return found


def _guessed(data: Sequence[str]) -> dict[str, list[str]]:
    """Files by split, of their names and folders, where no card tells."""
    found: dict[str, list[str]] = {}
    for file in data:
        words = file.lower().replace("/", "-").replace("_", "-").replace(".", "-").split("-")
        split = next((one for one in ("train", "test", "validation", "valid", "dev", "eval") if one in words), "train")
        found.setdefault(split, []).append(file)
    return found


def _snapshot(name: HubName, revision: str, patterns: Sequence[str], field: str, value: str, *, fetch: bool) -> Path | None:
    """The folder in the cache with these files; None where they are not there and nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: dict[str, Any] = {"repo_type": name.kind, "revision": revision or None, "allow_patterns": list(patterns)}
    try:
        there = Path(snapshot_download(name.repo, local_files_only=True, **asked))
    except (LocalEntryNotFoundError, OSError):
        there = None
    if not fetch:
        return there
    if there is not None and revision and all(any(there.glob(one)) for one in patterns if "*" not in one):
        return there  # the very revision is here: nothing is asked
    return Path(_asked(lambda: snapshot_download(name.repo, **asked), name, field, value))


def _asked(ask: Callable[[], T], name: HubName, field: str, value: str) -> T:
    """What the Hub answers; SettingsError in one line for what it does not have, does not give, or when it is not reached."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what, where = "model" if name.kind == "model" else "data set", constants.ENDPOINT
    local = f"no such {'directory' if name.kind == 'model' else 'file'} here (looked in {Path.cwd()})"
    try:
        return ask()
    except GatedRepoError:
        why = f"{where} gives it only to users who accepted its terms"
        remedy = f"Accept them at {where}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}, then: hf auth login."
    except RepositoryNotFoundError:
        why = f"{local}, and {where} shows no {what} of this name"
        remedy = "Correct the path or the name; for a private one: hf auth login, or set HF_TOKEN."
    except RevisionNotFoundError:
        why, remedy = f"{name.repo} on {where} has no such revision", "Leave @REVISION out, or correct it."
    except HFValidationError as error:
        why, remedy = f"{local}, and no name of the Hub: {str(error).splitlines()[0]}", "Correct the path or the name."
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reached = f"{where} answered with status {status}" if status else f"{where} is not reached"
        why = f"{local}, not in the Hub's cache ({constants.HF_HUB_CACHE}), and {reached}"
        remedy = f"Where it is reached: {name.download}; then copy the cache here, or give the directory."
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "huggingface_hub")):
            raise
        why = f"{local}, not in the Hub's cache ({constants.HF_HUB_CACHE}), and {where} is not reached ({type(error).__name__})"
        remedy = f"Where it is reached: {name.download}; then copy the cache here, or give the directory."
    raise SettingsError(why, field=field, value=value, remedy=remedy)
