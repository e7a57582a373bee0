"""Weights on their way without files: buckets, plans, what the engine is asked to do, a broadcast between real processes."""

from __future__ import annotations

import subprocess
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from actors.generation.activation import Loader, TransportFailed, WeightsDiffer, WeightsUnusable
from actors.generation.engine import EngineUnavailable
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.sessions import BEGIN, END
from actors.trainer.transports.files import copied
from actors.trainer.transports.flat import FlatBuffers, bucketed
from actors.trainer.transports.nccl import GroupBroken, NcclSender
from bus import Bus, BusConfig
from bus.errors import BadMessage
from bus.messages.policy import WeightManifest
from bus.messages.weights import Bucket, TensorMeta, WeightPlan
from bus.plans import get_plan, put_plan
from tests.engine.processes import until
from tests.warm.launched import Warmed, open_warm

META = TensorMeta("a", "bfloat16", (2, 3))


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["bfloat16", "float32"])), max_size=40), st.integers(1, 100))
def test_buckets_keep_all_tensors_in_order_of_their_type_and_within_the_limit(items: list[tuple[int, str]], limit: int) -> None:
    tensors = [(f"t{i}", torch.empty(size, dtype=getattr(torch, dtype))) for i, (size, dtype) in enumerate(items)]
    buckets = [list(bucket) for bucket in bucketed(tensors, limit)]
    for dtype in (torch.bfloat16, torch.float32):
        named = [name for bucket in buckets for name, tensor in bucket if tensor.dtype == dtype]
        assert named == [name for name, tensor in tensors if tensor.dtype == dtype]
    for bucket in buckets:
        assert len({tensor.dtype for _, tensor in bucket}) == 1
        assert sum(tensor.nbytes for _, tensor in bucket) <= limit or len(bucket) == 1


def test_flat_buffers_hold_the_bytes_of_all_tensors_at_one_address() -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5), "c": torch.arange(6, dtype=torch.bfloat16)}
    buffers = FlatBuffers()
    buffers.fill(bucketed(tensors.items()))
    assert [[meta.name for meta in bucket.tensors] for bucket in buffers.buckets] == [["a", "b"], ["c"]]
    where = [flat.data_ptr() for flat in buffers.flat]
    flat = buffers.flat[0].view(torch.float32)
    assert torch.equal(flat[:12].view(3, 4), tensors["a"]) and torch.equal(flat[12:], tensors["b"])
    buffers.fill(bucketed((name, t + 1) for name, t in tensors.items()))
    assert [flat.data_ptr() for flat in buffers.flat] == where
    assert torch.equal(buffers.flat[1].view(torch.bfloat16), tensors["c"] + 1)
    held = {name: t for bucket in buffers.held() for name, t in bucket}
    assert held.keys() == tensors.keys() and all(torch.equal(held[name], t + 1) for name, t in tensors.items())
    with pytest.raises(ValueError, match="1 tensors came or went since the first version, first c"):
        buffers.fill(bucketed((name, t) for name, t in tensors.items() if name != "c"))


@pytest.mark.parametrize("way", ["buffers", "files"])
def test_an_export_is_never_held_whole(way: str, tmp_path: Path) -> None:
    """Of 40 tensors that are made as they are asked for; the largest is a quarter of a bucket."""
    limit, largest = 4_000, 1_000
    living, most = [0], [0]

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(40):
            tensor = torch.full((largest - 10 * i,), i, dtype=torch.uint8)
            living[0] += tensor.nbytes
            weakref.finalize(tensor, lambda n: living.__setitem__(0, living[0] - n), tensor.nbytes)
            most[0] = max(most[0], living[0])
            yield f"t{i}", tensor
            del tensor

    buckets = bucketed(made(), limit)
    if way == "buffers":
        buffers = FlatBuffers()
        buffers.fill(buckets)
        assert sum(flat.nbytes for flat in buffers.flat) > 8 * limit - 1_000
    else:
        assert copied(buckets, {}, tmp_path / "v1").finish().n_tensors == 40
    assert most[0] <= limit + 2 * largest and living[0] == 0


