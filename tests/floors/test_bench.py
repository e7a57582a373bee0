"""The scripts that make figures: listed without being imported, one entry, and those for GPUs run where there are no tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.floors.tree import PACKAGES, ROOT, each, imports, sources

ARCHIVE = (*PACKAGES, "scripts", "configs")
BENCH = sources("scripts/bench")
FOR_GPUS = [path for path in BENCH if path.stem.startswith(("gpu_", "session_"))]
OPTIONAL = ("faststream", "matplotlib", "ray", "sglang_router")
RUNS_TESTS = {"tests.engine.models"}  # the step `conformance` of gpu_bench.py, which is tests/engine itself

IMPORT_EACH = """
import importlib, sys
sys.modules["tests"] = None  # an installed checkout may have them on the path
for name in sys.argv[1:]:
    importlib.import_module(name)
from scripts.bench import REPO
print(REPO, *sorted({"torch", "sglang"} & set(sys.modules)))
"""
PROBE = '''"""Says what it was given."""

import sys

if __name__ == "__main__":
    sys.exit(f"got {sys.argv[1:]}")
raise AssertionError("imported for the list")
'''


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folders that go to a machine with GPUs, and a figure that must not be imported."""
    root = tmp_path_factory.mktemp("archive")
    for name in ARCHIVE:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "scripts" / "bench" / "probe.py").write_text(PROBE)
    yield root
    shutil.rmtree(root)


def python(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True, timeout=120)


def test_scripts_for_gpus_are_imported_from_an_archive_without_tests(archive: Path) -> None:
    names = [f"scripts.bench.{path.stem}" for path in FOR_GPUS]
    done = python(archive, "-c", IMPORT_EACH, *names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(archive)], "a GPU's libraries are asked for when a figure is made"


def test_every_figure_is_imported_where_tests_are() -> None:
    """One that names what is no more would be found when its figure is wanted. Optional packages may be missing."""
    lines = [
        f"try: import scripts.bench.{path.stem}\nexcept ModuleNotFoundError as error: assert error.name in {OPTIONAL!r}, error"
        for path in BENCH
        if path.stem not in ("__init__", "__main__")
    ]
    done = python(ROOT, "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr


@each(lambda: FOR_GPUS)
def test_scripts_for_gpus_ask_for_no_test_later_either(path: Path) -> None:
    asked = {found.target for found in imports(path) if found.target.partition(".")[0] == "tests"}
    assert {name for name in asked if not any(one.startswith(name) for one in RUNS_TESTS)} == set()


def test_the_list_has_a_line_for_each_figure_and_imports_none(archive: Path) -> None:
    done = python(archive, "-m", "scripts.bench")
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()[1:]]
    listed = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines}
    assert listed["probe"] == "Says what it was given."
    entries = {path.stem for path in BENCH if 'if __name__ == "__main__":' in (ROOT / path).read_text()} - {"__main__"}
    assert entries | {"probe", "gpu_all", "gpu_pictures"} == set(listed)
    assert [name for name, line in listed.items() if not line.endswith((".", "?"))] == []


def test_a_figure_gets_its_arguments_and_a_wrong_name_its_neighbours(archive: Path) -> None:
    assert python(archive, "-m", "scripts.bench", "probe", "--out", "x").stderr.strip() == "got ['--out', 'x']"
    wrong = python(archive, "-m", "scripts.bench", "prob")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "no such figure; did you mean probe" in wrong.stderr
