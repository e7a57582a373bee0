"""Names of pretrained models in settings become directories, before anything looks at them."""

from __future__ import annotations

import msgspec

from miles_async.quickstart.fetched import FETCHED, check_can_be_fetched, directory_of, fetch, is_there
from miles_async.settings.errors import SettingsError
from miles_async.settings.groups.model import BUILTIN_PREFIX
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
    return msgspec.structs.replace(
        settings, model=msgspec.structs.replace(model, hf_checkpoint=path), ckpt=msgspec.structs.replace(ckpt, **found)
    )


def still_to_fetch(settings: RunSettings) -> str:
    """What a dry run says of a model that the start would fetch; empty: nothing."""
    name = settings.model.builtin_name
    if name is None or name not in FETCHED:
        return ""
    return f"{settings.model.hf_checkpoint} is fetched at the start ({FETCHED[name].about}); until then it is not looked at"
