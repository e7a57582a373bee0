"""The model directory and the place of the run's folder against the settings, before anything loads. Every failure is a
SettingsError, one line."""

import importlib.util
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from miles_async.settings.checkpoints import is_torch_dist
from miles_async.settings.errors import SettingsError, parsed, refusal
from miles_async.settings.hub_names import model_name
from miles_async.settings.run import RunSettings
from miles_async.settings.second_models import check_second_models, reference_dir, start_dir

GENERATION = "generation_config.json"
CHECKPOINT_FILES = ("config.json", "tokenizer.json")
WRITES = {"trainer": ("save", "save_hf", "save_debug_rollout_data", "save_debug_train_data"), "rooms": ("tensorboard_dir",)}
"""Settings that name where rooms write beside the run's folder, by what a Ray cluster places together (launcher/ray_units.py)."""


def check_model(settings: RunSettings) -> dict[str, Any]:
    """The model's config.json; empty for a builtin model."""
    config: dict[str, Any] = {}
    if settings.model.builtin_name is not None:
        from miles_async.quickstart.fetched import FETCHED
        from miles_async.quickstart.tasks import TASKS

        known = sorted({*TASKS, *FETCHED})
        if settings.model.builtin_name not in known:
            remedy = f"Builtin models: {', '.join(f'builtin:{name}' for name in known)}."
            raise settings.flat.refusal("hf_checkpoint", "no such builtin model", remedy)
    elif model_name(settings.model.hf_checkpoint) is None:  # a name of the Hub is looked at when it was fetched
        config = check_checkpoint_dir(settings.model.hf_checkpoint, "hf_checkpoint")
    _check_experts(settings, config)
    _check_starts(settings)
    check_second_models(settings)
    if (context := model_context(config)) is not None:
        _check_lengths(settings, context)
    return config


def _check_experts(settings: RunSettings, config: Mapping[str, Any]) -> None:
    for name in ("use_rollout_routing_replay", "use_routing_replay"):
        if getattr(settings.grpo, name) and not config.get("num_experts_per_tok"):
            problem = "the model has no experts whose choice could be replayed"
            raise settings.flat.refusal(name, problem, "Leave it out.")


def check_run_dir(settings: RunSettings) -> None:
    """Refuse a folder for the run that cannot be made, or another that it is to write. Nothing is made: a dry run asks too, and a
    start tries to write."""
    remedy = "Choose a shorter or another --runs-dir or --name, which this user may write."
    if why := not_writable(settings.run_dir):
        raise settings.flat.refusal("runs_dir", why, remedy)
    if settings.flat.launcher_kind.spreads:
        return  # the nodes on which the rooms are placed are asked then
    for unit in WRITES:
        for name, folder in folders_of(settings, unit).items():
            if why := not_writable(Path(folder)):
                value = settings.flat.values[name]
                raise SettingsError(why, field=name, value=value, remedy="Choose a folder that this user may write.")


def folders_of(settings: RunSettings, unit: str) -> dict[str, str]:
    """Folders that a unit writes beside the run's, by the setting that names each."""
    named = {name: str(settings.flat.values[name] or "") for name in WRITES.get(unit, ())}
    return {n: str(Path(text.partition("{")[0] + "x").parent) if "{" in text else text for n, text in named.items() if text}


def not_writable(folder: Path) -> str:
    """Why this folder cannot be made or written; empty = it can."""
    there = folder.absolute()
    try:
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            return f"{there} is a file, not a folder"
        fits = os.access(there, os.W_OK | os.X_OK)
    except OSError as error:  # a name that no file system takes, a folder that we may not enter
        return f"{folder} cannot be looked into: {(error.strerror or str(error)).lower()}"
    return "" if fits else f"{there} may not be written by this user"


def model_context(config: Mapping[str, Any]) -> int | None:
    """Tokens of the model's context, as far as it is known."""
    context = config.get("max_position_embeddings")
    return context if isinstance(context, int) else None


