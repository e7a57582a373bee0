"""The journal of an episode (pure): whatever was saved or parked in whatever pieces is taken up as it was, call by call."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from actors.generation.engine import Chunk
from actors.generation.sample import Running, start
from bus.messages.base import pack_ints
from bus.messages.samples import Call, PrefixResume, SampleTask, Sampling
from bus.messages.versions import PolicyVersion

VERSIONS = {str(n): PolicyVersion(n, n) for n in range(1, 9)}
TASK = SampleTask(
    sample_id="g/0", group_id="g", index=0, n_samples=1, prompt_id="p", prompt_tokens=pack_ints([1, 2]),
    sampling=Sampling(max_new_tokens=10_000),
)  # fmt: skip
Step = tuple[str, int]
steps = st.lists(
    st.tuples(st.sampled_from(("open", "tokens", "tokens", "end", "tell", "save", "crash", "park", "update")), st.integers(0, 3)),
    max_size=40,
)


def held(running: Running) -> Any:
    """What a program would be answered."""
    turns = {no: (t.digest, t.tokens.tolist(), t.logprobs.tolist(), t.spans, t.finish, t.mask) for no, t in running.turns.items()}
    return turns, dict(running.told)


@given(steps)
def test_what_is_saved_or_parked_is_taken_up_call_by_call(script: list[Step]) -> None:
    """Crashes fall back to the last save, parks to where it was. Several turns may be under way at once."""
    running, pieces, next_no, version, token = Running(TASK), [], 0, 1, 0
    message: SampleTask | PrefixResume = TASK
    saved = held(running)
    counted = 0
    for what, which in script:
        under_way = [t for t in running.turns.values() if not t.finish]
        match what:
            case "open":
                running.open(next_no, [1, 2, next_no])
                next_no += 1
            case "tell":
                running.answered(Call(next_no, bytes([which]), answer=msgspec.msgpack.encode(which)))
                next_no += 1
            case "tokens" if under_way:
                turn = under_way[which % len(under_way)]
                running.take(turn, Chunk([token := token + 1] * (which + 1), [-0.5] * (which + 1), str(version)), VERSIONS)
            case "end" if under_way:
                under_way[which % len(under_way)].finish = "stop" if which else "length"
            case "update":
                version = min(8, version + 1)
            case "save" if running.dirty():
                pieces.append(running.next_chunk())
                saved = held(running)
            case "crash":
                running = start(message, pieces, mask_prefix=False)
                turns, told = saved
                assert held(running) == ({no: t for no, t in turns.items() if t[1] or t[4]}, told)
                next_no = max([*running.turns, *running.told], default=-1) + 1
            case "park":
                counted += sum(span.n for span in running.uncounted())
                message, pieces = PrefixResume(task=TASK, response=running.response(), journal=running.journal()), []
                before = held(running)
                running = start(message, pieces, mask_prefix=False)
                assert held(running)[0] | before[0] == before[0] and held(running)[1] == before[1]
                assert counted == running.n_tokens and not running.uncounted()
                saved = held(running)
                next_no = max([*running.turns, *running.told], default=-1) + 1
        assert running.n_tokens == sum(len(t.tokens) for t in running.turns.values()) == running.response().n_tokens
        assert counted + sum(span.n for span in running.uncounted()) == running.n_tokens
