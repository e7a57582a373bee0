"""Experts that an engine chose, from its answer into the rollout: each token's once, as it was first read."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import UNSET

from actors.generation.engine import BootRefused, Chunk, GenerateRequest
from actors.generation.engines.sglang.attach import check_routed
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.rollouts import Segment, Trajectory, env
from actors.generation.rollouts.outcome import outcome_of
from actors.generation.routing import read_routed
from actors.generation.sample import start
from actors.runtime.prompts import RoutedShape, routed_shape
from bus.messages.samples import PrefixResume, Response, Routed
from tests.engine.conftest import engine_process
from tests.engine.models import load_model, make_model
from tests.engine.test_sample import VERSIONS, task

LAYERS, TOP_K = 3, 2
WIDTH = LAYERS * TOP_K
PROMPT = [5, 9, 33, 2, 17]


def routers(model: Any, tokens: list[int]) -> np.ndarray:
    """transformers' choice for each token but the last, sorted; zeros in the layer without experts."""
    found = np.zeros((len(tokens) - 1, LAYERS, TOP_K), np.int64)
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, args, out, n=n: found.__setitem__((slice(None), n), out[2].sort(-1).values))
        for n, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")
    ]  # fmt: skip
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    return found


async def test_the_engine_tells_the_experts_of_all_tokens_it_read(tmp_path: Path) -> None:
    own = {"num_experts": 8, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
    make_model("qwen3_moe", tmp_path, seed=1, num_hidden_layers=LAYERS, norm_topk_prob=True, **own)
    shape = routed_shape(str(tmp_path))
    assert shape == RoutedShape(WIDTH, wide=False)
    running = start(task(), [], mask_prefix=False)
    turn = running.open(0, PROMPT)
    with engine_process(tmp_path, "--stream-interval", "2") as (url, _):
        client = SGLangClient(url, request_deadline_s=30, token_deadline_s=30, control_deadline_s=30)
        for n in (7, 1, 6):  # three requests, the later ones for what is not known
            ids = PROMPT + turn.tokens.tolist()
            request = GenerateRequest(
                rid="a", input_ids=ids, max_new_tokens=n, ignore_eos=True, routed=shape, routed_from=turn.experts.n
            )
            async for chunk in client.generate(request):
                running.take(turn, msgspec.structs.replace(chunk, weight_version="1"), VERSIONS)
        await client.close()
    tokens = PROMPT + turn.tokens.tolist()
    routed = turn.experts.routed()
    assert routed is not UNSET and routed.n == len(tokens) - 1 == 18
    told = np.frombuffer(routed.data, np.uint8).reshape(-1, LAYERS, TOP_K)
    assert np.array_equal(np.sort(told, -1), routers(load_model(tmp_path), tokens))


def experts(first: int, end: int, mark: int) -> Routed:
    """Of tokens [first, end): each number tells the token and who chose."""
    rows = np.array([[10 * mark + at] * WIDTH for at in range(first, end)], np.uint8)
    return Routed(data=memoryview(rows.tobytes()), n=end - first)


def marks(response: Response) -> list[int]:
    assert response.experts is not UNSET
    return np.frombuffer(response.experts.data, np.uint8).reshape(response.experts.n, -1)[:, 0].tolist()


def test_who_goes_on_with_a_sample_keeps_what_was_chosen_before() -> None:
    """Two tokens of prompt; three more here, two on another worker, which reads all again."""
    first = start(task(5), [], mask_prefix=False)
    turn = first.open(0, first.prompt)
    first.take(turn, Chunk([1, 2], [-1.0, -1.0], "1"), VERSIONS)
    first.take(turn, Chunk([3], [-1.0], "1", "abort", experts(0, 4, 1)), VERSIONS)
    parked = msgspec.msgpack.encode(PrefixResume(task=first.task, response=first.response(), journal=first.journal()))
    second = start(msgspec.msgpack.decode(parked, type=PrefixResume), [], mask_prefix=False)
    turn = second.turns[0]
    turn.asked = second.prompt
    assert turn.experts.n == 4
    second.take(turn, Chunk([4, 5], [-1.0, -1.0], "2", "length", experts(0, 6, 2)), VERSIONS)
    [segment] = [Segment("model", turn.tokens, turn.logprobs, turn.spans, "length", 0)]
    whole = outcome_of([Trajectory(second.prompt, [segment])], second).response
    assert marks(whole) == [10, 11, 12, 13, 24, 25]
    cut = outcome_of([Trajectory(second.prompt, [segment.first(2)])], second).response
    assert marks(cut) == [10, 11, 12]


def test_of_several_turns_each_adds_what_it_read_first() -> None:
    running = start(task(9), [], mask_prefix=False)
    one = running.open(0, running.prompt)
    running.take(one, Chunk([1, 2], [-1.0, -1.0], "1", "stop", experts(0, 3, 1)), VERSIONS)
    told = env([7, 8])
    two = running.open(1, [*running.prompt, 1, 2, 7, 8])
    running.take(two, Chunk([3], [-1.0], "1", "stop", experts(0, 6, 2)), VERSIONS)
    parts = [Segment("model", t.tokens, t.logprobs, t.spans, "stop", t.no) for t in (one, two)]
    joined = outcome_of([Trajectory(running.prompt, [parts[0], told, parts[1]])], running).response
    assert marks(joined) == [10, 11, 12, 23, 24, 25]
    two.asked = [*running.prompt, 9, 9]  # it answered another history than is trained
    other = outcome_of([Trajectory(running.prompt, [parts[0], told, parts[1]])], running).response
    assert marks(other) == [10, 11, 12]


def test_what_is_no_table_of_experts_is_none_and_ends_nothing() -> None:
    shape = RoutedShape(WIDTH, wide=False)

    def read(raw: bytes) -> Routed | None:
        return read_routed(msgspec.Raw(msgspec.json.encode(base64.b64encode(raw).decode())), shape)

    good = read(np.array([[-1, 3, 300, 1, 2, 3]], np.int32).tobytes())
    assert good is not None and bytes(good.data) == bytes([255, 3, 255, 1, 2, 3])  # no experts: the trainer counts them
    assert read(b"123") is None and read(np.zeros(WIDTH + 1, np.int32).tobytes()) is None and read(b"") is None
    assert read_routed(msgspec.Raw(b'"!"'), shape) is None and read_routed(msgspec.Raw(b"[1]"), shape) is None


def test_an_engine_that_does_not_tell_is_refused() -> None:
    check_routed("http://e", {}, wanted=False)
    check_routed("http://e", {"enable_return_routed_experts": True}, wanted=True)
    with pytest.raises(BootRefused, match="Start it with --enable-return-routed-experts"):
        check_routed("http://e", {"enable_return_routed_experts": False}, wanted=True)
