"""Version boundaries where chunks hold several tokens: the count inside SGLang, what the client makes of it, a whole update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generation.engine import Chunk
from actors.generation.engines.sglang.boundary import split
from actors.generation.engines.sglang.census import CannotCount, count
from actors.generation.engines.sglang.inside import TESTED
from actors.generation.spec import GenerationSpec
from bus import Out
from bus.topology import ACTIVE, PROMPTS
from tests.actors.house import until
from tests.engine.conftest import engine_process
from tests.engine.models import Oracle
from tests.engine.rechunk import Rechunked
from tests.engine.workers import PROMPT, TOKENS, at_work, events, half_way, order, rollouts_of, sample, told

# -- the count inside SGLang ---------------------------------------------------------------------------------------


def request(rid: str, tokens: int, *, finished: bool = False, retracted: bool = False, chunked: int = 0) -> Any:
    return SimpleNamespace(rid=rid, output_ids=[1] * tokens, finished=lambda: finished, is_retracted=retracted, is_chunked=chunked)


def batch(*reqs: Any, extends: bool = False) -> Any:
    return SimpleNamespace(reqs=list(reqs), forward_mode=SimpleNamespace(is_extend=lambda: extends))


def scheduler(**changes: Any) -> Any:
    fields = {
        "_engine_paused": True, "spec_algorithm": SimpleNamespace(is_none=lambda: True), "pp_size": 1, "dp_size": 1, "tp_rank": 0,
        "waiting_queue": [], "running_batch": batch(), "last_batch": None, "result_queue": [],
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_a_step_whose_result_is_kept_back_counts() -> None:
    a, b = request("a", 5), request("b", 9)
    decoding = batch(a, b)
    found = count(scheduler(running_batch=decoding, last_batch=decoding, result_queue=[(batch(a, b), None)]))
    assert found == {"a": 6, "b": 10}


def test_a_prefill_kept_back_makes_a_first_token_unless_more_of_the_prompt_is_to_come() -> None:
    new, long = request("new", 0), request("long", 0, chunked=1)
    running, extend = request("old", 7), batch(new, long, extends=True)
    found = count(
        scheduler(
            running_batch=batch(running),
            last_batch=extend,
            result_queue=[(extend, None)],
            waiting_queue=[request("w", 3)],
        )
    )
    assert found == {"new": 1, "long": 0, "old": 7, "w": 3}


def test_ended_requests_are_left_out_and_those_taken_back_make_nothing_more() -> None:
    reqs = [request("done", 4, finished=True), request("back", 4, retracted=True)]
    found = count(scheduler(waiting_queue=[reqs[1]], result_queue=[(batch(*reqs), None)]))
    assert found == {"back": 4}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"_engine_paused": False}, "not paused"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative"),
        ({"pp_size": 2}, "spread over schedulers"),
        ({"dp_size": 4}, "spread over schedulers"),
    ],
)
def test_what_cannot_be_counted_is_told(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CannotCount, match=word):
        count(scheduler(**changes))


def test_another_scheduler_than_known_is_told() -> None:
    other = scheduler()
    del other.last_batch
    with pytest.raises(CannotCount, match=r"not as this package knows it.*last_batch"):
        count(other)
    with pytest.raises(CannotCount, match="not found"):
        count(None)


# -- what the client makes of it -----------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    ends=st.booleans(),
)
def test_chunks_are_cut_at_every_mark_and_nothing_is_lost(sizes: list[int], cuts: list[int], ends: bool) -> None:
    marks = [(tokens, f"v{i}") for i, tokens in enumerate(sorted(cuts))]
    seen, got = 0, []
    for i, size in enumerate(sizes):
        ids = list(range(seen, seen + size))
        last = ends and i == len(sizes) - 1
        parts = split(Chunk(ids, [float(t) for t in ids], "now", "length" if last else None), seen, marks)
        assert all(part.token_ids for part in parts)
        assert [part.finish for part in parts] == [None] * (len(parts) - 1) + ["length" if last else None]
        got += [(t, lp, part.weight_version) for part in parts for t, lp in zip(part.token_ids, part.logprobs, strict=True)]
        seen += size
    assert [(t, lp) for t, lp, _ in got] == [(t, float(t)) for t in range(seen)]
    for token, _, version in got:
        assert version == next((name for limit, name in marks if token < limit), "now")


def test_an_end_without_tokens_is_still_told() -> None:
    assert split(Chunk([], [], "2", "abort"), 8, [(8, "1")]) == [Chunk([], [], "2", "abort")]
    assert split(Chunk([], [], "2"), 8, []) == []


# -- a whole update ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "version"),
    [(True, TESTED[0]), (False, TESTED[0]), (True, "99.0")],
    ids=["counted", "not counted", "of a version it was not tested with"],
)
async def test_samples_go_on_through_an_update_in_place_and_no_token_counts_as_newer_than_it_is(
    redis_url: str,
    run_name: str,
    tmp_path: Path,
    models: Callable[[str], tuple[Path, Path]],
    counts: bool,
    version: str,
) -> None:
    first, second = models("qwen3-endless")
    exact = counts and version in TESTED
    with engine_process(first, "--stream-interval", "1") as (engine_url, _):
        server = Rechunked(engine_url, tmp_path, counts=counts, version=version)
        spec = GenerationSpec(engine="external", model_path=str(first))
        async with at_work(redis_url, run_name, spec, process=server) as (bus, worker):
            await until(lambda: told(bus, "joined", 1))
            await bus.append([Out(ACTIVE, order(1, first, "in_place"))])
            await bus.append([Out(PROMPTS, sample("g0")), Out(PROMPTS, sample("g1"))])
            await until(lambda: half_way(worker), deadline_s=30)
            await bus.append([Out(ACTIVE, order(2, second, "in_place"))])
            rollouts = await rollouts_of(bus, 2)
            await until(lambda: told(bus, "activated", 2))
            became = [event.data["requests"] for event in await events(bus, "activated")]
    assert became == ["sent again", "kept"]  # the first order found no version before it
    assert server.calls.count("/abort_request") == 1  # of the first order
    assert server.calls.count("count") == (version in TESTED)
    elder, younger = Oracle(first), Oracle(second)
    for rollout in rollouts:
        response = rollout.response
        assert [span.version for span in response.spans] == [1, 2]
        old = response.spans[0].n
        tokens = np.frombuffer(response.tokens, np.int32).tolist()
        logprobs = np.frombuffer(response.logprobs, np.float32)

        def made(boundary: int) -> list[float]:
            """What they would be if the new weights began there; requests kept their keys."""
            before, after = tokens[:boundary], tokens[boundary:]  # noqa: B023 - asked at once
            new = younger.logprobs_after(elder, PROMPT, before, after)
            return elder.logprobs(PROMPT, before) + new

        if exact:
            assert logprobs == pytest.approx(made(old), abs=1e-3)
        else:  # over-, never understated, by two chunks at most
            assert any(logprobs == pytest.approx(made(b), abs=1e-3) for b in range(old - 2 * 8, old + 1))
        assert len(tokens) == TOKENS
