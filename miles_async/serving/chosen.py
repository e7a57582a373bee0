"""Which weights are meant by a run's name and a step, or by a directory; refused with the remedy where they cannot be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from miles_async.settings.errors import SettingsError, refusal
from miles_async.settings.runs import find_run, read_settings


class Chosen(NamedTuple):
    """A Hugging Face directory, and how its run made prompts and answers. `step`: None of a directory that is no run's.
    `most_new`: tokens of an answer where a caller says nothing; `template_path`: empty for the model's own."""

    directory: Path
    name: str
    step: int | None
    template_path: str
    template_kwargs: dict[str, Any]
    most_new: int
    temperature: float


def choose(text: str | None, runs_dir: Path, step: int | None, *, adapters: bool = False) -> Chosen:
    """The checkpoint of a run (None: of the newest), its last one or that of `step`; or the model in a directory. `adapters`: those
    of LoRA are taken too.

    SettingsError where there is none, or where its weights lie in a form that no engine reads.
    """
    given = Path(text) if text is not None else None
    if given is not None and any((given / name).is_file() for name in ("config.json", "adapter_config.json")):
        if step is not None:
            raise refusal("--step", step, f"{given} is a model's directory, which has no steps", "Leave it out.")
        return Chosen(_servable(given, str(given), adapters), given.resolve().name, None, "", {}, 1024, 1.0)
    ref = find_run(run=text, runs_dir=runs_dir, bus_url=None)
    assert ref.run_dir is not None  # found in a folder
    tables = read_settings(ref.run_dir)
    save = Path(str(tables.get("ckpt", {}).get("save") or ref.run_dir / "checkpoints"))
    if not save.exists():  # it is relative to another folder, or has been moved since
        save = ref.run_dir / "checkpoints"
    name = ref.run or ref.run_dir.name
    found, at = _checkpoint(save, step, name)
    rollout = tables.get("rollout", {})
    kwargs = rollout.get("apply_chat_template_kwargs")
    return Chosen(
        _servable(found, name if step is None else f"{name} --step {step}", adapters),
        name,
        at,
        str(rollout.get("chat_template_path") or ""),
        kwargs if isinstance(kwargs, dict) else {},
        int(rollout.get("rollout_max_response_len") or 1024),
        float(rollout.get("rollout_temperature") or 1.0),
    )


def _checkpoint(save: Path, step: int | None, run: str) -> tuple[Path, int]:
    from actors.trainer.checkpoint import iter_dir, latest, steps_in

    there = steps_in(save) if save.is_dir() else []
    at = step if step is not None else latest(save)
    if at is not None and iter_dir(save, at).is_dir():
        return iter_dir(save, at), at
    why = f"run {run} has no checkpoint{' of that step' if step is not None else ''} in {save}"
    if step is not None and there:
        raise refusal("--step", step, why, f"It has {', '.join(map(str, there))}.")
    raise SettingsError(why, remedy="One is written every --save-interval steps and at the end of a run.")


def _servable(directory: Path, words: str, adapters: bool) -> Path:
    if (directory / "adapter_config.json").is_file():
        if adapters:
            return directory
        remedy = f"Merge them: miles-async export {words} MODEL; then give MODEL in place of the run."
        raise SettingsError(f"{directory} holds adapters of LoRA, not a whole model", remedy=remedy)
    if any(directory.glob("*.safetensors")) and (directory / "config.json").is_file():
        return directory
    if (directory / ".metadata").is_file() or any(directory.glob("*.distcp")) or any(directory.glob("*/*.distcp")):
        back = f"miles-async convert megatron-to-hf {directory.parent} MODEL"
        raise SettingsError(f"{directory} is in Megatron's format", remedy=f"Convert it: {back}; then give MODEL.")
    remedy = "Give a Hugging Face directory or another --step."
    raise SettingsError(f"{directory} has no config.json with *.safetensors", remedy=remedy)
