"""The trainer's hooks, tried in a short process of their own before anything starts: this one loads neither torch nor them."""

from __future__ import annotations

import subprocess

import msgspec

from actors.runtime.child import PYTHON
from miles_async.launcher.plan import objective_config
from miles_async.settings.errors import SettingsError
from miles_async.settings.run import RunSettings

DEADLINE_S = 300.0  # a few seconds; on a starved host the import of torch alone takes minutes


class Answer(msgspec.Struct, frozen=True):
    """What `actors.trainer.dry_run` prints: nothing, or one refusal."""

    field: str = ""
    path: str = ""
    problem: str = ""
    remedy: str = ""


def check_hooks(settings: RunSettings) -> None:
    """SettingsError names the first hook that cannot be loaded or does not keep its signature on a synthetic batch."""
    names = ", ".join(settings.grpo.hook_paths)
    try:
        done = subprocess.run(
            [*PYTHON, "actors.trainer.dry_run"],
            input=msgspec.json.encode(objective_config(settings)),
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SettingsError(
            f"{names}: not back from a synthetic batch within {DEADLINE_S:.0f} s",
            remedy="Look for a loop or a wait in it.",
        ) from None
    try:
        answer = msgspec.json.decode(done.stdout, type=Answer)
    except msgspec.DecodeError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise SettingsError(
            f"{names}: the process that tried it ended with status {done.returncode}: {last[:300]}",
            remedy="Run python -m actors.trainer.dry_run by hand, or leave the hook out.",
        ) from None
    if answer.field:
        raise SettingsError(answer.problem, field=answer.field, value=answer.path, remedy=answer.remedy)


__all__ = ("check_hooks",)
