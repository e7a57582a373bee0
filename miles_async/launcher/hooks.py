"""What is asked before anything starts beside the settings' own checks: the user's functions, each tried in a short process of its
own, since this one loads neither torch nor them, and the model's quantisation."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Container
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from actors.runtime.child import PYTHON
from actors.runtime.fp8 import read_scheme
from actors.runtime.labels import LABEL_IS_JSON
from actors.runtime.leftovers import MARK, end_marked, new_mark
from actors.runtime.rows import value_at
from actors.runtime.run import Refused
from actors.trainer.megatron_backend.config import MegatronConfig
from actors.trainer.megatron_backend.families import describe
from actors.trainer.megatron_backend.flags import compare, fields_against
from actors.trainer.megatron_backend.layout import layout_of, refusals
from actors.trainer.megatron_backend.torch_dist import CONTENTS, check_whole
from bus.errors import UNREADABLE
from miles_async.launcher.began import check_began
from miles_async.launcher.plan import objective_config, told, training_data
from miles_async.launcher.preflight import check_prompt_data
from miles_async.launcher.resume import check_resume
from miles_async.settings.catalog import catalog
from miles_async.settings.checks import table_in
from miles_async.settings.custom_config import custom_config
from miles_async.settings.errors import Refusals, SettingsError
from miles_async.settings.functions import CALLED
from miles_async.settings.run import RunSettings
from miles_async.settings.second_models import reference_dir, start_dir, teacher_dir

ROLLOUT_S = 60.0  # one rollout of a synthetic engine
DEADLINE_S = 300.0  # a few seconds; on a starved host the import of torch alone takes minutes


class TrialAnswer(msgspec.Struct, frozen=True):
    """What such a process prints: nothing, or one refusal."""

    field: str = ""
    path: str = ""
    problem: str = ""
    remedy: str = ""


def check_hooks(settings: RunSettings, only: Container[str] = catalog()) -> None:
    """SettingsError names the objective's first hook, and every other one, that cannot be loaded or does not keep its signature.
    `only`: those that these settings name."""
    refused, s = Refusals(), settings.flat
    if any(name in only for name in s.hook_paths):
        names, body = ", ".join(s.hook_paths), msgspec.json.encode(objective_config(settings))
        refused.attempt(_try, "actors.trainer.dry_run", names, body)
    values = refused.attempt(custom_config, s.custom_config_path) or {}
    own = [name for name in CALLED if name in only]
    called = {name: s.values[name] for name in own if s.values[name] not in (None, *catalog()[name].shipped)}
    if called.get("rollout_function_path") and not s.own_rollout_function:
        del called["rollout_function_path"]  # one of Miles' own
    if called:
        ask = {
            "paths": called,
            "sample": _sample(settings),
            "reward_key": s.reward_key or "",
            "deadline_s": s.reward_timeout_s,
            "rollout_s": min(s.rollout_timeout_s, ROLLOUT_S),
            "data": training_data(settings, ""),
            "group_rm": s.group_rm,
            "values": {**s.values, **values},
        }
        refused.attempt(_try, "miles_async.launcher.try_hooks", ", ".join(called), msgspec.json.encode(ask))
    refused.raise_all()


def _sample(settings: RunSettings) -> dict[str, object]:
    """The first prompt, answered with its label."""
    r = settings.rollout
    try:
        keys = {"input_key": r.input_key, "label_key": r.label_key, "metadata_key": r.metadata_key}
        row = check_prompt_data(r.prompt_data, field="prompt_data", keys=keys, objects=True).head[0].row
    except SettingsError:  # refused elsewhere
        return {"sample_id": "try/0", "prompt": "1+1=", "response": "", "label": "", "metadata": {}}
    found = value_at(row, r.label_key) if r.label_key else None
    whole = isinstance(found, list | dict)
    label = "" if found is None else json.dumps(found) if whole else str(found)
    metadata = _value(row, r.metadata_key)
    return {
        "sample_id": "try/0",
        "prompt": str(value_at(row, r.input_key)),
        "response": label,
        "label": label,
        "metadata": (metadata if isinstance(metadata, dict) else {}) | ({LABEL_IS_JSON: True} if whole else {}),
    }


def _value(row: dict[str, Any], key: str | None) -> Any:
    """What lies under a key that a row may lack."""
    try:
        return value_at(row, key) if key else None
    except KeyError:
        return None


def _try(module: str, names: str, body: bytes) -> None:
    try:
        status, output, errors = _run(module, body)
    except subprocess.TimeoutExpired:
        why = f"{names}: not back from a synthetic batch within {DEADLINE_S:.0f} s"
        raise SettingsError(why, remedy="Look for a loop or a wait in it.") from None
    try:
        answers = msgspec.json.decode(output, type=TrialAnswer | list[TrialAnswer])
    except UNREADABLE:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        why = f"{names}: the process that tried it ended with status {status}: {last[:300]}"
        raise SettingsError(why, remedy=f"Run python -m {module} by hand, or leave the hook out.") from None
    refused = Refusals()
    for answer in answers if isinstance(answers, list) else [answers]:
        if answer.field:
            remedy = answer.remedy if "Its signature" in answer.remedy else f"Its signature is {answer.remedy}."
            refused.found.append(SettingsError(answer.problem, field=answer.field, value=answer.path, remedy=remedy))
    refused.raise_all()


def _run(module: str, body: bytes) -> tuple[int, bytes, bytes]:
    """Exit status, standard output and error of a module that reads `body`. All that it started ends with it: in files, since a
    pipe would be open for as long as a process that a function left behind. Raises TimeoutExpired."""
    mark = new_mark()
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = subprocess.Popen(
            [*PYTHON, module], stdin=subprocess.PIPE, stdout=output, stderr=errors, env=os.environ | {MARK: mark},
            start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(body, timeout=DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_marked(mark)
        output.seek(0)
        errors.seek(0)
        return process.returncode, output.read(), errors.read()


def _config(settings: RunSettings) -> dict[str, Any] | None:
    """The model's config.json; None for what is refused as a directory."""
    try:
        return table_in(Path(settings.model.hf_checkpoint) / "config.json", "hf_checkpoint")
    except SettingsError:
        return None


