"""Fixtures of all tests: real Redis servers on unix sockets in temporary directories."""

from __future__ import annotations

import gc
import os
import re
import sys
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
from tests.warm.workers import collected

LONGEST = {"far_run", "ray_run", "desk"}  # fixtures
WHOLE_RUNS = {"run_of"} | LONGEST
LANES, USUAL_S = 4, 12.0  # lanes of cases over hosts; seconds of a case that does not say how long it takes

settings.register_profile("house", deadline=None)  # an example that waits for a processor has not failed
settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("house")

gc.disable()  # until the tests are there: what is loaded for them stays, and to look through it again and again takes seconds


APART = ("crash", "hosts")  # whose slow cases are a matrix of their own (scripts/crash_matrix.sh)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `./scripts/test.sh --all` hands on."""
    parser.addoption("--all", action="store_true", help="run the tests marked slow too, but for those of the crash matrix")


def leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Unless a test is asked for by its whole name: `pytest tests/x.py::test_y`."""
    if config.getoption("--all") or any("::" in word for word in config.invocation_params.args):
        return
    here = Path(__file__).parent
    slow = [i for i in items if i.get_closest_marker("slow") and i.path.relative_to(here).parts[0] not in APART]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Between the files of each worker's share stand as many whole runs as of any other's, and none at its end: a run that waits
    leaves the processor to tests that compute, and nobody waits for the last one. pytest-xdist gives worker k the k-th part; who
    has no more takes from the end of another's. Tests of Megatron stay together, for each worker that has one must load it."""
    leave_out_slow(config, items)
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
    """Of the matrix: cases over hosts, which wait for minutes, begin first, but LANES at once and no more, each in the lane that is
    free first. The other cases are for the other workers, and behind those for the lanes. All the longest first, so that none of
    them ends alone. Shares are cut as pytest-xdist cuts them."""
    items.sort(key=lambda item: -seconds_of(item))
    far = [item for item in items if "far_run" in getattr(item, "fixturenames", ())]
    near = [item for item in items if "far_run" not in getattr(item, "fixturenames", ())]
    sizes = [len(items) * (k + 1) // workers - len(items) * k // workers for k in range(workers)]
    sizes.sort()  # the larger ones are the last
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for item in far:
        min(shares[:LANES], key=lambda lane: sum(map(seconds_of, lane))).append(item)
    for item in near:
        open_ones = [k for k, size in enumerate(sizes) if len(shares[k]) < size]
        shares[min(open_ones, key=lambda k: (k < LANES, len(shares[k])))].append(item)
    items[:] = [item for share in shares for item in share]


def seconds_of(item: pytest.Item) -> float:
    """What a case says that it takes."""
    mark = item.get_closest_marker("takes")
    return float(mark.args[0]) if mark else USUAL_S


def pytest_collection_finish() -> None:
    """What all tests share is never collected: to look through it would stop a test for half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


SERVER, SOCKET = pytest.StashKey[ExitStack](), pytest.StashKey["Path | None"]()
WORKERS = pytest.StashKey[ExitStack]()


def shared_server(config: pytest.Config) -> Path | None:
    """Socket of the one warm server of all workers of pytest-xdist, or of the only process; started when it is first asked for."""
    if hasattr(config, "workerinput"):
        return Path(config.workerinput["warm"]) if config.workerinput["warm"] else None
    if SERVER not in config.stash:
        config.stash[SERVER] = ExitStack()
        config.stash[SOCKET] = config.stash[SERVER].enter_context(warm_server())
    return config.stash[SOCKET]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """In the controller: its workers are forked from one process, which has collected the tests."""
    if sys.platform == "linux":
        arguments = list(map(str, config.invocation_params.args))
        command = config.stash.setdefault(WORKERS, ExitStack()).enter_context(collected(arguments))
        for spec in specs:
            if spec.popen and not spec.python:
                spec.python = command


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller of pytest-xdist, before a worker starts. The controller has no tests."""
    gc.enable()
    socket = shared_server(node.config)
    node.workerinput["warm"] = "" if socket is None else str(socket)


def pytest_unconfigure(config: pytest.Config) -> None:
    for held in (SERVER, WORKERS):
        if held in config.stash:
            config.stash[held].close()


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