# -- what engines are asked ----------------------------------------------------------------------------------------


class Recorder:
    """A server without update sessions that notes what it is asked and answers 200, or what `refuse` says."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.refuse: dict[str, int] = {}
        self.changing = False  # checksums differ from one question to the next

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.path in (BEGIN, END):
            return web.Response(status=404)
        self.asked.append((request.path, body))
        status = self.refuse.get(request.path, 200)
        answer: dict[str, Any] = {"success": status == 200, "message": "partially updated"}
        if request.path == "/weights_checker":
            first = f"1f{len(self.asked)}" if self.changing else "1f"
            answer["ranks"] = [{"checksums": {"w": first}}, {"checksums": {"w": "2f"}}]
        return web.json_response(answer, status=status)


@pytest.fixture
async def engine() -> AsyncIterator[tuple[SGLangClient, Recorder]]:
    recorder = Recorder()
    app = web.Application()
    app.router.add_post("/{path:.*}", recorder.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    [(host, port, *_)] = runner.addresses
    client = SGLangClient(f"http://{host}:{port}", request_deadline_s=5, token_deadline_s=5, control_deadline_s=5)
    yield client, recorder
    await client.close()
    await runner.cleanup()


def plan(**fields: Any) -> WeightPlan:
    other = TensorMeta("b", "float32", (4,))
    buckets = (
        Bucket(tensors=(META,), n_bytes=12, handles=("h0",)),
        Bucket(tensors=(other,), n_bytes=16, handles=("h1",)),
    )
    return WeightPlan(**{"transport": "ipc", "buckets": buckets, **fields})


async def load(loader: Loader, client: SGLangClient, plan: WeightPlan, label: str) -> None:
    loader.check(plan)
    await loader.join(client, plan)
    await loader.load(client, WeightManifest(transport=plan.transport), plan, label)


async def test_ipc_hands_over_each_bucket_and_names_the_version_with_the_last(
    engine: tuple[SGLangClient, Recorder],
) -> None:
    client, recorder = engine
    await load(Loader("generation-0"), client, plan(), "7")
    assert [path for path, _ in recorder.asked] == ["/update_weights_from_tensor"] * 2
    first, last = (body for _, body in recorder.asked)
    assert first == {
        "serialized_named_tensors": ["h0"],
        "load_format": "flattened_bucket",
        "weight_version": None,
        "flush_cache": False,
    }
    assert (last["serialized_named_tensors"], last["weight_version"]) == (["h1"], "7")


async def test_nccl_joins_once_per_group_and_again_for_the_next(
    engine: tuple[SGLangClient, Recorder],
) -> None:
    client, recorder = engine
    loader = Loader("w")
    fields = {
        "transport": "nccl", "group": "g1", "address": "10.0.0.1", "port": 99, "world_size": 3, "ranks": {"w": 2},
        "workers": ("w",),
    }  # fmt: skip
    one = plan(**fields)
    await load(loader, client, one, "7")
    await load(loader, client, one, "8")
    two = plan(**fields | {"group": "g2"})
    recorder.refuse["/destroy_weights_update_group"] = 400  # gone already: no reason to stop
    await load(loader, client, two, "9")
    loader.forget()
    await load(loader, client, two, "10")  # a new engine: joins without leaving
    paths = [path.removeprefix("/").removesuffix("_weights_update_group") for path, _ in recorder.asked]
    update = ["update_weights_from_distributed"] * 2
    assert paths == ["init", *update, *update, "destroy", "init", *update, "init", *update]
    assert recorder.asked[0][1] == {
        "master_address": "10.0.0.1", "master_port": 99, "rank_offset": 2, "world_size": 3, "group_name": "g1", "backend": "nccl",
    }  # fmt: skip
    assert recorder.asked[2][1] == {
        "names": ["b"], "dtypes": ["float32"], "shapes": [[4]], "group_name": "g1", "load_format": "flattened_bucket",
        "weight_version": "7", "flush_cache": False,
    }  # fmt: skip


def test_what_cannot_be_loaded_is_named_before_anything_is_asked() -> None:
    loader = Loader("w")
    with pytest.raises(WeightsUnusable, match="transport 'pigeon' is unknown"):
        loader.check(plan(transport="pigeon"))
    with pytest.raises(WeightsUnusable, match=r"not in group g \(x\)"):
        loader.check(plan(transport="nccl", group="g", ranks={"x": 1}, workers=("x",)))


async def test_a_plan_is_read_on_whatever_host_and_one_that_is_gone_is_told(redis_url: str, run_name: str) -> None:
    made = plan(transport="nccl", group="g", ranks={"w": 1}, workers=("w",))
    async with Bus(BusConfig(url=redis_url, run=run_name)) as trainer, Bus(BusConfig(url=redis_url, run=run_name)) as worker:
        manifest = await put_plan(trainer, made)
        assert (manifest.transport, manifest.path, manifest.n_tensors, manifest.n_bytes) == ("nccl", "", 2, 28)
        assert await get_plan(worker, manifest) == made
        await trainer.blobs.delete([manifest.plan])
        with pytest.raises(BadMessage, match="gone or cut"):
            await get_plan(worker, manifest)


async def test_a_bucket_that_fails_ends_the_update_before_the_version_is_named(
    engine: tuple[SGLangClient, Recorder],
) -> None:
    client, recorder = engine
    recorder.refuse["/update_weights_from_tensor"] = 400
    with pytest.raises(TransportFailed, match="partially updated"):
        await load(Loader("w"), client, plan(), "7")
    recorder.refuse["/update_weights_from_tensor"] = 500
    with pytest.raises(EngineUnavailable):
        await load(Loader("w"), client, plan(), "7")
    assert all(body["weight_version"] is None for _, body in recorder.asked)


async def test_checksums_come_rank_by_rank(engine: tuple[SGLangClient, Recorder]) -> None:
    assert await engine[0].weights_checksum() == {"0/w": "1f", "1/w": "2f"}


async def test_the_trainer_is_waited_for_until_it_sends_or_the_wait_is_pointless_or_too_long() -> None:
    loader = Loader("w")
    made = plan(deadline_s=0.05)
    with pytest.raises(TransportFailed, match=r"did not send version 7 within 0\.05 s"):
        await loader.wait_for(7, made, lambda: False)
    loader.sending(7)
    assert await loader.wait_for(7, made, lambda: True)
    assert not await loader.wait_for(8, made, lambda: True)


async def test_weights_that_differ_from_their_files_are_told(
    engine: tuple[SGLangClient, Recorder],
) -> None:
    client, recorder = engine
    loader = Loader("w")
    made = plan(whole="/files/7")
    assert await loader.compare(client, made, "7") == (2, "")
    assert [path for path, _ in recorder.asked] == ["/weights_checker", "/update_weights_from_disk", "/weights_checker"]
    recorder.changing = True
    with pytest.raises(WeightsDiffer, match="version 7 came by ipc with 1 of 2 tensors other than in its files, first 0/w"):
        await loader.compare(client, made, "7")
    assert await loader.compare(client, plan(), "8") == (0, "")


async def test_an_engine_that_cannot_compare_serves_what_the_files_hold(
    engine: tuple[SGLangClient, Recorder],
) -> None:
    client, recorder = engine
    recorder.refuse["/weights_checker"] = 400
    loader = Loader("w")
    compared = await loader.compare(client, plan(whole="/files/7"), "7")
    assert compared.tensors == 0
    assert compared.unable.startswith("version 7 was loaded from its files")
    assert [(path, body.get("model_path")) for path, body in recorder.asked[1:]] == [("/update_weights_from_disk", "/files/7")]


# -- a broadcast between processes ---------------------------------------------------------------------------------

Peer = Callable[..., AbstractContextManager[Warmed | subprocess.Popen[bytes]]]


@pytest.fixture
def peer(tmp_path: Path, warm: Path | None) -> Peer:
    """Starts one of the test's folder; see broadcast_peer.py."""

    def start(mode: str, rank: int = 1) -> AbstractContextManager[Warmed | subprocess.Popen[bytes]]:
        return open_warm(warm, ["tests.trainer.broadcast_peer", str(tmp_path), mode, str(rank)], tmp_path / f"printed-{rank}")

    return start


