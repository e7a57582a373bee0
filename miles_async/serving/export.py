"""A checkpoint as a plain Hugging Face directory: weights, config, tokenizer and the source's generation_config, and nothing of the
trainer's."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from miles_async.settings.errors import SettingsError

OF_THE_TRAINER = ("optimizer", "scalars", "index.json", "critic")
"""What files of a checkpoint begin with that are no part of the model."""
KINDS = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py")


def of_the_model(directory: Path) -> list[Path]:
    """Files of a directory that make the model."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.suffix in KINDS)
    return [file for file in files if not file.name.startswith(OF_THE_TRAINER)]


def base_of(adapters: Path) -> str:
    """The model beside which adapters of LoRA were trained, as they name it; empty where they do not."""
    try:
        found = json.loads((adapters / "adapter_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    return str(found.get("base_model_name_or_path") or "") if isinstance(found, dict) else ""


def export(directory: Path, target: Path, *, base: str = "", link: bool = False) -> None:
    """Write `target`, new or empty, from a model's directory or a checkpoint; adapters of LoRA are merged into `base` (empty: the
    one that they name). `link`: links to the files. SettingsError where that cannot be."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{target} is there, and not empty", remedy="Give a new directory. Nothing was written.")
    if (directory / "adapter_config.json").is_file():
        _merged(directory, target, base or base_of(directory))
        return
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.mkdir(parents=True)
    try:
        for file in of_the_model(directory):
            if link:
                (fresh / file.name).symlink_to(file.resolve())
            else:
                shutil.copyfile(file, fresh / file.name)
        if target.exists():
            target.rmdir()
        fresh.rename(target)
    except OSError as error:
        raise SettingsError(f"{target} cannot be written: {error.strerror or error}", remedy="Choose another directory.") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _merged(adapters: Path, target: Path, base: str) -> None:
    from actors.runtime.run import Refused
    from actors.trainer.lora.merge import merge

    if not (Path(base) / "config.json").is_file():
        why = f"{adapters} holds adapters of LoRA, and their base {base or '(not named)'} is not here"
        raise SettingsError(why, remedy="Give it with --base DIR. Nothing was written.")
    try:
        merge(Path(base), adapters, target)
    except Refused as error:
        raise SettingsError(str(error)) from error
