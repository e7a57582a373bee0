"""The toy, and one run directory per test. MILES_ASYNC_CRASH=matrix runs the matrix (scripts/crash_matrix.sh), =all also
the variants of its cases; without it only the fast cases run. A case that fails leaves its runs' folders, logs and Redis data
included, under MILES_ASYNC_KEEP (default: runs/failed), and says where."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.house import Run, Tables, toy_tables
from tests.crash.toy import make_toy, shared_toy

HERE = Path(__file__).parent
Launch = Callable[..., Run]


VARIANTS = (
    *("alone-", "before_step-4", "checkpoint_copied-1", "its-memory", "a_part_damaged", "another_data_set", "for_good"),
    *("other_settings", "an_adopted", "without_a_launcher", "ended_without", "run_again[1]", "killed_twice"),
    *("before_the_first", "of_an_evaluation", "groups_of_a_lost_bus", "while_it_restores", "middle_of_a_drain"),
    *("actors_start", "again_and_again", "together_with", "longer_than_a_lease", "while[read-only]", "in-an-activation"),
    *("a-scorer", "its-acknowledgement", "the-sampler", "under_its_worker[19]", "outlives"),
    *("a_run_that_ends_anywhere", "tuned_killed_and_stopped"),
    *("full_for_half_a_minute", "shared_memory_that_is", "256_files", "clock_is_set", "for_a_minute["),
    *("files_is_gone", "ends_in_zeros"),
)
"""Parts of the names of cases that come close to another one of the matrix."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for."""
    leave_out_slow(config, items, HERE, VARIANTS)


def leave_out_slow(config: pytest.Config, items: list[pytest.Item], folder: Path, variants: Sequence[str] = ()) -> None:
    """Of a folder's slow tests those that MILES_ASYNC_CRASH does not ask for: `matrix` asks for all but those with one of
    `variants` in their names, `all` for all."""
    asked = os.environ.get("MILES_ASYNC_CRASH", "")
    if asked == "all":
        return
    here = [i for i in items if i.path.is_relative_to(folder) and i.get_closest_marker("slow") is not None]
    left_out = here if asked != "matrix" else [i for i in here if any(part in i.name for part in variants)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


FAILED = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The fixture below has to know that its test failed."""
    report = yield
    if report.failed:
        item.stash[FAILED] = report.when
    return report


def keep(runs: Sequence[Run], name: str) -> Path:
    """Copies what a failed case left; sockets and other special files stay out."""
    base = Path(os.environ.get("MILES_ASYNC_KEEP") or HERE.parents[1] / "runs" / "failed")
    kept = base / f"{time.strftime('%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:80]}"
    for run in runs:

        def special(directory: str, names: list[str]) -> list[str]:
            return [n for n in names if (path := Path(directory, n)).exists() and not (path.is_file() or path.is_dir())]

        shutil.copytree(run.left, kept / run.left.name, ignore=special, symlinks=True, dirs_exist_ok=True)
    return kept


@contextmanager
def _toy(warm: Path | None, task: str) -> Iterator[Path]:
    if warm is not None:
        yield shared_toy(warm, task)
        return
    with TemporaryDirectory(prefix="ma-toy-") as directory:
        yield make_toy(Path(directory) / "toy", task)


@pytest.fixture(scope="session")
def toy(warm: Path | None) -> Iterator[Path]:
    """Model and prompts, made once for all workers of a session; nobody writes there."""
    with _toy(warm, "arithmetic") as made:
        yield made


@pytest.fixture(scope="session")
def talking_toy(warm: Path | None) -> Iterator[Path]:
    """The one with a chat template."""
    with _toy(warm, "steps") as made:
        yield made


@pytest.fixture
def run_of(toy: Path, warm: Path | None, request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Makes a Run with settings over the usual ones; all its processes are gone at the end."""
    made: list[Run] = []
    with TemporaryDirectory(prefix="ma-crash-") as directory:

        def make(settings: Tables | None = None) -> Run:
            home = Path(directory) / str(len(made))
            home.mkdir()
            made.append(Run(home, toy_tables(toy, home, settings), warm))
            return made[-1]

        try:
            yield make
        finally:
            for run in made:
                run.clean()
            if FAILED in request.node.stash and made:
                print(f"kept: {keep(made, request.node.name)}")
