"""Fixtures of all tests: real Redis servers on unix sockets in temporary directories."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import Phase, settings

from bus.client import PASSWORD, PASSWORD_FILE
from bus.server import EmbeddedRedis
from tests.warm.launched import warm_server

LONGEST = {"far_run", "ray_run", "desk"}  # fixtures
WHOLE_RUNS = {"run_of"} | LONGEST
LANES, START_S = 3, 15.0  # of cases over hosts

settings.register_profile("house", deadline=None)  # an example that waits for a processor has not failed
settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("house")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Between the files of each worker's share stand as many whole runs as of any other's, and none at its end: a run that waits
    leaves the processor to tests that compute, and nobody waits for the last one. pytest-xdist gives worker k the k-th part; who
    has no more takes from the end of another's. Tests of Megatron stay together, for each worker that has one must load it."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers == 1:
        return
    if os.environ.get("MILES_ASYNC_CRASH"):
        in_lanes(items, workers)
        return
    runs = [item for item in items if WHOLE_RUNS.intersection(getattr(item, "fixturenames", ()))]
    runs.sort(key=lambda item: LONGEST.isdisjoint(item.fixturenames))  # those that take minutes begin first
    others = [item for item in items if not WHOLE_RUNS.intersection(getattr(item, "fixturenames", ()))]
    files = [list(found) for _, found in groupby(others, key=lambda item: item.path)]
    files.sort(key=lambda tests: "megatron" not in tests[0].path.parts)  # first of the first part, where no other worker takes any
    total, begun = len(items) - len(runs), 0
    parts: list[list[list[pytest.Item]]] = [[] for _ in range(workers)]
    for tests in files:
        parts[begun * workers // total].append(tests)
        begun += len(tests)
    items.clear()
    for number, part in enumerate(parts):
        own, fence = runs[number::workers], max(1, len(part) * 3 // 4)
        for index, tests in enumerate(part):
            items += own[index * len(own) // fence : (index + 1) * len(own) // fence] + tests
        items += own[len(part) * len(own) // fence :]


def in_lanes(items: list[pytest.Item], workers: int) -> None:
    """Of the matrix: cases over hosts, which wait for minutes and whose starts take the processors for as long, begin first, but
    LANES at once and no more, the longest first and each in the lane that is free first; the other cases go beside them. Shares are
    cut as pytest-xdist cuts them."""
    far = sorted((i for i in items if "far_run" in getattr(i, "fixturenames", ())), key=lambda i: -seconds_of(i))
    near = [item for item in items if "far_run" not in getattr(item, "fixturenames", ())]
    lanes: list[list[pytest.Item]] = [[] for _ in range(min(LANES, workers))]
    for item in far:
        min(lanes, key=lambda lane: sum(map(seconds_of, lane))).append(item)
    left = len(items)
    items.clear()
    for number in range(workers):
        size = left // (workers - number)
        own = lanes[number] if number < len(lanes) else []
        own = own + [near.pop(0) for _ in range(min(len(near), size - len(own)))]
        items += own
        left -= len(own)
    items += near


def seconds_of(item: pytest.Item) -> float:
    """What a case over hosts says that it takes."""
    mark = item.get_closest_marker("takes")
    return float(mark.args[0]) if mark else START_S


def pytest_collection_finish() -> None:
    """What all tests share is never collected: to look through it would stop a test for half a second."""
    gc.collect()
    gc.freeze()


SERVER, SOCKET = pytest.StashKey[ExitStack](), pytest.StashKey["Path | None"]()


def shared_server(config: pytest.Config) -> Path | None:
    """Socket of the one warm server of all workers of pytest-xdist, or of the only process; started when it is first asked for."""
    if hasattr(config, "workerinput"):
        return Path(config.workerinput["warm"]) if config.workerinput["warm"] else None
    if SERVER not in config.stash:
        config.stash[SERVER] = ExitStack()
        config.stash[SOCKET] = config.stash[SERVER].enter_context(warm_server())
    return config.stash[SOCKET]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller of pytest-xdist, before a worker starts."""
    socket = shared_server(node.config)
    node.workerinput["warm"] = "" if socket is None else str(socket)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SERVER in config.stash:
        config.stash[SERVER].close()


@pytest.fixture(scope="session")
def warm(request: pytest.FixtureRequest) -> Path | None:
    """Socket of the warm server; None where there can be none."""
    return shared_server(request.config)


@pytest.fixture(autouse=True)
def no_password_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings with a password put it into the environment; there it ends with the test."""
    monkeypatch.setenv(PASSWORD, "")
    monkeypatch.delenv(PASSWORD_FILE, raising=False)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of one server for the whole session. Tests keep apart by `run_name`; nobody flushes it."""
    with TemporaryDirectory(prefix="ma-test-") as directory:
        server = EmbeddedRedis(Path(directory))
        server.start()
        try:
            yield server.url
        finally:
            server.stop()


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """A run name of this test's own, so that its keys meet nobody else's."""
    test = re.sub(r"[^A-Za-z0-9_.-]", "-", request.node.name)[:40]
    return f"t-{test}-{uuid4().hex[:8]}"


@pytest.fixture
def private_redis() -> Iterator[EmbeddedRedis]:
    """A started server of this test's own, to be killed and started again at will."""
    with TemporaryDirectory(prefix="ma-test-") as directory:
        server = EmbeddedRedis(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.stop()
