"""Each setting has a reader, no struct of a room gives one a default of its own, and each table of names is told once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from miles_async.settings.catalog import catalog
from tests.floors.tree import PACKAGES, each, parse, sources

INSIDE = Path("miles_async/settings")
OUTSIDE = [path for path in sources(*PACKAGES) if not path.is_relative_to(INSIDE)]
# Read where settings are resolved or checked, and without a further effect of their own.
THROUGH_OTHERS = {
    "loss_type": "it says whether custom_loss_function_path makes the loss",
    "use_tis": "Flat.off_policy_correction",
    "use_icepop": "Flat.off_policy_correction",
    "use_decoupled_loss": "Flat.off_policy_correction",
    "no_correction": "the rule of stale data asks for it",
    "opd_type": "it says which of two teachers is asked",
    "opd_teacher_ckpt_step": "second_models.py resolves the teacher's directory",
    "max_workers": "Flat.most_workers",
    "ref_ckpt_step": "second_models.py resolves the reference's directory",
    "dump_details": "save_debug_rollout_data follows from it",
    "debug_train_only": "load_debug_rollout_data makes it so",
    "governor_staleness": "the governor finds it in GOVERNED",
    "governor_oversampling": "the governor finds it in GOVERNED",
    "governor_concurrency": "the governor finds it in GOVERNED",
    "model_name": "Miles' choice of a converter; config.json says it here",
    "megatron_to_hf_mode": "Miles' choice of a converter; there is one here",
}
# Structs that tests build by hand; a second default of a setting goes when its room reads the setting by name.
SECOND_DEFAULTS = {
    "actors/generation/endpoint/request.py": {"tools"},  # of a call's body
    "actors/generation/spec.py": {"engine", "server_args", "seed"},
    "actors/trainer/objective_estimators.py": {"policy_loss"},  # of the record of an estimator
    "actors/trainer/spec.py": {"offload", "save", "load"},
}


def names_read(path: Path) -> set[str]:
    """Attributes that are read, and texts, in a file."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@cache
def read() -> set[str]:
    """What all files outside the settings read."""
    return set().union(*map(names_read, OUTSIDE))


@each(lambda: sorted(catalog()))
def test_a_setting_is_read_outside_the_settings(name: str) -> None:
    assert (name in read()) != (name in THROUGH_OTHERS), (
        f"{name} is told {'as read by others only, but it is read' if name in read() else 'by users and nobody reads it'}"
    )


def defaults_in(path: Path) -> list[str]:
    """Settings that a struct of a file gives a default."""
    return [
        node.target.id
        for struct in ast.walk(parse(path))
        if isinstance(struct, ast.ClassDef) and any("Struct" in ast.dump(base) for base in struct.bases)
        for node in struct.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.value is not None
        and node.target.id in catalog()
    ]


@each(lambda: sources("actors"))
def test_no_struct_of_a_room_tells_a_default_again(path: Path) -> None:
    assert set(defaults_in(path)) == SECOND_DEFAULTS.get(str(path), set())
