"""A sample under way (pure): what is made, saved and taken up again covers the same tokens, each once."""

from __future__ import annotations

import msgspec
import pytest

from actors.generation.engine import Chunk, RouteBroken, VersionUnknown
from actors.generation.sample import ModelTurn, Running, limit_of, start
from bus.messages.base import pack_floats, pack_ints, unpack_ints
from bus.messages.samples import Call, PrefixResume, Response, SampleTask, Sampling
from bus.messages.versions import PolicyVersion, VersionSpan

VERSIONS = {str(n): PolicyVersion(n, n - 1) for n in (1, 2, 3)}


def task(tokens: int = 12, attempt: int = 0) -> SampleTask:
    sampling = Sampling(max_new_tokens=tokens, stop_token_ids=(0,))
    return SampleTask(
        sample_id="g/0", group_id="g", index=0, n_samples=1, prompt_id="p", prompt_tokens=pack_ints([90, 91]), attempt=attempt,
        sampling=sampling,
    )  # fmt: skip


def prefix(*tokens: int, version: int = 1) -> PrefixResume:
    n = len(tokens)
    response = Response(
        pack_ints(tokens),
        pack_floats([-t / 8 for t in tokens]),
        memoryview(b"\x01" * n),
        (VersionSpan(version, version - 1, n),),
    )
    return PrefixResume(task=task(), response=response)


def make(running: Running, *tokens: int, version: int = 1, finish: str | None = None) -> None:
    """Tokens as the engine sends them; the log-prob tells whose it is."""
    running.take(turn_of(running), Chunk(list(tokens), [-t / 8 for t in tokens], str(version), finish), VERSIONS)


def turn_of(running: Running) -> ModelTurn:
    """The one turn, in answer to the prompt."""
    asked = unpack_ints(running.task.prompt_tokens)
    turn = running.turns.get(0) or running.open(0, asked)
    turn.asked = asked
    return turn


def input_ids(running: Running) -> list[int]:
    turn = turn_of(running)
    assert turn.asked is not None
    return turn.asked + turn.tokens.tolist()


def ended(running: Running) -> str:
    turn = turn_of(running)
    turn.ended(limit_of(turn, running, running.task.sampling), (0,))
    return turn.finish


def whole(response: Response) -> list[int]:
    """The tokens, once all else fits to them."""
    tokens = unpack_ints(response.tokens)
    assert bytes(response.logprobs) == bytes(pack_floats([-t / 8 for t in tokens]))
    assert len(response.loss_mask) == len(tokens) == sum(span.n for span in response.spans)
    return tokens


def fresh() -> Running:
    return start(task(), [], mask_prefix=False)


def test_turns_together_are_no_longer_than_the_sample_may_be() -> None:
    running = fresh()  # of 12 tokens
    make(running, *range(1, 9))
    second = running.open(1, [90, 91, 5])
    assert limit_of(second, running, running.task.sampling) == 4
    running.take(second, Chunk([1, 2, 3], [-0.5] * 3, "1", None), VERSIONS)
    assert limit_of(second, running, running.task.sampling) == 4, "of which one is left"


def test_what_a_sample_throws_away_adds_up_over_its_beginnings() -> None:
    first = start(prefix(1, 2, 3), [], mask_prefix=False)
    second = first.again()
    second.take_up(prefix(1, 2).response, (), counted=True, mask=False)
    assert (first.thrown, second.thrown, second.again().thrown) == (0, 3, 5)


def test_a_turn_goes_on_under_no_older_version_than_the_turn_before() -> None:
    running = fresh()
    make(running, 1, 2, version=2, finish="stop")
    second = running.open(1, [90, 91, 5])
    with pytest.raises(RouteBroken, match="version 1"):
        running.take(second, Chunk([3], [-0.5], "1", None), VERSIONS)
    running.take(second, Chunk([3], [-0.5], "2", None), VERSIONS)
    assert second.tokens.tolist() == [3]


def test_an_answer_of_the_environment_is_saved_though_no_token_came() -> None:
    first = fresh()
    first.answered(Call(0, b"asked", answer=b"said"))
    assert first.dirty() and first.unsaved() == 0
    piece = first.next_chunk()
    assert not first.dirty()
    assert start(task(), [piece], mask_prefix=False).told[0].answer == b"said"


