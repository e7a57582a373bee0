"""Fixtures of the bus tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from redis.asyncio import Redis

from bus.client import connect


@pytest_asyncio.fixture
async def raw_redis(redis_url: str) -> AsyncIterator[Redis]:
    """A plain client on the session's server, for looking at keys from outside the bus."""
    client = connect(redis_url)
    try:
        yield client
    finally:
        await client.aclose()
