"""Rules of checkpoints, and which directory a name of a checkpoint means. Every failure is a SettingsError, one line."""

from collections.abc import Callable
from pathlib import Path

from miles_async.settings.errors import SettingsError, refusal
from miles_async.settings.flat import Flat

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MEGATRON_FILES = (".metadata", "common.pt", "metadata.json", "latest_checkpointed_iteration.txt")
"""Any of these says that a directory holds weights as Megatron writes them (torch_dist)."""
OF_A_FIRST_START = ("no_load_optim", "no_load_rng", "finetune")


def is_torch_dist(path: Path) -> bool:
    """Whether a directory holds weights as Megatron writes them."""
    return path.is_dir() and any((path / name).exists() for name in MEGATRON_FILES)


def options_agree(s: Flat) -> None:
    if s.no_save and s.save_trigger_sentinel is not None:
        raise s.refusal("save_trigger_sentinel", "no_save is on", "Keep one of the two.")
    if s.no_save and s.save_hf is not None:
        raise s.refusal("save_hf", "it is written with each checkpoint and no_save is on", "Keep one of the two.")
    every, interval = s.save_retain_interval, s.save_interval
    if every is not None and every % interval:
        low = every // interval * interval
        near = " or ".join(str(n) for n in (low, low + interval) if n)
        raise s.refusal("save_retain_interval", f"no multiple of save_interval = {interval}", f"Nearest: {near}.")


def a_start_from_another_run_has_a_place_of_its_own(s: Flat) -> None:
    """Or each restart would drop again what the run has learned since."""
    same = _one_place(s)
    for name in OF_A_FIRST_START:
        if getattr(s, name) and (same or s.no_save):
            why = "no_save is on" if s.no_save else f"load and save are one directory ({s.save})"
            text = f"{why}, and each restart would do it again"
            raise s.refusal(name, text, "Give --load OLD and a --save of its own.")


def a_run_without_checkpoints_takes_none_up(s: Flat) -> None:
    """It would be passed over in silence: after a crash the run could go back to that alone, and learn the same again."""
    if s.no_save and not _one_place(s):
        remedy = "Give its weights as --hf-checkpoint LOAD/iter_NUMBER, or leave out --no-save."
        raise s.refusal("load", "no_save is on, and a run that writes no checkpoints resumes from none", remedy)


def _one_place(s: Flat) -> bool:
    return s.load is None or s.save is None or Path(s.load).absolute() == Path(s.save).absolute()


RULES: tuple[Callable[[Flat], None], ...] = (
    options_agree,
    a_start_from_another_run_has_a_place_of_its_own,
    a_run_without_checkpoints_takes_none_up,
)


def model_in(given: str, step: int | None, field: str, step_field: str) -> Path:
    """The directory that a name of a model means: `given` itself, or in a parent directory of checkpoints that of `step`, or that
    which its tracker names. SettingsError tells which there are."""
    parent = Path(given)
    tracker = parent / TRACKER
    if step is not None:
        chosen = parent / f"iter_{step:07d}"
        if not chosen.is_dir():
            raise refusal(step_field, step, f"{field} = {given} has no checkpoint of that step", there_are(parent, step))
        return chosen
    try:
        said = tracker.read_text().strip()
    except FileNotFoundError:
        return parent
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{tracker} cannot be read: {error}", field=field, value=given) from None
    if said != RELEASE and not said.isdecimal():
        raise refusal(field, given, f"{tracker} names no step: {said[:40]!r}", "Name a model directory, or correct it.")
    chosen = parent / (RELEASE if said == RELEASE else f"iter_{int(said):07d}")
    if not chosen.is_dir():
        raise refusal(field, given, f"{tracker} says {said}, and there is no {chosen.name}", there_are(parent, None))
    return chosen


def there_are(parent: Path, step: int | None) -> str:
    """What a refusal says of the checkpoints in a directory: those next to `step`, or the newest."""
    if not parent.is_dir():
        return f"There is no such directory (looked in {Path.cwd()})."
    steps = sorted(int(p.name[5:]) for p in parent.glob("iter_*") if p.name[5:].isdecimal())
    if not steps:
        return "It holds none." if not (parent / RELEASE).is_dir() else f"It holds {RELEASE} alone."
    near = steps[-3:] if step is None else sorted({*[n for n in steps if n < step][-1:], *[n for n in steps if n > step][:1]})
    return f"{'Newest' if step is None else 'Nearest'}: {' or '.join(map(str, near))}."
