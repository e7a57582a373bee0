"""Pictures of prompts: read and laid out, stored once for a group, sent to the engine, deleted when the group is closed."""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.evaluator.actor import EvalSet, EvaluatorSpec
from actors.evaluator.actor import run as evaluate
from actors.generation.engine import AnswerRefused, GenerateRequest
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.pictures import Changed, Pictures
from actors.runtime.prompts import DataSpec, load_prompts
from actors.runtime.vision import MOST_BYTES, Vision
from actors.sampler.actor import SamplerSpec, run
from bus import Commit
from bus.errors import Poison
from bus.messages.active import PolicyActive
from bus.messages.base import pack_ints, unpack_ints
from bus.messages.groups import OpenGroup
from bus.messages.policy import Checkpointed
from bus.messages.samples import Picture, SampleTask
from bus.messages.versions import PolicyVersion
from bus.sweep import sweep_orphans
from bus.topology import ACTIVE, EVAL_PROMPTS, POLICY, PROMPTS
from scripts.bench import sights
from tests.actors.house import messages, open_bus, put, running, until
from tests.declared import data_of, room_of
from tests.engine.test_client import LENGTH, PAIRS, scripted

__all__ = ("scripted",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sighted")
    sights.make_model(path, weights=False)
    return str(path)


def data(folder: Path, model: str, *rows: dict[str, Any], **more: Any) -> DataSpec:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"label": "red", **row}) + "\n" for row in rows))
    keys = {"input_key": "input", "multimodal_keys": '{"image": "images"}', "apply_chat_template": True}
    return data_of(path=str(file), tokenizer_dir=model, **keys, **more)


def test_pictures_are_laid_out_wherever_a_row_has_them(tmp_path: Path, model: str) -> None:
    picture = sights.square("red", 84, 56)
    (tmp_path / "red.png").write_bytes(picture)
    url, text = sights.data_url(picture), base64.b64encode(picture).decode()
    own = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": " which?"}]}]
    rows = [
        *({"input": "<image> which?", "images": shown} for shown in ("red.png", [url], [text], {"bytes": None, "path": "red.png"})),
        {"input": own},
        {"input": [{"role": "user", "content": "<image><image> which?"}], "images": ["red.png", url]},
        {"input": " which?"},
    ]
    found = load_prompts(data(tmp_path, model, *rows))
    assert not found.unseen
    one, two = found.prompts[0], found.prompts[5]
    for prompt in found.prompts[:5]:
        assert prompt.token_ids == one.token_ids and prompt.text == one.text
        [shown] = prompt.pictures
        assert shown.place == Picture(at=3, n=6, grid=(1, 4, 6)) and one.token_ids[3:9] == [sights.IMAGE] * 6
    assert [shown.place.at for shown in two.pictures] == [3, 11]
    assert found.prompts[6].pictures == [] and sights.IMAGE not in found.prompts[6].token_ids


def test_a_row_whose_picture_cannot_be_shown_is_left_out_with_its_reason(tmp_path: Path, model: str) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "huge.png").write_bytes(bytes(MOST_BYTES + 1))
    good = sights.data_url(sights.square("red"))
    rows: list[tuple[Any, str]] = [
        ("gone.png", "'gone.png' cannot be read: No such file"),
        ("pipe.png", "'pipe.png' is no file"),
        ("text.png", "not a picture"),
        ("huge.png", "at most 20,971,520 are taken"),
        ("https://example.org/a.png", "Download it: runs read no network"),
        ("data:image/png;base64,%%", "is not base64"),
        ([], r"1 places for pictures .* and 0 pictures"),
        ([good, good], r"1 places for pictures .* and 2 pictures"),
        (7, "a picture is a int"),
        (sights.data_url(sights.square("red", 9, 4000)), "aspect ratio"),
    ]
    os.mkfifo(tmp_path / "pipe.png")
    given = [{"input": "<image> which?", "images": shown} for shown, _ in rows]
    odd = {"input": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}
    found = load_prompts(data(tmp_path, model, *given, odd, {"input": "<image>?", "images": good}))
    assert [p.index for p in found.prompts] == [len(given) + 1]
    rows.append((odd, "parts are of type text or image"))
    for number, (said, (_, problem)) in enumerate(zip(found.unseen, rows, strict=True), 1):
        assert f"row {number}: " in said and "\n" not in said
        assert re.search(problem, said), said


async def blobs_of(bus: Any) -> set[str]:
    return {":".join(ref.split(":")[:2]) for ref, _ in await bus.blobs.list_ids()}


def spec_of(given: DataSpec) -> SamplerSpec:
    return room_of(SamplerSpec, data=given, n_samples_per_prompt=2, num_rollout=100)


