"""The suite for what a bus must survive: a killed server, and replies that are lost after the work was done.

`check_server_*` take `make_bus` and a server that can be killed and started again; `check_reply_*` take `make_bus` (to look
from outside), and `make_lossy`, which makes a Bus through the given LossyProxy.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from bus import ledger
from bus.errors import BusUnreachable, InvariantBroken
from bus.knobs import propose
from bus.knobs.live import publish_initial, read_history
from bus.messages.control import Event
from bus.streams.entry import Commit, Entry, Guard, Out
from bus.streams.reader import Reader
from bus.streams.redis import Bus
from bus.topology import EVENTS, PROMPTS, ROLLOUTS
from tests.bus.suite.conformance import DEADLINE_S, MakeBus, eventually, ids_on, publish, reader_of
from tests.bus.suite.knobs import plain_kinds, plain_knobs
from tests.bus.suite.messages import a_rollout, a_task, an_open_group
from tests.bus.suite.proxy import LossyProxy

N_SAMPLES = 400


class Server(Protocol):
    """A server under the control of a test. Both calls block."""

    def kill(self) -> None: ...

    def start(self) -> None: ...


ServerCheck = Callable[[MakeBus, Server], Awaitable[None]]
ReplyCheck = Callable[[MakeBus, LossyProxy, Callable[[], Bus]], Awaitable[None]]


async def written(bus: Bus) -> None:
    """From now on what is answered is in the file, and so is all before: by `everysec` a server that is just syncing answers
    first and writes later. A restart forgets it."""
    await bus.link.run("CONFIG", "SET", "appendfsync", "always")


async def restart(server: Server) -> None:
    """SIGKILL, and start again on what the append-only file holds."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


async def _sampler(bus: Bus, n: int) -> None:
    """Issue samples 0..n-1 one by one as the sampler does: cursor, entry, registry and account in one guarded commit."""
    while (at := int(await bus.state("cursor") or 0)) < n:
        group = f"g{at:07d}"
        try:
            await bus.commit(
                Commit(
                    append=(Out(PROMPTS, a_task(0, group)),),
                    open_groups={group: an_open_group(group)},
                    ledger=ledger.issued(1),
                    guard=Guard("cursor", str(at) if at else "", str(at + 1)),
                )
            )
        except InvariantBroken:
            if int(await bus.state("cursor") or 0) == at:  # the server forgot its last moments, else it is a bug
                raise


async def _worker(bus: Bus, reader: Reader, stop: asyncio.Event) -> None:
    """Move prompts to rollouts, as a rollout worker does."""
    while not stop.is_set():
        for entry in await reader.read(16, 0.05):
            task = (await bus.message(entry)).task if entry.stream is not PROMPTS else await bus.message(entry)
            out = a_rollout(task, 3)
            moves = ledger.generated(reader.me, out.response.spans)
            await bus.commit(Commit(ack=(entry,), append=(Out(ROLLOUTS, out),), ledger=moves))
            reader.forget([entry])


async def _until_length(bus: Bus, n: int) -> None:
    while await bus.length(ROLLOUTS) < n:
        await bus.clock.sleep(0.002)


