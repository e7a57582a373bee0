"""Who lives, who can be sent a version and which way, and what is done about files that nobody can load: pure decisions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.publisher.members import ASIDE_S, REFUSALS, UNHEARD_S, Members
from actors.publisher.plan import ROOM, TRIES, Target, Ways, choose_ways, in_the_way
from actors.trainer.transports.nccl import first_ranks
from bus.messages.active import Seat
from bus.messages.control import Event, Vitals
from bus.messages.policy import WeightManifest, WeightsReady
from bus.messages.versions import PolicyVersion
from bus.messages.waits import Wait

V7 = PolicyVersion(id=7, step=6)


def event(kind: str, wall: float = 0.0, worker: str = "w", **data: Any) -> Event:
    return Event(actor=worker, kind=kind, text="", wall=wall, data=data)


def beat(state: Any = "running", version: int = 1, *, wall: float = 0.0, waits_for: str = "") -> Vitals:
    return Vitals(actor="w", role="generation", pid=1, host="h", state=state, wall=wall, version=version, waits_for=waits_for)


def able(members: Members, now: float = 0.0) -> dict[str, Seat]:
    return members.able("nccl", "h", now)


def test_an_engine_on_the_trainers_gpu_is_there_while_it_is_lent_and_is_never_sent_to() -> None:
    members = Members(timeout_s=10.0, lent=("w",))
    members.fold(event("lent", version=-1), 0.0)
    assert members.serving == {"w": -1}, "it is ordered at once"
    members.fold(event("activated", version=1, gpus=1, host="h"), 1.0)
    assert members.serving == {"w": 1} and able(members) == {}
    members.fold(event("memory released", turn=2), 2.0)
    members.fold(beat("waiting", waits_for=Wait.UNLENT), 3.0)
    assert not members.all, "no order's deadline runs for it, and it has no slots"
    members.fold(event("lent", version=1), 4.0)
    assert members.serving == {"w": 1}, "what it serves already is not ordered again"


@pytest.mark.parametrize("skew_s", [-3600.0, -30.0, 0.0, 30.0])
def test_a_workers_own_clock_decides_nothing(skew_s: float) -> None:
    members = Members(timeout_s=10.0)
    members.fold(event("activated", 1000.0 + skew_s), 5.0)
    members.fold(beat(wall=1001.0 + skew_s), 6.0)
    members.expire(16.0)
    assert set(members.all) == set(able(members)) == {"w"}
    members.expire(16.1)
    assert not members.all, "silent for too long by the reader's clock"


def test_time_in_which_nothing_could_be_read_is_nobodys_silence() -> None:
    members = Members(timeout_s=10.0)
    members.fold(beat(), 0.0)
    members.expire(60.0, unread_s=55.0)
    assert set(members.all) == {"w"}


def test_who_is_back_after_a_cut_is_known_to_be_elsewhere_whatever_it_says_first() -> None:
    members = Members(timeout_s=10.0)
    members.fold(msgspec.structs.replace(beat(), memory="far", depot="http://far:1"), 0.0)
    members.expire(11.0)
    assert not members.all
    members.fold(event("activated", version=7), 40.0)
    assert (members.all["w"].memory, members.all["w"].depot) == ("far", "http://far:1")


def test_engines_can_be_sent_to_between_an_activation_and_the_next_trouble() -> None:
    members = Members(timeout_s=10.0)
    members.fold(event("joined"), 0.0)
    assert able(members) == {}
    for stint, trouble in enumerate(("joined", "engine stalled", "transport failed")):
        members.fold(event("activated", gpus=2, host="h", transport="nccl"), 1.0, f"{stint}-0")
        members.fold(event("activated", gpus=2, host="h", transport="nccl"), 2.0, "later")
        assert able(members) == {"w": Seat("w", 2, "h", f"{stint}-0")}, "another incarnation asks for another group"
        members.fold(event(trouble), 3.0)
        assert able(members) == {}
    for state, version, there in (("running", 1, True), ("draining", 1, False), ("running", -1, False)):
        members.fold(event("activated"), 4.0)
        members.fold(beat(state, version), 4.0)
        assert bool(able(members, 4.0)) is there


def test_handles_are_for_engines_of_the_trainers_host_and_of_one_size() -> None:
    members = Members(timeout_s=10.0)
    for name, gpus, host in (("a", 2, "h"), ("b", 1, "h"), ("c", 2, "h"), ("d", 2, "elsewhere")):
        members.fold(event("activated", worker=name, gpus=gpus, host=host), 0.0)
    assert [*members.able("ipc", "h", 0.0)] == ["a", "c"]
    assert [*members.able("nccl", "h", 0.0)] == ["a", "b", "c", "d"] and members.able("disk", "h", 0.0) == {}


def test_an_engine_that_a_transport_fails_again_and_again_gets_files_for_a_while() -> None:
    members = Members(timeout_s=1e9)
    for now in (1.0, 2.0):
        assert members.aside(now) == set()
        members.fold(event("activated", transport="disk"), now)
        members.fold(event("transport failed"), now)
        members.fold(event("activated", transport="disk"), now)
    assert members.aside(2.0) == {"w"} and able(members, 2.0) == {}
    assert members.aside(2.0 + ASIDE_S) == set() and set(able(members, 2.0 + ASIDE_S)) == {"w"}, "one more try"
    members.fold(event("transport failed"), 3.0 + ASIDE_S)
    assert members.aside(3.0 + ASIDE_S) == {"w"}
    members.fold(event("activated", transport="ipc"), 4.0 + ASIDE_S)
    members.fold(event("transport failed"), 5.0 + ASIDE_S)
    assert members.aside(5.0 + ASIDE_S) == set(), "one that works again starts from nothing"


def test_a_late_worker_takes_files_and_no_deadline_runs_while_it_boots() -> None:
    members = Members(timeout_s=1e9)
    members.fold(event("activated"), 0.0)
    members.all["w"].ordered = (7, 0.0)
    members.fold(beat(waits_for=Wait.BOOTING), 50.0)
    assert members.overdue(100.0, 60.0) == []
    members.fold(beat(waits_for="activation of version 7"), 101.0)
    assert members.overdue(160.0, 60.0) == [] and members.overdue(161.0, 60.0) == [("w", 7)]
    assert able(members) == {} and members.all["w"].ordered is None


def test_a_worker_that_refuses_files_again_and_again_gets_nothing_for_a_while() -> None:
    members = Members(timeout_s=1e9)
    members.fold(beat(), 0.0)
    for n in range(REFUSALS + 1):
        assert members.hopeless(1.0) == set()
        members.fold(event("weights refused", path=f"/{n}"), 1.0)
    assert members.hopeless(1.0) == {"w"} and members.hopeless(1.0 + ASIDE_S) == set()
    members.fold(event("activated"), 2.0)
    assert members.hopeless(2.0) == set()


# -- files that are kept ------------------------------------------------------------------------------------------------


def takes(version: int, serving: int = 1) -> Vitals:
    return msgspec.structs.replace(beat(version=serving), takes=version)


def ordered(members: Members, *versions: int, now: float) -> None:
    for version in versions:
        members.all["w"].order(version, now, fetched=True)


def test_what_a_worker_began_to_fetch_is_wanted_until_it_is_done_whatever_it_is_told_meanwhile() -> None:
    members = Members(timeout_s=1e9)
    members.fold(beat(), 0.0)
    ordered(members, 2, now=0.0)
    for n in range(3, 100):
        ordered(members, n, now=float(n))
    assert members.wanted(1000.0) == {2, 99}, "no more than that, however many it was told"
    assert len(members.all["w"].offered) <= UNHEARD_S
    members.fold(event("activated", version=2), 1000.0)
    assert members.wanted(1000.0) == {99}
    members.fold(event("activated", version=99), 1001.0)
    assert members.wanted(1001.0) == set()


@pytest.mark.parametrize("kind", ["activated", "transport failed"])
def test_a_worker_may_begin_with_an_order_of_which_a_newer_one_is_on_its_way(kind: str) -> None:
    """Over a link of half a second, several are."""
    members = Members(timeout_s=1e9)
    members.fold(beat(), 0.0)
    ordered(members, 2, now=0.0)
    ordered(members, 5, 6, 7, now=100.0)
    members.fold(event(kind, version=2), 100.1)
    assert members.wanted(100.1) >= {5, 6, 7}
    members.fold(takes(5), 100.0 + UNHEARD_S)
    assert members.wanted(100.0 + UNHEARD_S) == {5}, "it said so"
    members.fold(takes(-1), 101.0 + UNHEARD_S)
    assert members.wanted(101.0 + UNHEARD_S) == {5}, "it loads what came"
    members.fold(takes(-1, serving=5), 102.0 + UNHEARD_S)
    assert members.wanted(102.0 + UNHEARD_S) == set()


def test_a_host_that_vanishes_keeps_no_files() -> None:
    members = Members(timeout_s=10.0)
    members.fold(beat(), 0.0)
    ordered(members, 2, 3, now=0.0)
    members.fold(takes(2), 0.0)
    members.expire(10.1)
    assert members.wanted(10.1) == set()
    members.fold(takes(2), 60.0)
    assert members.wanted(60.0) == {2}, "it is back, and still at it"


def test_a_host_to_which_nothing_comes_keeps_no_files_longer_than_the_deadline() -> None:
    members = Members(timeout_s=1e9)
    members.fold(beat(), 0.0)
    ordered(members, 2, 3, now=0.0)
    members.fold(msgspec.structs.replace(takes(2), received=7), 50.0)
    assert members.overdue(61.0, 60.0) == [] and members.wanted(61.0) == {2, 3}, "it is slow, but it comes"
    assert members.overdue(111.0, 60.0) == [("w", 3)] and members.wanted(111.0) == set()


def test_old_versions_make_room_for_the_next_those_that_nobody_wants_first() -> None:
    held, each = [3, 4, 6, 7, 8], 10
    for missing, gone in ((0, []), (1, [4]), (10, [4]), (11, [4, 6]), (21, [4, 6, 7]), (31, [4, 6, 7, 3]), (999, [4, 6, 7, 3])):
        assert in_the_way(held, {3, 7, 8}, free=ROOM * each - missing, each=each) == gone, "the newest stays"


# -- the ways of a version -----------------------------------------------------------------------------------------


def ready(attempt: int, path: str) -> WeightsReady:
    return WeightsReady(version=V7, manifest=WeightManifest(path=path), attempt=attempt)


def test_who_is_not_sent_the_version_gets_files() -> None:
    a, b = Seat("a", stint="1"), Seat("b", stint="1")
    target = Target(V7, WeightManifest(transport="nccl", host="h"))
    target.seats = {"a": a, "b": b}
    seats = {"a": a, "b": Seat("b", stint="2")}  # b has come back since
    assert choose_ways("abc", target, seats) == Ways([], [], ["b", "c"]), "a waits until the trainer is ready"
    target.take(WeightsReady(version=V7, manifest=WeightManifest(transport="nccl", plan="p")))
    assert choose_ways("abc", target, seats) == Ways(["a"], [], ["b", "c"])
    target.take(ready(0, "/7"))
    assert choose_ways("abc", target, seats) == Ways(["a"], ["b", "c"], [])
    target.only_files()
    assert choose_ways("abc", target, seats) == Ways([], ["a", "b", "c"], [])


def test_refused_files_are_written_anew_and_not_for_ever() -> None:
    target = Target(V7, WeightManifest(path="/0"))
    for attempt in range(1, TRIES + 1):
        old = f"/{attempt - 1}"
        assert target.spoiled(old) and (target.files, target.attempt) == (None, attempt)
        assert not target.spoiled(old), "a second worker says the same"
        target.take(ready(attempt - 1, old))
        assert target.files is None, "an answer to an earlier order"
        target.take(ready(attempt, f"/{attempt}"))
    assert not target.spoiled("/0") and not target.spoiled(f"/{TRIES}")
    assert target.files is not None


def test_every_gpu_of_every_engine_has_a_rank() -> None:
    assert first_ranks({"b": 2, "a": 1, "c": 4}) == ({"a": 1, "b": 2, "c": 4}, 8)
