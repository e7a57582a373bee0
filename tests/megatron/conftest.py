"""One pool of processes for all tests of this folder: they load megatron-core once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron.pool import Pool, opened


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with opened(4, tmp_path_factory.mktemp("pool")) as pool:
        yield pool