def test_what_was_saved_in_pieces_is_taken_up_whole() -> None:
    first = fresh()
    make(first, 1, 2)
    pieces = [first.next_chunk()]
    make(first, 3)
    make(first, 4, version=2)
    assert (first.unsaved(), first.has_saved) == (2, True)
    pieces.append(first.next_chunk())
    make(first, 5, version=3)
    assert first.unsaved() == 1
    second = start(task(), pieces, mask_prefix=False)
    assert whole(second.response()) == [1, 2, 3, 4]
    assert second.response().spans == second.uncounted() == (VersionSpan(1, 0, 3), VersionSpan(2, 1, 1))
    assert (second.unsaved(), second.has_saved, second.last_version) == (0, True, 2)
    assert input_ids(second) == [90, 91, 1, 2, 3, 4]
    make(second, 6, version=2)
    third = start(task(), [*pieces, second.next_chunk()], mask_prefix=False)
    assert whole(third.response()) == [1, 2, 3, 4, 6] and bytes(third.response().loss_mask) == b"\x01" * 5
    assert third.response().spans == (VersionSpan(1, 0, 3), VersionSpan(2, 1, 2))


def test_of_a_prefix_only_what_is_made_here_is_counted_and_saved() -> None:
    running = start(prefix(1, 2, 3), [], mask_prefix=False)
    assert (running.uncounted(), running.unsaved(), running.n_tokens, running.remaining) == ((), 0, 3, 9)
    make(running, 4, version=2)
    assert (running.made_here, input_ids(running)) == (1, [90, 91, 1, 2, 3, 4])
    again = start(prefix(1, 2, 3), [running.next_chunk()], mask_prefix=False)
    assert whole(again.response()) == [1, 2, 3, 4] and again.uncounted() == (VersionSpan(2, 1, 1),)


def test_pieces_that_do_not_join_or_are_of_another_attempt_are_left_out() -> None:
    first = fresh()
    make(first, 1)
    one = first.next_chunk()
    make(first, 2)
    two = first.next_chunk()
    assert whole(start(task(), [one, one, two], mask_prefix=False).response()) == [1]
    assert whole(start(task(), [two], mask_prefix=False).response()) == []
    assert whole(start(task(attempt=1), [one, two], mask_prefix=False).response()) == []


@pytest.mark.parametrize("mask_prefix", [True, False])
def test_a_prefix_of_another_owner_is_masked_when_it_shall_not_train(mask_prefix: bool) -> None:
    first = fresh()
    make(first, 1, 2)
    second = start(task(), [first.next_chunk()], mask_prefix=mask_prefix)
    make(second, 3)
    assert bytes(second.response().loss_mask) == (b"\x00\x00\x01" if mask_prefix else b"\x01\x01\x01")


def test_a_version_that_no_order_named_is_an_error_and_changes_nothing() -> None:
    running = fresh()
    with pytest.raises(VersionUnknown, match="unknown version '9'"):
        running.take(turn_of(running), Chunk([1], [-1.0], "9"), VERSIONS)
    assert running.n_tokens == 0


def test_a_sample_ends_with_its_length_its_stop_token_or_not_yet() -> None:
    running = start(prefix(*range(1, 11)), [], mask_prefix=False)
    make(running, 11)
    assert not ended(running) and running.remaining == 1
    make(running, 12)
    assert ended(running) == "length"


def test_a_prefix_that_ends_with_its_stop_token_is_over() -> None:
    assert ended(start(prefix(1, 2, 0), [], mask_prefix=False)) == "stop"
    assert not ended(start(prefix(0, 2), [], mask_prefix=False))


def test_a_saved_piece_is_the_same_message_again() -> None:
    running = fresh()
    make(running, 1, 2, version=2)
    piece = msgspec.msgpack.decode(running.next_chunk())
    assert (piece["start"], piece["attempt"], len(piece["tokens"])) == (0, 0, 8)
    assert len(piece["logprobs"]) == 8 and bytes(piece["loss_mask"]) == b"\x01\x01"
