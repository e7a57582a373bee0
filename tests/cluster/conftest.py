"""A Ray cluster of this machine for each test. Cases marked slow run with MILES_ASYNC_CRASH=matrix or all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.crash.conftest import leave_out_slow, toy
from tests.crash.house import REPO

pytest.importorskip("ray")
__all__ = ("toy",)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for."""
    leave_out_slow(config, items, HERE)


@pytest.fixture
def ray_run(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes one run, its cluster and its Redis; all of it is gone at the end."""
    from tests.cluster.house import RayRun

    monkeypatch.setenv("PYTHONPATH", str(REPO))  # of the nodes
    made: list[RayRun] = []
    with TemporaryDirectory(prefix="ma-ray-") as folder:

        def make(settings: Any = None, **how: Any) -> RayRun:
            made.append(RayRun(toy, Path(folder), settings or {}, **how))
            return made[-1]

        try:
            yield make
        finally:
            for run in made:
                run.clean()
