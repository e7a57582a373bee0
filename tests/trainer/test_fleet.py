"""Who is sent a version, and which way: what the trainer and the publisher fold from the events log."""

from __future__ import annotations

from typing import Any

from actors.publisher.plan import Ways, choose_ways
from actors.trainer.fleet import ASIDE_S, Fleet, Seat
from actors.trainer.transports.nccl import first_ranks
from bus.messages.control import Event, Vitals
from bus.messages.weights import WeightPlan


def test_engines_are_counted_on_between_an_activation_and_the_next_trouble() -> None:
    def event(kind: str, wall: float, **data: Any) -> Event:
        return Event(actor="w", kind=kind, text="", wall=wall, data=data)

    fleet = Fleet(timeout_s=10.0)
    fleet.fold(event("joined", 0.0))
    assert fleet.able(0.0) == {}
    for stint, trouble in enumerate(("joined", "engine stalled", "transport failed"), start=1):
        fleet.fold(event("activated", 0.5, gpus=2, host="h"))
        fleet.fold(event("activated", 1.0, gpus=2, host="h"))
        assert fleet.able(11.0) == {"w": Seat(2, "h", stint)}, "a new stint asks for a new group"
        assert fleet.able(11.1) == {}, "silent for too long"
        fleet.fold(event(trouble, 2.0))
        assert fleet.able(2.0) == {}
    for state, version, there in (("running", 1, True), ("draining", 1, False), ("running", -1, False)):
        fleet.fold(event("activated", 3.0))
        vitals = Vitals(actor="w", role="generation", pid=1, host="h", state=state, wall=4.0, version=version)  # type: ignore[arg-type]
        fleet.fold(vitals)
        assert bool(fleet.able(4.0)) is there


def test_an_engine_that_a_way_fails_again_and_again_gets_files_for_a_while() -> None:
    def event(kind: str, wall: float, transport: str) -> Event:
        return Event(actor="w", kind=kind, text="", wall=wall, data={"transport": transport})

    fleet = Fleet(timeout_s=10.0)
    for wall in (1.0, 2.0):
        assert fleet.aside(wall) == set()
        fleet.fold(event("transport failed", wall, "ipc"))
        fleet.fold(event("activated", wall, "disk"))
    assert fleet.aside(2.0) == {"w"} and fleet.able(2.0) == {}
    fleet.fold(event("activated", 2.0 + ASIDE_S, "disk"))
    assert fleet.aside(2.0 + ASIDE_S) == set() and set(fleet.able(2.0 + ASIDE_S)) == {"w"}, "one more try"
    fleet.fold(event("transport failed", 3.0 + ASIDE_S, "ipc"))
    assert fleet.aside(3.0 + ASIDE_S) == {"w"}
    fleet.fold(event("activated", 4.0 + ASIDE_S, "ipc"))
    fleet.fold(event("transport failed", 5.0 + ASIDE_S, "ipc"))
    assert fleet.aside(5.0 + ASIDE_S) == set(), "one that works again starts from nothing"


def test_who_the_announced_way_does_not_reach_gets_files() -> None:
    group = WeightPlan(transport="nccl", buckets=(), workers=("a", "b"))
    serving = {"a": 1, "b": -1, "c": 1}

    def choose(plan: WeightPlan | None, *, have_files: bool) -> Ways:
        return choose_ways("abc", serving=serving, plan=plan, files_only={"b"}, have_files=have_files)

    assert choose(None, have_files=False) == Ways(["a", "b", "c"], [], [])
    assert choose(group, have_files=True) == Ways(["a"], ["b", "c"], [])
    assert choose(group, have_files=False) == Ways(["a"], [], ["b", "c"])
    changes = WeightPlan(transport="delta", buckets=(), base=1)
    assert choose(changes, have_files=False) == Ways(["a", "c"], [], ["b"])


def test_every_gpu_of_every_engine_has_a_rank() -> None:
    assert first_ranks({"b": 2, "a": 1, "c": 4}) == ({"a": 1, "b": 2, "c": 4}, 8)
