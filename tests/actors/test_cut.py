"""Which samples make a batch (pure): by the oldest token of each, whatever its younger ones say."""

from __future__ import annotations

import pytest

from actors.trainer.cut import UNDER_WAY, Part, cut
from tests.actors.test_staleness_bound import part, scored


def taken(ready: dict[str, Part], *, step: int, size: int, bound: int, **given: object) -> dict[str, tuple[int, ...]]:
    return dict(cut(ready=ready, step=step, size=size, bound=bound, rule="split", **given).take)


def test_the_age_of_a_sample_is_that_of_its_first_token() -> None:
    ready = {"g1": part(scored("g1", 0, [2])), "g2": part(scored("g2", 0, [1, 2, 3])), "g3": part(scored("g3", 0, [3]))}
    assert taken(ready, step=3, size=1, bound=4) == {"g2": (0,)}
    assert taken(ready, step=3, size=2, bound=4) == {"g2": (0,), "g1": (0,)}


def test_of_the_group_at_the_edge_the_oldest_samples_are_taken() -> None:
    ready = {"g1": part(*(scored("g1", i, [step], n=4) for i, step in enumerate((2, 0, 2, 1))))}
    assert taken(ready, step=3, size=2, bound=4) == {"g1": (1, 3)}
    assert taken(ready, step=3, size=3, bound=4) == {"g1": (0, 1, 3)}, "of equal ones the first"


def test_one_token_over_the_bound_drops_a_group_under_drop_only() -> None:
    ready = {"g1": part(scored("g1", 0, [0, 3], n=2), scored("g1", 1, [3], n=2)), "g2": part(scored("g2", 0, [1]))}
    common = {"ready": ready, "step": 3, "size": 1, "bound": 2}
    dropped = cut(**common, rule="drop")
    assert (dropped.drop, dropped.take) == ((("g1", "stale"),), (("g2", (0,)),))
    assert cut(**common, rule="split").drop == () and cut(**common, rule="whole").drop == ()


def test_a_group_is_dropped_when_its_youngest_token_is_over_the_bound_and_not_before() -> None:
    ready = {"g1": part(scored("g1", 0, [0], n=2), scored("g1", 1, [0, 1], n=2))}
    assert cut(ready=ready, step=3, size=2, bound=2, rule="split").drop == ()
    assert cut(ready=ready, step=4, size=2, bound=2, rule="split").drop == (("g1", "stale"),)


def test_a_part_cut_again_keeps_the_rewards_of_its_whole_group() -> None:
    late = part(*(scored("g1", i, [0], n=4, reward=float(i)) for i in (1, 3)), part="g1+1", known=(0.0, 1.0, 2.0, 3.0))
    assert late.cut((1,)).known == late.cut((0, 1)).known == (0.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(("under_way", "waits"), [({0: 3}, False), ({0: 4}, True), ({1: 9}, False), ({0: 3, 1: 1}, False)])
def test_younger_ones_are_taken_while_what_is_under_way_still_fits(under_way: dict[int, int], waits: bool) -> None:
    """Batches of 3, bound 2: of what was issued at step 0, three samples fit into the batch of step 2."""
    ready = {"g1": part(*(scored("g1", i, [1], n=3) for i in range(3)))}
    made = cut(ready=ready, step=1, size=3, bound=2, rule="split", elsewhere=under_way)
    assert bool(made.take) is not waits and made.missing == (f"1 {UNDER_WAY}" if waits else "")


def test_what_is_due_and_does_not_fit_is_counted() -> None:
    ready = {f"g{n}": part(scored(f"g{n}", 0, [1])) for n in range(5)}
    made = cut(ready=ready, step=3, size=2, bound=2, rule="split", elsewhere={})
    assert len(made.take) == 2 and made.left_behind == 3