def sender(tmp_path: Path) -> tuple[NcclSender, dict[str, torch.Tensor]]:
    tensors = {"a": torch.arange(40, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.bfloat16)}
    return filled({"w": 1}, tensors, tmp_path, deadline_s=60.0), tensors


def filled(engines: dict[str, int], tensors: dict[str, torch.Tensor], folder: Path, *, deadline_s: float) -> NcclSender:
    """A sender with these tensors in its buffers, its plan in a file for the peers."""
    buffers = FlatBuffers()
    buffers.fill(bucketed(tensors.items()))
    made = NcclSender(engines, name="g", backend="gloo", deadline_s=deadline_s, buffers=buffers)
    (folder / "plan.json").write_bytes(msgspec.json.encode(made.plan()))
    return made


@pytest.mark.timeout(150)
def test_a_version_is_broadcast_bucket_by_bucket(tmp_path: Path, peer: Peer) -> None:
    trainer, tensors = sender(tmp_path)
    with peer("stay") as process:
        trainer.open()
        trainer.send()
        assert process.wait(30) == 0
    trainer.close()
    sums = [int(t.view(torch.uint8).long().sum()) for t in tensors.values()]
    assert (tmp_path / "printed-1").read_text().split() == ["joined", *map(str, sums)]


@pytest.mark.timeout(150)
def test_a_peer_lost_in_mid_broadcast_breaks_the_group_and_not_the_trainer(tmp_path: Path, peer: Peer) -> None:
    trainer, _ = sender(tmp_path)
    with peer("leave") as process:
        trainer.open()
        assert process.wait(30) == 0
        failed: list[BaseException] = []

        def send() -> None:
            try:
                for _ in range(200):  # the first ones may still fit into the socket
                    trainer.send()
            except GroupBroken as error:
                failed.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        thread.join(40)
    assert failed and not thread.is_alive()
    with pytest.raises(GroupBroken, match="not open"):
        trainer.send()
    trainer.close()


