"""A run's past, folded from its records: what counts once, and what was lost (pure)."""

from __future__ import annotations

from typing import Any

from actors.recorder.history import History, history_of
from actors.recorder.records import records_of
from bus import Entry
from bus.messages.policy import StepDone
from bus.messages.versions import PolicyVersion
from bus.topology import POLICY

VERSION = PolicyVersion(1, 0)


def step(number: int, groups: int = 1) -> dict[str, Any]:
    return {"kind": "step", "step": number, "wall": float(number), "groups": [f"g{n}" for n in range(groups)], "metrics": {}}


def evaluated(number: int, score: float) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "wall": 0.0, "name": "held", "metrics": {"eval/held": score}}


def test_a_line_that_stands_twice_is_one_step() -> None:
    history = history_of([step(1), step(2), step(2), step(1), step(3)])
    assert [s.step for s in history.steps] == [1, 2, 3] and history.lost_steps == 0


def test_after_a_restore_the_step_of_the_checkpoint_stands_and_those_after_it_are_lost() -> None:
    past = [step(n) for n in (1, 2, 3, 4)] + [evaluated(2, 0.2), evaluated(4, 0.4), {"kind": "restored", "step": 2, "wall": 5.0}]
    history = history_of(past)
    assert ([s.step for s in history.steps], [e.step for e in history.evals], history.lost_steps) == ([1, 2], [2], 2)
    assert history.furthest == 4


def test_of_an_evaluation_done_twice_the_later_counts() -> None:
    history = history_of([evaluated(2, 0.2), evaluated(4, 0.4), evaluated(2, 0.3)])
    assert [(e.step, e.score) for e in history.evals_of("held")] == [(2, 0.3), (4, 0.4)]


def test_what_a_checkpoint_holds_is_not_unsaved() -> None:
    history: History = history_of([step(1, 3), step(2, 5), {"kind": "checkpoint", "step": 1, "wall": 1.0}, step(3, 7)])
    assert history.unsaved_groups() == 5 + 7


def test_a_step_names_the_members_of_groups_that_it_trained_in_part_alone() -> None:
    entry = Entry(id="1700000000000-0", stream=POLICY, readers="", fields={}, body=b"", size=0)
    samples = ("g1/0", "g1/1", "g1/2", "g2/0", "g2/2")
    done = StepDone(step=1, version=VERSION, trained_on=VERSION, groups=("g1", "g2"), samples=samples)
    [line] = records_of(entry, done)
    assert line["members"] == {"g2": [0, 2]}
