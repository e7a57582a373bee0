"""A shell completes what this version knows: asked of a real bash, with the words and the key as a user has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_async.cli.completion import SCRIPTS, candidates
from miles_async.settings.catalog import live_fields
from miles_async.settings.runs import write_run_file
from tests.floors.tree import ROOT

ASKED = {
    "tra": ["trace", "train"],
    "train --tis-t": ["--tis-threshold"],
    "train --advantage-estimator rein": ["reinforce_plus_plus", "reinforce_plus_plus_baseline"],
    "train quickst": ["quickstart"],
    "train --explain eps-clip-h": ["eps-clip-high"],
    "train --help optim": ["optimizer"],
    "status --run ot": ["other"],
    "status --runs-dir elsewhere --run ": ["far"],
    "top min": ["mine"],
    "tune max_weight_st": ["max_weight_staleness="],
    "bus ta": ["tail"],
    "bus tail roll": ["rollouts"],
    "bus tail rollouts --no": ["--no-follow"],
    "ledger --by ver": ["version"],
    "completion fi": ["fish"],
    "nonsense --run ": [],
}


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with two runs, and a program on PATH."""
    for run in ("runs/mine", "runs/other", "elsewhere/far"):
        write_run_file(tmp_path / run, run=Path(run).name, bus_url="unix:///none")
    program = tmp_path / "bin" / "miles-async"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom miles_async.cli.app import main\nsys.exit(main())\n")
    program.chmod(0o755)
    return tmp_path


def shell(desk: Path, *words: str) -> str:
    path = f"{desk / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "HOME": str(desk)}
    done = subprocess.run(words, cwd=desk, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_bash_completes_commands_flags_values_knobs_and_runs(desk: Path) -> None:
    lines = ["source <(miles-async completion bash)", "compopt() { echo NOSPACE; }"]
    for line in ASKED:
        words = " ".join(f"'{word}'" for word in ["miles-async", *line.split(" ")])
        lines.append(f'COMP_WORDS=({words}); COMP_CWORD={len(line.split(" "))}; _miles_async; echo "|${{COMPREPLY[*]}}"')
    answers = shell(desk, "bash", "-c", "\n".join(lines)).removesuffix("\n").split("|")
    before, answers = (
        dict(zip(ASKED, answers, strict=False)),
        answers[1:],
    )  # what was printed while a line was completed
    said = [[word for word in answer.split() if word != "NOSPACE"] for answer in answers]
    assert dict(zip(ASKED, said, strict=True)) == ASKED
    assert [line for line in ASKED if "NOSPACE" in before[line]] == ["tune max_weight_st"], "the value follows at once"


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_other_shells_take_their_script(name: str, desk: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} on this host")
    words = "emulate -L sh; COMP_WORDS=(miles-async tune max_weight_st); COMP_CWORD=2; _miles_async"  # as bashcompinit calls it
    ask = {
        "zsh": f'source <(miles-async completion zsh); () {{ {words}; print -l "${{COMPREPLY[@]}}" }}',
        "fish": "miles-async completion fish | source; complete -C 'miles-async tune max_weight_st'",
    }
    assert "max_weight_staleness=" in shell(desk, name, "-c", ask[name]).split()


def test_every_command_is_completed() -> None:
    from miles_async.cli.app import COMMANDS

    for command in COMMANDS:
        assert list(candidates([command.name, "--"])), command.name
    assert [word for word in candidates(["tune", ""]) if word.endswith("=")] == [f"{name}=" for name in live_fields()]
    assert set(SCRIPTS) == {"bash", "zsh", "fish"}
