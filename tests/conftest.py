"""Fixtures of all tests: real Redis servers on unix sockets in temporary directories."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from hypothesis import Phase, settings

from bus.client import PASSWORD, PASSWORD_FILE
from bus.server import EmbeddedRedis

settings.register_profile("house", deadline=None)  # an example that waits for a processor has not failed
settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("house")


def pytest_collection_finish() -> None:
    """What all tests share is never collected: to look through it would stop a test for half a second."""
    gc.collect()
    gc.freeze()


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