async def test_a_group_shares_its_pictures_until_it_is_closed(redis_url: str, run_name: str, tmp_path: Path, model: str) -> None:
    (tmp_path / "late.png").write_bytes(sights.square("blue"))
    url = sights.data_url(sights.square("red"))
    given = data(tmp_path, model, {"input": "<image>?", "images": "late.png"}, {"input": "<image>?", "images": url})
    made = spec_of(given)
    async with open_bus(redis_url, run_name) as bus:
        async with running(bus, "sampler", run, made) as context:

            async def waits() -> bool:
                return "news" in context.vitals().waits_for

            await until(waits)
            (tmp_path / "late.png").unlink()  # after it was read at the start, before it is issued
            await put(bus, ACTIVE, PolicyActive(version=PolicyVersion(1, 0), serving={"w": 1}))

            async def issued() -> list[SampleTask]:
                found = await messages(bus, PROMPTS)
                return found if len(found) >= 6 else []

            tasks = await until(issued)
            assert {task.prompt_id for task in tasks} == {"p1"} and context.counters["prompts_unseen"] >= 1
            by_group = {task.group_id: task.pictures for task in tasks}
            assert all(task.pictures == by_group[task.group_id] for task in tasks)
            [picture] = tasks[0].pictures
            assert await bus.blobs.get(picture.blob) == sights.square("red")
            named = {p.blob for pictures in by_group.values() for p in pictures}
            assert len(await blobs_of(bus)) >= len(named) == len(by_group)
            assert await sweep_orphans(bus, older_s=0.0) == 0  # the run's list of open groups names them
            first = tasks[0].group_id
            await bus.commit(Commit(close_groups=(first,)))
            await put(bus, POLICY, Checkpointed(step=1, path="x"))

            async def freed() -> bool:
                return ":".join(picture.blob.split(":")[:2]) not in await blobs_of(bus)

            await until(freed)
        opened = [msgspec.msgpack.decode(raw, type=OpenGroup) for raw in (await bus.hash_of(bus.keys.open_groups)).values()]
        assert {blob for group in opened for blob in group.blobs} >= named - {picture.blob}
        await bus.commit(Commit(state={"reissue": "pending"}))
        await bus.blobs.delete(list(opened[0].blobs))
        async with running(bus, "sampler", run, made):  # as after a bus that was restored from a checkpoint

            async def again() -> OpenGroup | None:
                found = await bus.open_group(opened[0].group_id)
                return found if found is not None and found.blobs != opened[0].blobs else None

            found = await until(again)
            assert await bus.blobs.get(found.blobs[0]) == sights.square("red")


async def test_an_evaluation_shows_pictures_too(redis_url: str, run_name: str, tmp_path: Path, model: str) -> None:
    given = data(tmp_path, model, {"input": "<image>?", "images": sights.data_url(sights.square("red"))})
    sets = (EvalSet(name="seen", data=given, samples_per_prompt=2),)
    async with open_bus(redis_url, run_name, knobs={"eval_interval": 1}) as bus:
        async with running(bus, "evaluator", evaluate, room_of(EvaluatorSpec, sets=sets, num_rollout=3, rm_type="math")):
            await put(bus, ACTIVE, PolicyActive(version=PolicyVersion(1, 0), serving={"w": 1}))

            async def issued() -> list[SampleTask]:
                return await messages(bus, EVAL_PROMPTS)

            one, two = await until(issued)
            assert one.pictures == two.pictures and await bus.blobs.get(one.pictures[0].blob) == sights.square("red")
            assert await sweep_orphans(bus, older_s=0.0) == 0  # the entry's header names it


async def test_a_request_brings_the_pictures_that_its_tokens_begin_with(
    redis_url: str, run_name: str, tmp_path: Path, model: str
) -> None:
    vision = Vision(model)
    ids, places = vision.laid_out([1, 11, 3, sights.IMAGE, 4, 13], [vision.grid(sights.data_url(sights.square("red")))])
    async with open_bus(redis_url, run_name) as bus:
        blob = await bus.blobs.put(sights.square("red"))
        pictures = tuple(msgspec.structs.replace(place, blob=blob) for place in places)
        task = SampleTask(
            sample_id="g0/0", group_id="g0", index=0, n_samples=1, prompt_id="p", prompt_tokens=pack_ints(ids), inputs=pictures
        )
        assert unpack_ints(task.prompt_tokens) == ids

        async def body(context: Any, _: Any) -> None:
            ours, theirs = Pictures(context), Pictures(context, model)
            for tokens in (ids, [*ids, 7, 8]):
                assert await ours.of(task, tokens) == await theirs.of(task, tokens) == (sights.data_url(sights.square("red")),)
            assert await ours.of(task, [1, 11]) == ()
            with pytest.raises(Poison, match="Keep the prompt up to its last picture"):
                await ours.of(task, ids[1:])
            with pytest.raises(Changed):  # its tokenizer has no such token: the text comes back as others
                await theirs.of(task, [*ids, 0, 10_000])
            await bus.blobs.delete([blob])
            with pytest.raises(Poison, match="a picture is gone"):
                await Pictures(context).of(task, ids)

        async with running(bus, "generation-0", body, None):
            pass


async def test_pictures_go_to_sglang_as_image_data_and_its_count_of_tokens_is_checked(scripted: Any) -> None:
    def answer(prompt_tokens: int) -> list[bytes]:
        meta = {"id": "x", "completion_tokens": 4, "prompt_tokens": prompt_tokens, "weight_version": "1", "finish_reason": LENGTH}
        body = json.dumps({"meta_info": meta | {"output_token_logprobs": PAIRS}})
        return [f"data: {body}\n\n".encode(), b"data: [DONE]\n\n"]

    request = GenerateRequest(rid="a", input_ids=[1, 5, 5], max_new_tokens=4, images=("data:image/png;base64,AA",))
    seen: list[Any] = []
    client: SGLangClient = await scripted(answer(3), seen=seen)
    assert [token async for chunk in client.generate(request) for token in chunk.token_ids] == [11, 12, 13, 14]
    body = json.loads(seen[1])
    assert body["image_data"] == ["data:image/png;base64,AA"] and body["input_ids"] == [1, 5, 5] and "text" not in body
    client = await scripted(answer(7))
    with pytest.raises(AnswerRefused, match="read 7 tokens where request a has 3"):
        async for _ in client.generate(request):
            pass
