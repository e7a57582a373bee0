"""The bus over TLS, as a Redis user that has exactly the rights which docs/security.md names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio
from redis.exceptions import NoPermissionError

from bus import Bus, BusConfig, Reader
from bus.client import PASSWORD, connect
from bus.errors import BusRefused, BusUnreachable
from bus.identity import Identity, read_identity, runs_on, write_identity
from bus.inspect import consumers_of, newest_heads, stream_facts
from bus.leavers import forget_leavers
from bus.ledger import check
from bus.server import EmbeddedRedis
from bus.server.checks import check_server
from bus.streams.absent import count_death, deaths_of, forget_deaths, held_by, keep_leases, let_go
from bus.streams.hold import Who
from bus.topology import PROMPTS
from miles_async.console.attach import run_named
from miles_async.settings.runs import RunRef
from tests.bus.suite import blobs, conformance, flow
from tests.bus.suite.conformance import Check
from tests.bus.test_conformance import bus_maker
from tests.tls import tls_before

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
SECRET = "open-sesame"
PARTS = 6
SENDS = {".py": re.compile(r'\(\s*"([A-Z]{3,})"[,)]'), ".lua": re.compile(r"\bcall\(\s*'([A-Z]+)'")}
"""A word in capitals that an argument list or a tuple begins with: of these the server knows which are commands."""
CHECKS = (conformance.CHECKS | flow.CHECKS | blobs.CHECKS).values()


def rights(password: str = SECRET) -> list[str]:
    """The command of the page, as words."""
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith("ACL SETUSER trainer")]
    return line.replace("PASSWORD", password).split()


@pytest_asyncio.fixture
async def url(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A server of its own with that user, behind TLS."""
    with TemporaryDirectory(prefix="ma-tls-") as directory:
        server = EmbeddedRedis(Path(directory))
        await asyncio.to_thread(server.start)
        try:
            async with connect(server.url) as client:
                await client.execute_command(*rights())
            monkeypatch.setenv(PASSWORD, SECRET)
            async with tls_before(server.socket_path, Path(directory)) as (port, certificate):
                yield f"rediss://trainer@localhost:{port}/0?ssl_ca_certs={certificate}"
        finally:
            await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("part", range(PARTS))
async def test_delivery_needs_no_more_rights_than_the_page_names(url: str, run_name: str, part: int) -> None:
    checks: list[Check] = list(CHECKS)[part::PARTS]
    for number, one in enumerate(checks):
        await one(bus_maker(url, f"{run_name[:40]}-{number}", ""))
    assert len(checks) >= 3


async def test_neither_do_the_start_the_tools_and_the_ledger(url: str, run_name: str) -> None:
    async with connect(url) as client:
        assert (await check_server(client, url=url))[0].number >= (6, 2, 0)
        with pytest.raises(NoPermissionError):
            await client.get("another")
        with pytest.raises(NoPermissionError):
            await client.flushall()
        with pytest.raises(NoPermissionError):
            await client.config_get("*")
    async with Bus(BusConfig(url=url, run=run_name)) as bus:
        await bus.make_readers()
        await conformance.publish(bus, 2)
        await write_identity(bus, Identity(run=run_name))
        assert (await read_identity(bus) or Identity()).run == run_name and await runs_on(url) == [run_name]
        now, facts = await stream_facts(bus)
        assert facts["prompts"].length == 2 and now > 0 and "redis_version" in await bus.server_info()
        assert len(await newest_heads(bus, PROMPTS, 5)) == 2 and await consumers_of(bus, PROMPTS, "generation") == []
        assert not (await check(bus)).closes, "they were never issued"
        assert await forget_leavers(bus) == [] and await bus.forget_run() > 0


async def test_neither_do_names_and_what_is_done_for_a_process_that_ended(url: str, run_name: str) -> None:
    """Also of a sample that is given to somebody for the second time, which asks whom it has killed."""
    async with Bus(BusConfig(url=url, run=run_name)) as bus:
        await bus.make_readers()
        await conformance.publish(bus, 1)
        assert await bus.names.take("generation-0", Who(pid=1), lapse_s=10.0) is None
        assert await bus.names.beat("generation-0", b"") is False
        reader = Reader(bus, (PROMPTS,), "generation", "generation-0")
        [entry] = await reader.read(1, 0)
        await reader.close()
        held = await held_by(bus, [PROMPTS.name], "generation", "generation-0")
        assert held == {(PROMPTS.name, entry.id): 1}
        await keep_leases(bus, held, "generation", "generation-0")
        assert await deaths_of(bus, "g1/0") == (0, "")
        assert await count_death(bus, "g1/0", "it stood still") == 1
        assert await deaths_of(bus, "g1/0") == (1, "it stood still")
        await let_go(bus, held, "generation", "generation-0", blamed=(PROMPTS.name, entry.id))
        await forget_deaths(bus, "g1/0")
        assert await deaths_of(bus, "g1/0") == (0, "")
        assert await bus.names.beat("generation-0", b"", leaves=True) is False


async def test_no_command_is_sent_that_the_page_does_not_name(redis_url: str) -> None:
    """By any room or tool, however seldom it is sent."""
    named = {word[1:].partition("|")[0].upper() for word in rights() if word.startswith("+")}
    async with connect(redis_url) as client:
        known = {name.upper() for name in await client.command()} - {"READONLY"}  # in our code an error
    sent: dict[str, Path] = {}
    for folder in ("bus", "actors", "miles_async"):
        for file in (PAGE.parents[1] / folder).rglob("*"):
            if pattern := SENDS.get(file.suffix):
                sent |= dict.fromkeys(known.intersection(pattern.findall(file.read_text())), file)
    assert {"XREADGROUP", "HINCRBY", "XADD", "TIME", "SCAN"} <= sent.keys(), "this test does not see what it looks for"
    assert {name: file for name, file in sent.items() if name not in named} == {}


async def test_a_wrong_password_and_a_strange_certificate_are_refused_in_one_line(url: str, monkeypatch) -> None:
    for bad, kind in ((url.partition("?")[0], BusUnreachable), (url, BusRefused)):
        monkeypatch.setenv(PASSWORD, "wrong" if kind is BusRefused else SECRET)
        async with connect(bad) as client:
            with pytest.raises(kind) as refusal:
                await check_server(client, url=bad)
        assert "\n" not in str(refusal.value) and SECRET not in str(refusal.value)


async def test_a_certificate_that_names_another_host_is_said_by_the_start_and_by_tools(url: str, monkeypatch) -> None:
    monkeypatch.setenv(PASSWORD, SECRET)
    other = url.replace("localhost", "127.0.0.1")  # which it does not name
    async with connect(other) as client:
        with pytest.raises(BusUnreachable, match=r"IP address mismatch.*must name that host"):
            await check_server(client, url=other)
    with pytest.raises(BusUnreachable, match=r"IP address mismatch.*must name that host"):
        await run_named(RunRef(None, other, None))
