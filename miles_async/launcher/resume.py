"""Where a run goes on from, as its flags say: the same answer for the launcher, which restores the bus, and for the trainer. And
what its last start said, so that the next one knows what the operator has changed since."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

from actors.runtime.host import SILENT_BEATS, lives
from actors.trainer.checkpoint import (
    TRACKER,
    booked_as_trained,
    bus_state_file,
    iter_dir,
    latest,
    missing_of,
    others,
    resume_point,
    write_durably,
)
from bus import Bus, ledger
from bus.errors import CheckpointRefused
from bus.messages.policy import Finished
from miles_async.settings.checkpoints import RELEASE, there_are
from miles_async.settings.checks import check_run_dir
from miles_async.settings.dump import dump_toml
from miles_async.settings.errors import SettingsError, refusal
from miles_async.settings.live import initial_values
from miles_async.settings.load import load
from miles_async.settings.run import RunSettings


def here(path: Path | str | None) -> str:
    """A path as it is meant where the run is started: a function of the user's may take its process to another folder."""
    return str(Path(path).absolute()) if path else ""


def load_dir(settings: RunSettings) -> str:
    """Parent directory of the checkpoints to resume from, empty for none: with --finetune only the run's own."""
    c = settings.ckpt
    if c.no_save or settings.launch.debug_rollout_only:
        return ""
    return str(c.save if c.finetune else c.load)


def resumes_from(settings: RunSettings) -> tuple[Path, int] | None:
    """(parent directory, step) of the checkpoint that a start takes up. CheckpointRefused for a tracker that says neither."""
    load = load_dir(settings)
    step = None if settings.ckpt.finetune else settings.ckpt.ckpt_step
    return resume_point(load, str(settings.ckpt.save), step) if load else None


def check_resume(settings: RunSettings) -> None:
    """Refuse a folder that cannot be made, and a checkpoint to resume from that is not there. A probe of the preflight."""
    check_run_dir(settings)
    if not (load := load_dir(settings)):
        return
    try:
        _check_there(settings, load)
    except OSError as error:  # a name that no file system takes, a folder that we may not enter
        remedy = "Choose a shorter or another --name, --runs-dir or --load, which this user may read."
        raise refusal("load", load, f"cannot be looked into: {(error.strerror or str(error)).lower()}", remedy) from None


def _check_there(settings: RunSettings, load: str) -> None:
    c = settings.ckpt
    tracker = Path(load) / TRACKER
    if tracker.is_file() and tracker.read_text(errors="replace").strip() == RELEASE:
        raise refusal("load", load, "it holds converted weights, and no run to resume", "Give it as --ref-load, or add --finetune.")
    try:
        found = resumes_from(settings)
    except CheckpointRefused as error:
        raise SettingsError(str(error), field="load", value=load) from None
    if found is None:
        return
    parent, step = found
    asked = step == c.ckpt_step and not c.finetune
    if not iter_dir(parent, step).is_dir():
        field, value = ("ckpt_step", step) if asked else ("load", load)
        says = "" if asked else f"{parent / TRACKER} says {step}, and "
        remedy = there_are(parent, step) if asked else others(parent, step)
        raise refusal(field, value, f"{says}{parent} has no checkpoint of that step", remedy)
    if not bus_state_file(parent, step).is_file():
        text = f"checkpoint {step} has no state of a run beside it, so it cannot be resumed"
        raise refusal("load", load, text, f"Add --finetune to start from its weights. {others(parent, step)}")
    if why := missing_of(iter_dir(parent, step)):
        field, value = ("ckpt_step", step) if asked else ("load", load)
        raise refusal(field, value, f"checkpoint {step} in {parent} is not whole: {why}", others(parent, step))


def move_tracker(settings: RunSettings) -> list[str]:
    """--ckpt-step in the run's own directory: the tracker goes back to it. Returns notes for the operator."""
    found = resumes_from(settings)
    if found is None:
        return []
    parent, step = found
    newest = latest(parent)
    if newest == step or not same(parent, settings.ckpt.save):
        return []
    write_durably(parent / TRACKER, f"{step}\n".encode())
    return [f"goes on from checkpoint {step} instead of {newest} (--ckpt-step); leave it out to go on from the newest again"]


async def is_over(bus: Bus, heartbeat_s: float) -> bool:
    """Whether steps were trained here and their weights have gone with the trainer. One that an earlier launcher left alive has
    them."""
    if not booked_as_trained(await ledger.read_accounts(bus)):
        return False
    trainer = (await bus.vitals()).get("trainer")
    if trainer is None or trainer.state == "stopped":
        return True
    seen = lives(trainer)
    return not seen if seen is not None else (await bus.silences()).get("trainer", inf) >= SILENT_BEATS * heartbeat_s


async def finished_step(bus: Bus, num_rollout: int) -> int:
    """The step after which the trainer said that all are done, where that is its last word and no more are wanted; else 0."""
    step, _, rest = (await bus.state("trainer")).partition(":")
    return int(step) if rest.endswith(f":{Finished.__name__}") and int(step) >= num_rollout else 0


SETTINGS_FILE = "settings.toml"  # of the last start that made the bus ready
DATA = ("prompt_data", "n_samples_per_prompt", "rollout_seed", "rollout_shuffle", "data_source_path")  # a run keeps these


def changed_since_last_start(settings: RunSettings, run_dir: Path) -> dict[str, tuple[Any, Any]]:
    """Settings by name whose values at the run's last start and now differ; nothing where that start is not known."""
    try:
        before = initial_values(load(run_dir / SETTINGS_FILE).settings)
    except SettingsError:  # its first start, or one of another release
        return {}
    now = initial_values(settings)
    return {name: (before[name], value) for name, value in now.items() if name in before and before[name] != value}


def other_data(settings: RunSettings, run_dir: Path) -> list[str]:
    """Notes for the operator on what tells this start's data and groups from those of the last one."""
    changed = changed_since_last_start(settings, run_dir)
    return [f"{name} was {changed[name][0]!r} at the last start and is {changed[name][1]!r}" for name in DATA if name in changed]


def keep_settings(settings: RunSettings, run_dir: Path) -> None:
    """Write what this start says."""
    write_durably(run_dir / SETTINGS_FILE, dump_toml(settings).encode())  # of half a file nothing is known


def same(a: Path | str, b: Path | str) -> bool:
    """Whether two names mean one directory."""
    return Path(a).absolute() == Path(b).absolute()
