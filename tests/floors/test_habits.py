"""What a project has beside its code fits the code: owners, forms, the workflow and its rule of commit subjects."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.floors.tree import ROOMS, ROOT, each

GITHUB = ROOT / ".github"


def owned() -> list[str]:
    """Paths of CODEOWNERS but the first, which is everything."""
    lines = (GITHUB / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line and not line.startswith(("#", "* "))]


def test_every_room_has_an_owner_and_every_owned_path_exists() -> None:
    paths = owned()
    assert [path for path in paths if not (ROOT / path.strip("/")).exists()] == []
    assert [room for room in ROOMS if f"/actors/{room}/" not in paths and (ROOT / "actors" / room).is_dir()] == []


@each(lambda: sorted(GITHUB.rglob("*.yml")))
def test_a_form_or_workflow_can_be_read(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["name"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not there")
@pytest.mark.parametrize(
    ("subject", "passes"),
    [
        ("reward: units behind a number change nothing", True),
        ("bus, launcher: every actor holds its name", True),
        ("from-miles: " + "x" * 60, True),
        ("from-miles: " + "x" * 61, False),
        ("A limit that is none of its own, said", False),
        ("Watch: docs", False),
    ],
)
def test_the_workflow_refuses_other_subjects(subject: str, passes: bool, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert {"run": ".ci/run"} in jobs["tests"]["steps"]
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "A start of whatever form")
    base = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", subject)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "BASE": base, "HEAD": git("rev-parse", "HEAD")}
    words = ["bash", "-e", "-c", jobs["subjects"]["steps"][-1]["run"]]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) is passes and (subject in done.stdout) is not passes, done
