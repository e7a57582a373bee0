"""Names of pretrained models, of this package or of the Hub, and of data sets of the Hub become paths, before anything looks at
them."""

from __future__ import annotations

import msgspec

from miles_async.launcher.eval_sets import eval_sets
from miles_async.quickstart.fetched import FETCHED, check_can_be_fetched, directory_of, fetch, is_there
from miles_async.settings.errors import Refusals, SettingsError
from miles_async.settings.groups.model import BUILTIN_PREFIX
from miles_async.settings.hub_names import model_name, names_data
from miles_async.settings.run import RunSettings

ALSO = ("ref_load", "critic_load", "opd_teacher_load")


def with_models(settings: RunSettings, *, dry_run: bool = False) -> RunSettings:
    """The settings with builtin:NAME of a fetched model replaced by its directory. A dry run fetches nothing: what is not there yet
    stays a name. SettingsError where it cannot be had."""
    model, ckpt = settings.model, settings.ckpt
    named = {"hf_checkpoint": model.hf_checkpoint, **{field: getattr(ckpt, field) for field in ALSO}}
    found = {}
    for field, value in named.items():
        name = (value or "").removeprefix(BUILTIN_PREFIX)
        if value is None or not value.startswith(BUILTIN_PREFIX) or name not in FETCHED:
            continue
        try:
            check_can_be_fetched(name)
            if not dry_run:
                fetch(name)
        except SettingsError as error:
            raise SettingsError(str(error), field=field, value=value) from None
        if is_there(name):
            found[field] = str(directory_of(name))
    path = found.pop("hf_checkpoint", model.hf_checkpoint)
    found_here = msgspec.structs.replace(
        settings, model=msgspec.structs.replace(model, hf_checkpoint=path), ckpt=msgspec.structs.replace(ckpt, **found)
    )
    return _with_hub(found_here, fetch=not dry_run)


def _with_hub(settings: RunSettings, *, fetch: bool) -> RunSettings:
    """With paths in place of what the Hub has."""
    model, ckpt, rollout, held_out = settings.model, settings.ckpt, settings.rollout, settings.eval
    models = {field: getattr(ckpt, field) for field in ALSO} | {"hf_checkpoint": model.hf_checkpoint}
    data = rollout.prompt_data if rollout.data_source_path is None else ""
    sets, of_file = settings.flat.datasets, _of_file(settings)
    all_data = [data, *(path for _, path in sets), *of_file]
    if not any(text and model_name(text) for text in models.values()) and not any(map(names_data, all_data)):
        return settings
    from miles_async.launcher.began_file import read_began
    from miles_async.launcher.hub import data_paths, model_path

    began = read_began(settings.run_dir)
    kept, refused = began.revisions if began else {}, Refusals()
    asked = {text: field for field, text in models.items() if text}  # what several fields name is fetched, and refused, once
    paths = {text: refused.attempt(model_path, text, field, kept, fetch=fetch) or text for text, field in asked.items()}
    found = {field: paths[text] if text else text for field, text in models.items()}
    prompts = (refused.attempt(data_paths, data, "prompt_data", kept, fetch=fetch) or data) if data else rollout.prompt_data
    pairs = tuple(
        word
        for name, path in sets
        for word in (name, refused.attempt(data_paths, path, "eval_prompt_data", kept, fetch=fetch) or path)
    )
    for path in of_file:  # into the cache, where `eval_sets` finds it
        refused.attempt(data_paths, path, "eval_config", kept, fetch=fetch)
    refused.raise_all()
    return msgspec.structs.replace(
        settings,
        model=msgspec.structs.replace(model, hf_checkpoint=found.pop("hf_checkpoint")),
        ckpt=msgspec.structs.replace(ckpt, **found),
        rollout=msgspec.structs.replace(rollout, prompt_data=prompts),
        eval=msgspec.structs.replace(held_out, eval_prompt_data=pairs) if sets else held_out,
    )


def _of_file(settings: RunSettings) -> list[str]:
    """Data of --eval-config that is still to come from the Hub."""
    if settings.eval.eval_config is None:
        return []
    try:
        return [one.path for one in eval_sets(settings) if names_data(one.path)]
    except SettingsError:  # refused by who reads the file for good
        return []


def still_to_fetch(settings: RunSettings) -> str:
    """What a dry run says of a model that the start would fetch; empty: nothing."""
    name, hub = settings.model.builtin_name, model_name(settings.model.hf_checkpoint)
    if hub or names_data(settings.rollout.prompt_data):
        what = settings.model.hf_checkpoint if hub else settings.rollout.prompt_data
        return f"{what} is fetched from the Hugging Face Hub at the start; until then it is not looked at"
    if name is None or name not in FETCHED:
        return ""
    return f"{settings.model.hf_checkpoint} is fetched at the start ({FETCHED[name].about}); until then it is not looked at"