def check_checkpoint_dir(text: str, field: str, needed: Collection[str] = CHECKPOINT_FILES) -> dict[str, Any]:
    """A local Hugging Face directory; returns its config.json."""
    path = Path(text)
    if not path.is_dir():
        problem = "not a directory" if path.exists() else f"no such directory (looked in {Path.cwd()})"
        raise refusal(field, text, problem, "Give a downloaded Hugging Face directory or builtin:arithmetic.")
    for name in needed:
        if not (path / name).is_file():
            raise refusal(field, text, f"the directory has no {name}", f"Give a directory with {', '.join(needed)}.")
    config = table_in(path / "config.json", field)
    if (path / GENERATION).exists():
        table_in(path / GENERATION, field)
    check_shards(path, field)
    inner = config.get("text_config")
    return config | {k: v for k, v in inner.items() if k != "model_type"} if isinstance(inner, dict) else config


REMEDY = "Correct it, or download the model again."


def table_in(file: Path, field: str) -> dict[str, Any]:
    """A JSON object of a model directory."""
    try:
        found = parsed(json.loads, file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = f"{file.name} cannot be read: {error}"
        raise SettingsError(why, field=field, value=str(file.parent), remedy=REMEDY) from None
    if not isinstance(found, dict):
        raise SettingsError(f"{file.name} is not a JSON object", field=field, value=str(file.parent), remedy=REMEDY)
    return found


def check_shards(directory: Path, field: str) -> None:
    """Refuse a directory whose index names files that are not there: engines would serve what happens to lie in memory."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SettingsError(f"{index.name} cannot be read: {error!r}", field=field, value=str(directory)) from None
    lost = sorted(str(name) for name in named if not (directory / str(name)).is_file())
    if lost:
        why = f"{len(lost)} of {len(named)} checkpoint shards are missing, first {lost[0]}"
        raise refusal(field, str(directory), why, "Download the directory again.")


def _check_starts(settings: RunSettings) -> None:
    """What a run starts from: the reference, looked at whether or not a KL term asks for it, and weights of another run."""
    ref = settings.ckpt.ref_load
    if ref.startswith("builtin:") and ref != settings.model.hf_checkpoint:
        raise settings.flat.refusal("ref_load", "a builtin model is its own reference only", "Leave it out.")
    if directory := reference_dir(settings):
        _check_weights(settings, Path(directory), "ref_load", ref)
    if directory := start_dir(settings):
        _check_weights(settings, Path(directory), "load", settings.ckpt.load)


def _check_weights(settings: RunSettings, path: Path, field: str, given: str) -> None:
    """Weights that this trainer can read; a rank of Megatron looks closer, before it allocates anything."""
    if is_torch_dist(path):
        if settings.flat.on_megatron:
            return
        why = "a checkpoint of Megatron (torch_dist), which this trainer cannot read"
        remedy = "Set --train-backend megatron, or give the directory that miles-async convert megatron-to-hf makes of it."
        raise refusal(field, given, why, remedy)
    check_checkpoint_dir(str(path), field, ("config.json",))
    if not [*path.glob("*.safetensors"), *path.glob("*.bin")]:
        raise SettingsError("the directory has no weights", field=field, value=given, remedy="Download it again.")


def _check_lengths(settings: RunSettings, context: int) -> None:
    """`rest`: tokens that the model's context must hold besides."""
    for field, rest in (("rollout_max_context_len", 0), ("rollout_max_response_len", 1), ("eval_max_response_len", 1)):
        length = settings.flat.values[field]
        if length is not None and length + rest > context:
            why = f"the model's context (max_position_embeddings in config.json) is {context} tokens, prompt included"
            raise settings.flat.refusal(field, why, f"Set it to at most {context - rest}.")


def check_trackers(settings: RunSettings) -> None:
    """The libraries of the trackers that are asked for. Only those are looked for."""
    modules = {
        "use_tensorboard": "tensorboard",
        "use_wandb": "wandb",
        "use_mlflow": "mlflow",
        "use_trackio": "trackio",
        "use_prometheus": "prometheus_client",
    }
    for field, module in modules.items():
        if settings.flat.values[field] and importlib.util.find_spec(module) is None:
            remedy = "Install it: pip install 'miles-async[trackers]', or leave the flag out."
            raise settings.flat.refusal(field, f"the package {module} is not installed", remedy)