async def check_server_killed_in_the_middle_loses_and_doubles_nothing(make_bus: MakeBus, server: Server) -> None:
    async with make_bus() as sampling, make_bus() as working, make_bus() as looking:
        stop = asyncio.Event()
        readers = [await reader_of(working, name) for name in ("a", "b")]
        async with asyncio.timeout(3 * DEADLINE_S), asyncio.TaskGroup() as tasks:
            issuing = tasks.create_task(_sampler(sampling, N_SAMPLES))
            for reader in readers:
                tasks.create_task(_worker(working, reader, stop))
            for part in (1, 2, 3):
                await _until_length(looking, part * N_SAMPLES // 4)
                await restart(server)
            while not issuing.done() or await looking.length(ROLLOUTS) < N_SAMPLES:
                for reader in readers:  # what was delivered to nobody in a reply that died with the server
                    reader.offer(await reader.claim(1.0))
                await asyncio.sleep(0.02)
            stop.set()
        counts = Counter(await ids_on(looking, ROLLOUTS))
        assert len(counts) == N_SAMPLES and set(counts.values()) == {1}
        assert await looking.length(PROMPTS) == 0
        seen = await ledger.check(looking)
        assert seen.closes and seen.accounts.issued == N_SAMPLES, seen.text()
        assert working.link.server_restarts >= 1
        for reader in readers:
            await reader.close()


async def check_server_back_with_its_entries_leases_and_blobs(make_bus: MakeBus, server: Server) -> None:
    async with make_bus() as bus:
        await publish(bus, 3)
        await bus.append([Out(PROMPTS, a_task(9, prompt_tokens=50_000))])
        reader, peer = await reader_of(bus, "a"), await reader_of(bus, "b")
        held = await reader.read(2, 0)
        assert await bus.save_prefix(held[0], "a", held[0].fields["id"], b"tokens")
        await bus.commit(Commit(ledger={"issued": 4}, state={"cursor": "4"}))
        await written(bus)
        await restart(server)
        assert await bus.state("cursor") == "4" and (await bus.snapshot()).ledger == {"issued": 4}
        assert await bus.load_prefix(held[0].fields["id"]) == [b"tokens"]
        assert (await bus.commit(Commit(ack=held[:1], delete_prefixes=(held[0].fields["id"],)))).done
        assert [e.id for e in await peer.claim(0)] == [held[1].id]
        rest: list[str] = []
        while len(rest) < 2:
            for entry in await peer.read(5, 0):
                rest.append(entry.fields["id"])
                message = await bus.message(entry)
        assert rest == ["g0000001/2", "g0000001/9"] and len(message.prompt_tokens) == 200_000
        await reader.close()
        await peer.close()


async def check_server_gone_for_good_ends_in_one_line(make_bus: MakeBus, server: Server) -> None:
    async with make_bus() as bus:
        await asyncio.to_thread(server.kill)
        bus.link.deadline_s = 0.3
        for call in (bus.length(PROMPTS), bus.commit(Commit(ledger={"issued": 1})), publish(bus, 1)):
            try:
                await call
            except BusUnreachable as error:
                assert "\n" not in str(error)
            else:
                raise AssertionError("an answer from a dead server")
        await asyncio.to_thread(server.start)
        bus.link.deadline_s = DEADLINE_S
        await publish(bus, 1)
        assert await bus.length(PROMPTS) == 1, "the bus is usable again"


async def check_reply_of_a_commit_lost(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    """Done once, reported as done, and the body it wrote is still there."""
    async with make_bus() as outside, make_lossy() as bus:
        await publish(outside, 3)
        reader = await reader_of(outside, "a")
        small, large, parted = await reader.read(3, 0)
        for entry, n_tokens in ((small, 3), (large, 20_000)):
            proxy.lose_reply_to("EVALSHA")
            out = Out(ROLLOUTS, a_rollout(a_task(), n_tokens))
            result = await bus.commit(Commit(ack=(entry,), append=(out,), ledger={"tokens/generated": n_tokens}))
            assert result.done and not result.moved
        rollouts = [await outside.message(e) for e in await outside.scan_all(ROLLOUTS)]
        assert [r.response.n_tokens for r in rollouts] == [3, 20_000]
        assert (await outside.snapshot()).ledger == {"tokens/generated": 20_003}
        [peer_has] = await (peer := await reader_of(outside, "b")).claim(0)
        assert (await outside.commit(Commit(ack=(peer_has,)))).done
        proxy.lose_reply_to("EVALSHA")
        refused = await bus.commit(Commit(ack=(parted,), append=(Out(ROLLOUTS, a_rollout(a_task())),)))
        assert not refused.done and refused.moved == (parted.id,), "what a peer finished is not ours on a second try"
        assert await outside.length(ROLLOUTS) == 2 and proxy.lost == 3
        await reader.close()
        await peer.close()


async def check_reply_of_a_commit_lost_and_its_mark_too(
    make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]
) -> None:
    """The second try finds the entry gone and cannot know why: whatever it reports, the body that took effect stays."""
    async with make_bus() as outside, make_lossy() as bus:

        async def forget() -> None:
            await outside.link.run("DEL", bus._fixed_keys[4])

        await publish(outside, 1)
        reader = await reader_of(outside, "a")
        proxy.after_loss = forget
        proxy.lose_reply_to("EVALSHA")
        await bus.commit(Commit(ack=await reader.read(1, 0), append=(Out(ROLLOUTS, a_rollout(a_task(), 20_000)),)))
        proxy.after_loss = None
        [entry] = await outside.scan_all(ROLLOUTS)
        assert (await outside.message(entry)).response.n_tokens == 20_000 and proxy.lost == 1
        await reader.close()


async def check_marks_outlive_the_last_commit_by_a_day(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    async with make_bus() as bus:
        await publish(bus, 1)
        reader = await reader_of(bus, "a")
        [entry] = await reader.read(1, 0)
        for again in (bus.commit(Commit(ledger={"issued": 1})), bus.save_prefix(entry, "a", "g0000001/0", b"one")):
            await bus.link.run("EXPIRE", bus._fixed_keys[4], 60)
            await again
            assert int(await bus.link.run("TTL", bus._fixed_keys[4])) > 86_000
        await reader.close()


async def check_reply_of_an_unconditional_commit_lost(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    """Without acknowledgement and guard, too, a repetition is known."""
    async with make_bus() as outside, make_lossy() as bus:
        for index in range(3):
            proxy.lose_reply_to("EVALSHA")
            await bus.commit(Commit(append=(Out(PROMPTS, a_task(index)),), ledger={"issued": 1}))
        assert await ids_on(outside, PROMPTS) == [f"g0000001/{i}" for i in range(3)]
        assert (await outside.snapshot()).ledger == {"issued": 3} and proxy.lost == 3


async def check_reply_of_a_whole_batch_lost(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    async with make_bus() as outside, make_lossy() as bus:
        await publish(outside, 100, prompt_tokens=1)
        reader = await reader_of(outside, "a")
        entries = await reader.read(100, 0)
        while len(entries) < 100:
            entries += await reader.read(100 - len(entries), 0)
        proxy.lose_reply_to("EVALSHA", "EVALSHA")
        out = Out(ROLLOUTS, a_rollout(a_task()))
        results = await asyncio.gather(*(bus.commit(Commit(ack=(e,), append=(out,))) for e in entries))
        assert all(result.done for result in results)
        assert await outside.length(ROLLOUTS) == 100 and await outside.length(PROMPTS) == 0 and proxy.lost >= 1
        await reader.close()


async def check_reply_of_a_saved_prefix_lost(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    """Saved once: tokens saved twice would be trained twice."""
    async with make_bus() as outside, make_lossy() as bus:
        await publish(outside, 1)
        reader = await reader_of(outside, "a")
        [entry] = await reader.read(1, 0)
        proxy.lose_reply_to("EVALSHA")
        assert await bus.save_prefix(entry, "a", "g0000001/0", b"one")
        assert await bus.save_prefix(entry, "a", "g0000001/0", b"two")
        assert await outside.load_prefix("g0000001/0") == [b"one", b"two"] and proxy.lost == 1
        await reader.close()


async def check_reply_of_a_read_lost(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    """Entries that were given to us in a reply that never came are read again, from our own pending list."""
    async with make_bus() as outside, make_lossy() as bus:
        await publish(outside, 5)
        reader = await reader_of(bus, "a")
        proxy.lose_reply_to("XREADGROUP")
        entries: list[Entry] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(entries) < 5:
                entries += await reader.read(3, 0)
        assert sorted(e.fields["id"] for e in entries) == [f"g0000001/{i}" for i in range(5)] and proxy.lost == 1
        assert (await outside.commit(Commit(ack=entries))).done
        await reader.close()


async def check_reply_of_a_body_lost(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    async with make_bus() as outside, make_lossy() as bus:
        proxy.lose_reply_to("RPUSH", "LINDEX")
        ref = await bus.blobs.put(b"x" * 700_000)
        assert await bus.blobs.get(ref) == b"x" * 700_000 and await outside.blobs.get(ref) == b"x" * 700_000


async def check_reply_of_news_lost(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    """A small message is known when it is repeated. A larger one is not: news goes on, perhaps twice; an entry of a data
    stream is never written blindly a second time."""
    news = Event(actor="a", kind="k", text="x" * 20_000, wall=0.0)
    async with make_bus() as outside, make_lossy() as bus:
        proxy.lose_reply_to("EVALSHA")
        await publish(bus, 1)
        assert await outside.length(PROMPTS) == 1
        proxy.lose_reply_to("XADD")
        await bus.append([Out(EVENTS, news)])
        assert await outside.length(EVENTS) in (1, 2)
        proxy.lose_reply_to("XADD")
        try:
            await publish(bus, 1, prompt_tokens=5000)
        except BusUnreachable as error:
            assert "unknown" in str(error)
        else:
            raise AssertionError("an unknown outcome was passed over")
        assert await outside.length(PROMPTS) == 2


async def check_reply_of_a_knob_patch_lost(make_bus: MakeBus, proxy: LossyProxy, make_lossy: Callable[[], Bus]) -> None:
    async with make_bus() as outside, make_lossy() as bus:
        proxy.lose_reply_to("EVALSHA")
        assert await publish_initial(bus, plain_knobs(), plain_kinds()) == []
        proxy.lose_reply_to("EVALSHA")
        assert (await propose(bus, {"lr": 0.5}, author="test")).epoch == 1
        assert [p.epoch for p in await read_history(outside)] == [0, 1] and proxy.lost == 2


SERVER_CHECKS: dict[str, ServerCheck] = {n: c for n, c in globals().items() if n.startswith("check_server_")}
REPLY_CHECKS: dict[str, ReplyCheck] = {n: c for n, c in globals().items() if n.startswith(("check_reply_", "check_marks_"))}

__all__ = ("REPLY_CHECKS", "SERVER_CHECKS", "Server", "eventually", "restart")
