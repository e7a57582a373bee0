"""The toy, and one run directory per test. MILES_ASYNC_CRASH=all runs the whole matrix; without it only the fast cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.crash.house import Run, Tables, toy_tables
from tests.crash.toy import make_toy

HERE = Path(__file__).parent
Launch = Callable[..., Run]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow cases out unless they are asked for."""
    if os.environ.get("MILES_ASYNC_CRASH") == "all":
        return
    slow = [i for i in items if i.path.is_relative_to(HERE) and i.get_closest_marker("slow") is not None]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def toy() -> Iterator[Path]:
    """Model and prompts, made once per session."""
    with TemporaryDirectory(prefix="ma-toy-") as directory:
        yield make_toy(Path(directory) / "toy")


@pytest.fixture
def run_of(toy: Path) -> Iterator[Launch]:
    """Makes a Run with settings over the usual ones; all its processes are gone at the end."""
    made: list[Run] = []
    with TemporaryDirectory(prefix="ma-crash-") as directory:

        def make(settings: Tables | None = None) -> Run:
            home = Path(directory) / str(len(made))
            home.mkdir()
            made.append(Run(home, toy_tables(toy, home, settings)))
            return made[-1]

        try:
            yield make
        finally:
            for run in made:
                run.clean()