def check_quantization(settings: RunSettings) -> None:
    """Refuse a checkpoint in a quantisation that the trainer cannot publish. A probe of the preflight."""
    if settings.model.builtin_name is not None:
        return
    if (config := _config(settings)) is None:
        return
    try:
        read_scheme(config)
    except ValueError as error:
        remedy = "Give a plain (bfloat16) or block-scaled FP8 directory of this model."
        raise settings.flat.refusal("hf_checkpoint", str(error), remedy) from None


def check_architecture(settings: RunSettings) -> None:
    """Refuse flags of Megatron that say otherwise than config.json, and a layout that does not divide the model. A probe of the
    preflight."""
    given = {name: getattr(settings.architecture, name) for name in settings.architecture.__struct_fields__}
    said = any(value not in (None, False, (), 1) for value in given.values())
    if settings.model.builtin_name is not None or not (said or settings.flat.on_megatron):
        return
    if (config := _config(settings)) is None:
        return
    try:
        differ = compare(given, config)
        if settings.flat.on_megatron:
            own, arch = told(MegatronConfig, settings.flat), describe(config)
            differ += fields_against({name.replace("-", "_"): value for name, value in own.megatron.items()}, arch)
            differ += refusals(layout_of(own, settings.flat.train_ranks), arch.shape)
    except Refused as error:
        raise SettingsError(str(error), field="hf_checkpoint", value=settings.model.hf_checkpoint) from None
    if differ:
        raise SettingsError("; ".join(differ), field="hf_checkpoint", value=settings.model.hf_checkpoint)


def check_shards(settings: RunSettings) -> None:
    """Refuse a torch_dist checkpoint to take weights from whose files are not all there: the trainer would say it when all others
    have started. A probe of the preflight."""
    flat, c = settings.flat, settings.ckpt
    if not flat.on_megatron:
        return
    given = {
        "hf_checkpoint": "" if settings.model.builtin_name is not None else str(settings.model.hf_checkpoint),
        "ref_load": reference_dir(settings),
        "load": start_dir(settings),
        "opd_teacher_load": teacher_dir(settings),
    }
    for field, directory in given.items():
        if not directory or not (Path(directory) / CONTENTS).is_file():
            continue
        try:
            check_whole(Path(directory))
        except Refused as error:
            value = getattr(c, field) if field != "hf_checkpoint" else settings.model.hf_checkpoint
            raise SettingsError(str(error), field=field, value=value) from None


PROBES = (check_resume, check_began, check_architecture, check_quantization, check_shards, check_hooks)
