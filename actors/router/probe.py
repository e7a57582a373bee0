"""Checks whether a sglang-router accepts requests."""

from __future__ import annotations

import aiohttp

DEADLINE_S = 2.0


async def answers(host: str, port: int) -> bool:
    """Whether /health answers 200; never raises, never waits longer than DEADLINE_S."""
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"http://{host}:{port}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
