"""The ledger closes at every instant, and when it does not it names who is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from bus import Bus, BusConfig, Commit, Entry, Out, Stream, ledger
from bus.ledger import HOME, Accounts, Found, accounts_of, audit
from bus.messages.groups import GroupKept, OpenGroup
from bus.messages.samples import Parked, PrefixResume, Scored
from bus.messages.versions import PolicyVersion, VersionSpan
from bus.topology import GROUPS, PARKED, PREFIXES, PROMPTS, ROLLOUTS, SCORED
from tests.bus.suite.conformance import publish, put_raw, reader_of
from tests.bus.suite.messages import a_group, a_response, a_rollout, a_task, an_open_group, more

N = 4  # samples of a group


@pytest_asyncio.fixture
async def bus(redis_url: str, run_name: str) -> AsyncIterator[Bus]:
    async with Bus(BusConfig(url=redis_url, run=run_name, deadline_s=10)) as bus:
        yield bus


async def issue(bus: Bus, group: str, n: int = N) -> None:
    await bus.commit(
        Commit(
            append=[Out(PROMPTS, a_task(i, group, n_samples=n)) for i in range(n)],
            open_groups={group: an_open_group(group, n)},
            ledger=ledger.issued(n),
        )
    )


async def take(bus: Bus, stream: Stream, readers: str, n: int) -> list[Entry]:
    reader = await reader_of(bus, "me", [stream], readers)
    entries: list[Entry] = []
    while len(entries) < n:
        entries += await reader.read(n - len(entries), 0)
    await reader.close()
    return entries


# -- the equation -----------------------------------------------------------------------------------------------------


async def test_it_closes_at_each_hop_of_a_groups_life(bus: Bus) -> None:
    async def closes(**located: int) -> None:
        seen = await ledger.check(bus)
        assert seen.closes, seen.text()
        assert {name: n for name, n in seen.located.items() if n} == located

    await closes()
    await issue(bus, "g1")
    await closes(prompts=N)
    first, *rest = await take(bus, PROMPTS, "generation", N)
    part = a_response(5, version=1)
    parked = Parked(task=await bus.message(first), response=part, reason="drain")
    await bus.commit(Commit(ack=(first,), append=(Out(PARKED, parked),), ledger=ledger.generated("w1", part.spans)))
    await closes(prompts=N - 1, parked=1)
    [entry] = await take(bus, PARKED, "partial", 1)
    resume = PrefixResume(task=parked.task, response=part)
    await bus.commit(Commit(ack=(entry,), append=(Out(PREFIXES, resume),)))
    await closes(prompts=N - 1, prefixes=1)
    for entry in [*(await take(bus, PREFIXES, "generation", 1)), *rest]:
        message = await bus.message(entry)
        resumed = isinstance(message, PrefixResume)
        task = message.task if resumed else message
        whole = more(part if resumed else a_response(0), 3, PolicyVersion(2, 1))
        out = a_rollout(task)
        out = type(out)(task=task, response=whole, finish="stop", worker="w2", resumed_tokens=5 if resumed else 0)
        moves = ledger.generated("w2", ledger.spans_after(whole.spans, out.resumed_tokens))
        await bus.commit(Commit(ack=(entry,), append=(Out(ROLLOUTS, out),), ledger=moves))
    await closes(rollouts=N)
    for entry in await take(bus, ROLLOUTS, "reward", N):
        scored = Scored(rollout=await bus.message(entry), reward=1.0)
        await bus.commit(Commit(ack=(entry,), append=(Out(SCORED, scored),)))
    await closes(scored=N)
    entries = await take(bus, SCORED, "filter", N)
    samples = tuple([await bus.message(entry) for entry in entries])
    kept = GroupKept(group_id="g1", prompt_id="p", samples=samples)
    await bus.commit(Commit(ack=entries, append=(Out(GROUPS, kept),)))
    await closes(groups=N)
    [entry] = await take(bus, GROUPS, "trainer", 1)
    spans = [span for sample in samples for span in sample.rollout.response.spans]
    await bus.commit(Commit(ack=(entry,), close_groups=("g1",), ledger=ledger.trained(N, spans)))
    await closes()
    accounts = await ledger.read_accounts(bus)
    assert (accounts.issued, accounts.trained, accounts.pending) == (N, N, 0)
    assert accounts.tokens_generated == accounts.tokens_trained == 5 + 3 * N
    assert accounts.rows("worker") == [("w1", {"generated": 5}), ("w2", {"generated": 3 * N})]
    assert accounts.rows("version") == [
        ("1", {"generated": 5, "trained": 5, "dropped or pending": 0}),
        ("2", {"generated": 3 * N, "trained": 3 * N, "dropped or pending": 0}),
    ]


async def test_a_dropped_group_closes_with_its_reason(bus: Bus) -> None:
    await issue(bus, "g1")
    entries = await take(bus, PROMPTS, "generation", N)
    await bus.commit(Commit(ack=entries, close_groups=("g1",), ledger=ledger.dropped("stale", N, 0)))
    seen = await ledger.check(bus)
    assert seen.closes and seen.accounts.dropped == {"stale": N} and not seen.accounts.tokens_dropped
    assert seen.text().startswith(f"issued {N} = trained 0 + dropped {N} + pending 0 · closes")


async def test_it_closes_at_any_moment_while_samples_move(bus: Bus) -> None:
    """A look at one instant cannot miss a sample that moves; a scan stream by stream would."""
    moving = True

    async def move(name: str) -> None:
        for number in range(12):
            group = f"g{name}{number}"
            await issue(bus, group)
            reader = await reader_of(bus, name)
            for entry in await reader.read(N, 0):
                task = await bus.message(entry)
                out = Out(PARKED, Parked(task=task, response=a_response(2), reason="drain"))
                moves = ledger.generated(name, a_response(2).spans)
                await bus.commit(Commit(ack=(entry,), append=(out,), ledger=moves))
            await reader.close()
            partial = await reader_of(bus, name, [PARKED], "partial")
            for entry in await partial.read(N, 0):
                parked = await bus.message(entry)
                out = Out(PREFIXES, PrefixResume(task=parked.task, response=parked.response))
                await bus.commit(Commit(ack=(entry,), append=(out,)))
            await partial.close()

    async def look() -> int:
        looks = 0
        while moving:
            seen = await ledger.check(bus)
            assert seen.closes, seen.text()
            looks += 1
        return looks

    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(look())
        movers = [tasks.create_task(move(name)) for name in "abc"]
        await asyncio.gather(*movers)
        moving = False
    assert looking.result() > 10 and (await ledger.check(bus)).accounts.pending == 36 * N


# -- when it does not close -------------------------------------------------------------------------------------------


async def test_a_vanished_entry_is_named(bus: Bus) -> None:
    await issue(bus, "g1")
    victim = (await bus.scan_all(PROMPTS))[2]
    await bus.link.run("XDEL", bus.keys.stream("prompts"), victim.id)
    seen = await ledger.check(bus)
    assert seen.missing == ("g1/2",) and not seen.closes
    assert "DOES NOT CLOSE · 1 in no stream: g1/2" in seen.text()


async def test_an_entry_of_a_closed_group_is_named(bus: Bus) -> None:
    await issue(bus, "g1", 1)
    await publish(bus, 1, group="g-never-issued")
    assert (await ledger.check(bus)).extra == ("g-never-issued/0",)


def test_an_entry_of_a_closed_group_is_named_however_many_samples_it_holds() -> None:
    for samples in (1, 3):
        seen = audit(Accounts(), {}, {GROUPS.name: [Found("1-0", "g1", "g1", samples=samples)]})
        assert (seen.extra, seen.closes, seen.located) == (("g1",), False, {GROUPS.name: samples})


async def test_a_sample_in_two_entries_is_named(bus: Bus) -> None:
    await issue(bus, "g1", 2)
    await bus.append([Out(ROLLOUTS, a_rollout(a_task(1, "g1", n_samples=2), 0))])
    seen = await ledger.check(bus)
    assert seen.doubled == ("g1/1",) and "in two entries" in seen.text()


async def test_a_kept_group_with_too_few_samples_is_noticed(bus: Bus) -> None:
    await bus.commit(
        Commit(
            append=(Out(GROUPS, a_group("g1", n_samples=2, n_tokens=0)),),
            open_groups={"g1": an_open_group("g1", 3)},
            ledger=ledger.issued(3),
        )
    )
    assert (await ledger.check(bus)).missing == ("g1/2",)


@pytest.mark.parametrize(
    ("account", "says"), [("issued", "+1 samples"), ("trained", "-1 samples"), ("tokens/generated", "+1 tokens")]
)
async def test_an_account_that_moved_alone_is_noticed(bus: Bus, account: str, says: str) -> None:
    await issue(bus, "g1")
    await bus.commit(Commit(ledger={account: 1}))
    seen = await ledger.check(bus)
    assert not seen.closes and says in seen.text() and not seen.missing


async def test_dead_letters_evaluation_and_stray_bytes_are_not_pending(bus: Bus) -> None:
    await issue(bus, "g1", 1)
    parked = Parked(task=a_task(0, "e5"), response=a_response(3), reason="drain")
    await bus.append([Out(PARKED, parked)])
    await put_raw(bus, PROMPTS, "body", b"\xc1")
    await put_raw(bus, SCORED, "tokens", "many", "note", "samples=many")
    for odd in ("\u00b2", "9" * 5000):  # what Python's int takes for no number, though all are digits
        await put_raw(bus, SCORED, "tokens", odd, "note", f"samples={odd}")
    seen = await ledger.check(bus)
    assert seen.closes and seen.located == dict.fromkeys(seen.located, 0) | {"prompts": 1}


async def test_groups_of_a_lost_bus_may_be_missing_until_they_are_issued_again(bus: Bus) -> None:
    await bus.commit(Commit(open_groups={"g1": an_open_group("g1", 2)}, ledger=ledger.issued(2), state={"reissue": "pending"}))
    seen = await ledger.check(bus)
    assert seen.closes and seen.missing == ("g1/0", "g1/1") and "issued again" in seen.text()
    await bus.commit(Commit(state={"reissue": "done"}))
    assert not (await ledger.check(bus)).closes


# -- pure parts -------------------------------------------------------------------------------------------------------

PLACES = st.dictionaries(
    st.tuples(st.integers(0, 5), st.integers(0, 2)),
    st.lists(st.sampled_from([stream.name for stream in HOME if stream is not GROUPS]), max_size=3),
)


@given(PLACES)
def test_it_closes_exactly_when_each_sample_lies_in_one_entry(places: dict[tuple[int, int], list[str]]) -> None:
    """Groups 0 to 3 are open with three samples each, 4 and 5 are closed."""
    groups = {f"g{g}": OpenGroup(group_id=f"g{g}", prompt_id="p", n_samples=3) for g in range(4)}
    entries: dict[str, list[Found]] = {stream.name: [] for stream in HOME}
    for (group, index), streams in places.items():
        for name in streams:
            entries[name].append(Found("1-0", f"g{group}/{index}", f"g{group}"))
    seen = audit(Accounts(issued=12), groups, entries)
    times = {f"g{g}/{i}": len(places.get((g, i), [])) for g in range(6) for i in range(3)}
    assert set(seen.missing) == {s for s, n in times.items() if n == 0 and s < "g4"}
    assert set(seen.doubled) == {s for s, n in times.items() if n > 1 and s < "g4"}
    assert set(seen.extra) == {s for s, n in times.items() if n > 0 and s >= "g4"}
    assert seen.closes == (not seen.missing and not seen.doubled and not seen.extra)


SPANS = st.lists(st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)), max_size=6)


@given(SPANS, st.integers(0, 60))
def test_spans_after_a_prefix_hold_the_rest(spans: list[VersionSpan], skip: int) -> None:
    rest = ledger.spans_after(spans, skip)
    tokens = [span.version for span in spans for _ in range(span.n)]
    assert [span.version for span in rest for _ in range(span.n)] == tokens[skip:] and all(s.n > 0 for s in rest)


@given(SPANS, SPANS)
def test_views_add_up_to_their_accounts(made: list[VersionSpan], used: list[VersionSpan]) -> None:
    moves = ledger.generated("host/with/slash", made) | ledger.trained(3, used)
    accounts = accounts_of(moves)
    assert sum(accounts.tokens_by_version.values()) == sum(accounts.tokens_by_worker.values())
    assert accounts.tokens_generated == sum(accounts.tokens_by_version.values()) == sum(s.n for s in made)
    assert accounts.tokens_trained == sum(accounts.tokens_trained_by_version.values()) == sum(s.n for s in used)
    assert not accounts.other and accounts.trained == 3


def test_rows_by_reason_end_with_what_is_pending() -> None:
    accounts = accounts_of({"issued": 9, "trained": 4, "dropped/stale": 2, "tokens/generated": 50, "tokens/dropped/restarted": 7})
    assert accounts.rows("reason") == [
        ("trained", {"samples": 4, "tokens": 0}),
        ("dropped: restarted", {"samples": 0, "tokens": 7}),
        ("dropped: stale", {"samples": 2, "tokens": 0}),
        ("pending", {"samples": 3, "tokens": 43}),
    ]
    assert ledger.dropped("stale", 0, 7) == {"tokens/dropped/stale": 7}
    assert accounts_of({"of/tomorrow": 1}).other == {"of/tomorrow": 1}


# -- it does not grow -------------------------------------------------------------------------------------------------


def made(version: int, n: int) -> list[VersionSpan]:
    return [VersionSpan(version, version, n)]


async def steps(bus: Bus, versions: range) -> None:
    """Each makes 7 tokens, and 5 of the version before are trained."""
    for version in versions:
        await bus.commit(Commit(ledger=ledger.issued(1) | ledger.generated("w", made(version, 7))))
        await bus.commit(Commit(ledger=ledger.trained(1, made(version - 1, 5))))


async def test_accounts_do_not_grow_with_the_versions(bus: Bus) -> None:
    await steps(bus, range(2, 202))
    size = len(await bus.hash_of(bus.keys.ledger))
    await steps(bus, range(202, 602))
    assert len(await bus.hash_of(bus.keys.ledger)) == size < 150
    accounts = await ledger.read_accounts(bus)
    assert accounts.tokens_generated == sum(accounts.tokens_by_version.values()) == 600 * 7
    assert accounts.tokens_trained == sum(accounts.tokens_trained_by_version.values()) == 600 * 5
    assert max(accounts.tokens_by_version) == 601 and accounts.tokens_by_version[ledger.OLDER] > 500 * 7
    assert accounts.rows("version")[0][0] == "older"


async def test_tokens_of_a_version_that_is_told_apart_no_more_are_counted_with_the_older_ones(bus: Bus) -> None:
    await steps(bus, range(2, 202))
    before = await ledger.read_accounts(bus)
    await bus.commit(Commit(ledger=ledger.trained(1, made(3, 11)) | {"dropped/stale": 1}))
    after = await ledger.read_accounts(bus)
    assert after.tokens_trained_by_version == before.tokens_trained_by_version | {
        ledger.OLDER: before.tokens_trained_by_version[ledger.OLDER] + 11
    }


@pytest.mark.parametrize("newest", [5_000, 10**9])
async def test_version_numbers_that_were_left_out_cost_nothing(bus: Bus, newest: int) -> None:
    await steps(bus, range(2, 40))
    await steps(bus, range(newest, newest + 2))
    accounts = await ledger.read_accounts(bus)
    assert accounts.tokens_by_version == {ledger.OLDER: 38 * 7, newest: 7, newest + 1: 7}
    assert accounts.tokens_generated == 40 * 7


async def test_accounts_carried_to_another_server_are_the_same(bus: Bus, redis_url: str, run_name: str) -> None:
    await steps(bus, range(2, 302))
    saved = await bus.snapshot()
    async with Bus(BusConfig(url=redis_url, run=f"{run_name}-2", deadline_s=10)) as other:
        await other.commit(Commit(ledger=saved.ledger, state={"folded": saved.state["folded"]}))
        assert await other.hash_of(other.keys.ledger) == await bus.hash_of(bus.keys.ledger)
        await steps(other, range(302, 304))
        assert len(await other.hash_of(other.keys.ledger)) == len(saved.ledger)
        await other.forget_run()


async def test_many_samples_of_one_call_move_an_account_once_each(bus: Bus) -> None:
    """They share a script call, whose moves are added up."""
    await asyncio.gather(*(bus.commit(Commit(ledger=ledger.generated("w", made(1, n)))) for n in range(50)))
    assert (await ledger.read_accounts(bus)).tokens_generated == sum(range(50))
