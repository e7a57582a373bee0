"""The connection below the bus: packing, refusals in place, nothing mixed up after a cancelled exchange."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError, ResponseError

from bus import Bus, BusConfig, Commit, Out
from bus.errors import InvariantBroken
from bus.streams.hop import Placed, hop_args
from bus.streams.keys import StreamKeys
from bus.streams.redis import COMMIT
from bus.streams.wire import LARGE, Wire, pack
from bus.topology import PROMPTS
from tests.bus.suite.messages import a_task
from tests.tls import tls_before

WORDS = st.text(st.characters(codec="utf-8"), max_size=80)
ARGUMENTS = st.one_of(WORDS, st.integers(-(2**62), 2**62), st.binary(max_size=300))


@given(st.lists(st.lists(ARGUMENTS, max_size=8), min_size=1, max_size=4))
@example([["body", b"x" * LARGE, "blob", b"y" * (LARGE - 1)], [b"z" * (LARGE + 1)]])
def test_commands_are_packed_as_the_client_library_packs_them(commands):
    commands = [("XADD", *command) for command in commands]
    assert b"".join(pack(commands)) == b"".join(HiredisRespSerializer().pack(*command)[0] for command in commands)


async def test_a_refusal_comes_back_in_its_place(redis_url, run_name):
    wire = Wire(redis_url)
    key = f"ma:{{{run_name}}}:x"
    replies = await wire.exchange([("SET", key, "1"), ("LPUSH", key, "2"), ("GET", key)])
    assert replies[0] == b"OK"
    assert isinstance(replies[1], ResponseError)
    assert replies[2] == b"1"
    with pytest.raises(ResponseError):
        await wire.call("NO-SUCH-COMMAND")
    await wire.close()


class ClosedUnderneath:
    """A transport as uvloop leaves it where the network went away: it does not say that it is closing."""

    def is_closing(self) -> bool:
        return False

    def writelines(self, parts: list[bytes]) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


async def test_a_transport_that_the_network_closed_underneath_is_a_lost_connection(redis_url):
    wire = Wire(redis_url)
    await wire.call("PING")
    assert wire._line is not None
    wire._line.transport = ClosedUnderneath()
    with pytest.raises(ConnectionError, match="the handler is closed"):
        await wire.call("PING")
    assert await wire.call("ECHO", "again") == b"again"
    await wire.close()


async def test_after_a_cancelled_exchange_replies_answer_the_right_question(redis_url, run_name):
    wire = Wire(redis_url)
    await wire.call("PING")
    waiting = asyncio.create_task(wire.call("BLPOP", f"ma:{{{run_name}}}:none", 5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await wire.call("ECHO", "mine") == b"mine"
    await wire.close()


async def test_a_connection_that_was_closed_between_two_exchanges_is_lost_and_the_next_one_dials(redis_url):
    """Without uvloop too, where a closed transport of Python 3.12 fails with another error."""
    wire, other = Wire(redis_url), Wire(redis_url)
    await other.call("CLIENT", "KILL", "ID", await wire.call("CLIENT", "ID"))
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectionError):
        await wire.exchange([("PING",)])
    assert await wire.call("ECHO", "again") == b"again"
    await asyncio.gather(wire.close(), other.close())


async def test_a_large_body_comes_whole_over_tls(redis_url, run_name, tmp_path):
    """The loop's own TLS hands it over in many reads of one buffer."""
    body, key = os.urandom(1_000_000), f"ma:{{{run_name}}}:body"
    async with tls_before(Path(redis_url.removeprefix("unix://")), tmp_path) as (port, certificate):
        wire = Wire(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}")
        assert await wire.exchange([("SET", key, body), ("GET", key), ("DEL", key)]) == [b"OK", body, 1]
        await wire.close()


async def test_a_cancelled_caller_does_not_disturb_the_others_in_its_batch(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        calls = [asyncio.create_task(bus.link.run("ECHO", str(n))) for n in range(20)]
        await asyncio.sleep(0)
        for call in calls[::3]:
            call.cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [f for n, f in enumerate(found) if n % 3] == [str(n).encode() for n in range(20) if n % 3]


async def test_a_refused_command_fails_alone(redis_url, run_name):
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        good, bad, more = await asyncio.gather(
            bus.link.run("ECHO", "a"),
            bus.link.run("NO-SUCH-COMMAND"),
            bus.link.run("ECHO", "b"),
            return_exceptions=True,
        )
        assert (good, more) == (b"a", b"b")
        assert isinstance(bad, InvariantBroken)


async def test_a_call_that_arrives_after_later_ones_changes_nothing(redis_url, run_name):
    """What a connection given up long ago still had in its buffers."""
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        keys = bus.keys
        out = Out(PROMPTS, a_task())
        named, args = hop_args(
            Commit(), [Placed(out, b"x")], keys=keys, stream_keys=StreamKeys(keys), bound=0
        )  # fmt: skip
        fixed = [keys.state, keys.ledger, keys.open_groups, keys.in_flight_bytes, keys.marks("sender"), keys.names]

        async def call(number: int) -> list[list[bytes]]:
            return await bus.link.run_script(COMMIT, [*fixed, *named], ["append", number, 1, "", "", *args])

        assert (await call(7))[0][0] == b"ok"
        assert (await call(7))[0][0] == b"done"
        assert (await call(9))[0][0] == b"ok"
        assert (await call(8))[0][0] == b"done"
        assert await bus.length(PROMPTS) == 2
