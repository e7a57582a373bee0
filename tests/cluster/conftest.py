"""A Ray cluster of this machine for each test. Cases marked slow run with MILES_ASYNC_CRASH=matrix or all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.crash.conftest import toy
from tests.crash.house import REPO

pytest.importorskip("ray")
__all__ = ("toy",)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for."""
    if os.environ.get("MILES_ASYNC_CRASH", "") in ("matrix", "all"):
        return
    left_out = [i for i in items if i.path.is_relative_to(HERE) and i.get_closest_marker("slow") is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


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
