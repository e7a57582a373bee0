"""What a run began with: its model, tokenizer, template, reward and data. A start under the same name, or from its checkpoints,
that asks for others would train the old ones, so it is refused.

Writes and reads  began.json, in the run's folder and beside its checkpoints. Always true: it is written once, at the run's first
start, and never changed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from actors.trainer.checkpoint import write_durably
from bus.errors import CheckpointRefused
from miles_async.launcher.began_file import FILE, Began
from miles_async.launcher.began_file import read_began as read_began
from miles_async.launcher.eval_sets import eval_sets
from miles_async.launcher.resume import DATA, load_dir, resumes_from, same
from miles_async.settings.errors import refusal, show
from miles_async.settings.hub_names import revisions_in
from miles_async.settings.run import RunSettings

PIECES, PIECE_BYTES = 16, 4096  # of each file of weights: enough to tell two models of one shape apart
KEPT = {
    "model": ("hf_checkpoint", "critic_load"),
    "tokenizer": (),
    "template": ("apply_chat_template", "apply_chat_template_kwargs", "chat_template_path"),
    "reward": ("rm_type", "custom_rm_path", "reward_key", "custom_agent_function_path", "custom_generate_function_path",
               "environment_path", "rollout_function_path"),
    "data or group settings": DATA,
}  # fmt: skip
"""Settings that a run keeps, by what they make of it."""
PATHS = ("hf_checkpoint", "chat_template_path")  # what lies there counts, not where it lies


def check_began(settings: RunSettings) -> None:
    """SettingsError where this start would go on with another run than it asks for. A probe of the preflight."""
    run_dir, load = settings.run_dir, load_dir(settings)
    if (began := read_began(run_dir)) is not None and (why := _differs(began, settings)):
        kept = "" if settings.ckpt.no_save else f"; to start from its weights alone, add --finetune --load {settings.ckpt.save}"
        remedy = f"Choose another --name for a new run{kept}. Nothing was changed."
        raise refusal("name", settings.launch.name, f"the run of this name began {_at(began.since)} with {why}", remedy)
    if load and (began := read_began(Path(load))) is not None and (why := _differs(began, settings)):
        remedy = "Add --finetune to start from its weights alone, or choose another --load (--save). Nothing was changed."
        raise refusal("load", load, f"the run that wrote these checkpoints began {_at(began.since)} with {why}", remedy)


def resumed(settings: RunSettings) -> str:
    """What a start says first when it goes on with something: what, from which step, since when. Empty for a new run."""
    run_dir, load = settings.run_dir, load_dir(settings)
    try:
        found = resumes_from(settings)
    except (CheckpointRefused, OSError):  # refused by its own name
        return ""
    began = read_began(run_dir) or (read_began(Path(load)) if load and found else None)
    if began is None and found is None:
        return ""
    since = f", begun {_at(began.since)} with {began.values['hf_checkpoint']}" if began else ""
    if found is None:
        what = (
            "begins again, as it keeps no checkpoints" if settings.ckpt.no_save else "goes on at step 0, without a checkpoint yet"
        )
        return f"run {settings.launch.name} {what}{since}"
    parent, step = found
    return f"run {settings.launch.name} RESUMES at step {step} from {parent}{since}"


def keep_began(settings: RunSettings) -> None:
    """Write what this run is, unless it is known already: one that goes on from another's checkpoints is what that one was."""
    run_dir, load = settings.run_dir, load_dir(settings)
    known = read_began(run_dir) or (read_began(Path(load)) if load else None) or _now(settings)
    body = msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n"
    keeps = not (settings.ckpt.no_save or settings.launch.debug_rollout_only)
    for folder in (run_dir, *([Path(settings.ckpt.save)] if keeps and not same(settings.ckpt.save, run_dir) else [])):
        if not (folder / FILE).exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(folder / FILE, body)


def _now(settings: RunSettings) -> Began:
    values = settings.flat.values
    kept = {name: values[name] for names in KEPT.values() for name in names}
    return Began(since=time.time(), values=msgspec.to_builtins(kept), contents=contents(settings), revisions=_revisions(settings))


def _revisions(settings: RunSettings) -> dict[str, str]:
    c, sets = settings.ckpt, settings.flat.datasets
    held_out = [one.path for one in eval_sets(settings)] if settings.eval.eval_config else [path for _, path in sets]
    paths = (settings.model.hf_checkpoint, c.ref_load, c.critic_load, c.opd_teacher_load, settings.rollout.prompt_data, *held_out)
    return revisions_in(*paths)


def _differs(began: Began, settings: RunSettings) -> str:
    """What this start has other than that beginning, in words; empty = nothing."""
    now, said = _now(settings), list[str]()
    for part, names in KEPT.items():
        was, here = began.contents.get(part, ""), now.contents.get(part, "")
        looked_at = bool(was and here)
        found = [
            f"{name} was {show(began.values[name])} and is {show(now.values[name])}"
            for name in names
            if name in began.values and began.values[name] != now.values[name] and not (looked_at and name in PATHS)
        ]
        if looked_at and was != here:
            path = next((name for name in names if name in PATHS), "hf_checkpoint")
            then, is_now = (show(one.values.get(path)) for one in (began, now))
            changed = "whose files were others" if then == is_now else f"and is {is_now}"
            found.insert(0, f"{path} was {then} {changed}")
        if found and not said:  # another model brings another tokenizer: told once
            article = "other" if part.startswith("data") else "another"
            said.append(f"{article} {part}: {'; '.join(found)}")
    return "".join(said)


def contents(settings: RunSettings) -> dict[str, str]:
    """Digests of model, tokenizer and template. A model that is made here is its recipe and seed."""
    builtin, template = settings.model.builtin_name, settings.rollout.chat_template_path
    found = {"template": _digest([Path(template)]) if template else ""}
    if builtin is not None:
        return found | {"model": f"{builtin} of seed {settings.launch.seed}"}
    directory = Path(settings.model.hf_checkpoint)
    weights = [file for kind in ("safetensors", "bin", "distcp") for file in sorted(directory.glob(f"*.{kind}"))]
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return found | {"model": _digest(weights, sampled=True), "tokenizer": _digest(directory / name for name in names)}


def _digest(files: Iterable[Path], *, sampled: bool = False) -> str:
    """Of these files' contents, those that are there; `sampled`: of their sizes and some pieces of each. Empty of none."""
    digest, some = hashlib.blake2b(digest_size=16), False
    for file in files:
        try:
            with file.open("rb") as opened:
                size, some = os.fstat(opened.fileno()).st_size, True
                digest.update(f"{file.name} {size} ".encode())
                if not sampled:
                    digest.update(opened.read())
                    continue
                for piece in range(PIECES):
                    opened.seek(max(0, size - PIECE_BYTES) * piece // (PIECES - 1))
                    digest.update(opened.read(PIECE_BYTES))
        except OSError:
            continue  # what cannot be read is refused by its own name
    return digest.hexdigest() if some else ""


def _at(since: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(since))