@pytest.mark.timeout(150)
def test_a_broadcast_that_breaks_lets_go_of_those_who_wait_for_the_rest(tmp_path: Path, peer: Peer) -> None:
    trainer = filled({"w": 1, "x": 1}, {"a": torch.zeros(1 << 24, dtype=torch.uint8)}, tmp_path, deadline_s=300.0)
    with peer("leave", 1) as lost, peer("stay", 2) as other:
        trainer.open()
        assert lost.wait(30) == 0
        with pytest.raises(GroupBroken) as broken:
            for _ in range(200):
                trainer.send()
        assert other.wait(60) != 0
    assert "failed" in str(broken.value)  # the error is held until here, as by whoever tells it


@pytest.mark.timeout(150)
def test_a_group_that_is_given_up_lets_go_of_those_who_wait_in_it(tmp_path: Path, peer: Peer) -> None:
    trainer = filled({"w": 1, "x": 1}, {"a": torch.arange(40, dtype=torch.uint8)}, tmp_path, deadline_s=300.0)
    failed: list[BaseException] = []

    def join() -> None:
        try:
            trainer.open()
        except GroupBroken as error:
            failed.append(error)

    with peer("stay") as process:
        thread = threading.Thread(target=join)
        thread.start()
        found = psutil.Process(process.pid)
        until(lambda: trainer.port in {c.raddr.port for c in found.net_connections() if c.raddr}, "the peer waits", 30.0)
        trainer.close()
        thread.join(60)
        assert process.wait(60) != 0
    assert failed and not thread.is_alive()


def test_nccl_asks_for_the_variable_that_engines_run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    made = NcclSender({"w": 1}, name="g", buffers=FlatBuffers())
    with pytest.raises(GroupBroken, match="NCCL_CUMEM_ENABLE=0"):
        made.open()
    made.close()
