"""Places on a Ray cluster by themselves, without a run: engines over several nodes, a node that dies while one starts, refusals.
The nodes say that they have GPUs; the processes are real, and so is what they are told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec
import pytest
import ray
from ray.cluster_utils import Cluster

from actors.runtime.context import ActorSpec
from bus import BusConfig
from miles_async.launcher.engines import generation_spec
from miles_async.launcher.place import Place
from miles_async.launcher.plan import actor_spec
from miles_async.launcher.ray_placer import RayPlacer
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from tests.cluster.house import SOON
from tests.crash.house import REPO

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(300)]
SAYS = "import os, sys, time; print('told', *sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES']); sys.stdout.flush(); time.sleep(300)"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": SOON})
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def placer_of(cluster: Cluster, tmp_path: Path) -> Callable[..., tuple[RayPlacer, ActorSpec]]:
    """A launcher's placer, and the spec of its engine."""
    ray.init(address=cluster.address, namespace="miles_async-r", log_to_driver=False)
    (tmp_path / "engine.token").write_text("t")
    weights = str(tmp_path / "w" / "v")
    place = Place(
        run_dir=str(tmp_path), model_dir="/m", weights_dir=weights, blob_dir="", stop_token_ids=(), num_rollout=1, fingerprint="",
        engine_token="t",
    )  # fmt: skip

    async def alone(names: Collection[str], kept: Collection[str]) -> None:
        assert set(names) > set(kept) or not kept

    def make(gpus: int = 8, wait_s: float = 120.0, engines: int = 1) -> tuple[RayPlacer, ActorSpec]:
        settings = settings_from(
            hf_checkpoint="/m", prompt_data="p", num_rollout=1, rm_type="math", rollout_batch_size=8, name="r", launcher="ray",
            engine="sglang", rollout_num_gpus=gpus * engines, rollout_num_gpus_per_engine=gpus, sglang_nnodes=2,
            debug_rollout_only=True, sglang_server_command=[sys.executable, "-c", SAYS], ray_wait_s=wait_s,
        )  # fmt: skip
        placer, bus = RayPlacer(settings, place, {}, alone), BusConfig(url="redis://127.0.0.1:1", run="r", deadline_s=60.0)
        spec = actor_spec(settings, place, bus, "generation-0", "generation", generation_spec(settings, place))
        placer.add(spec)
        return placer, spec

    return make


def groups() -> list[str]:
    """Placement groups that there are."""
    return sorted(str(one["name"]) for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED")


def meeting_of(tmp_path: Path) -> str:
    """Where the engine's parts meet, as it was started last."""
    return str(msgspec.json.decode((tmp_path / "actors" / "generation-0.json").read_bytes())["room"]["meeting"])


async def told(tmp_path: Path, part: int, meeting: str) -> list[str]:
    """The command of one part of the engine that was to meet the others there."""
    log = tmp_path / "logs" / f"generation-0-node-{part}.log"
    async with asyncio.timeout(60):
        while True:
            lines = log.read_text().splitlines(keepends=True) if log.exists() else []
            for line in lines:
                if line.endswith("\n") and meeting in (words := line.split()):
                    return words
            await asyncio.sleep(0.05)


async def test_an_engine_over_two_nodes_starts_and_starts_anew_when_one_dies_meanwhile(
    cluster: Cluster, placer_of: Callable[..., tuple[RayPlacer, ActorSpec]], tmp_path: Path
) -> None:
    _, second = (cluster.add_node(num_cpus=2, num_gpus=4) for _ in range(2))
    placer, spec = placer_of()
    await placer.open()
    await placer.place(spec)
    seats = dict(placer._seats.of("generation-0")[0].seats)
    assert len({seat.facts["node"] for seat in seats.values()}) == 2 and [len(s.facts["gpus"]) for s in seats.values()] == [4, 4]
    process = await placer.start(spec)
    meeting = meeting_of(tmp_path)
    words = await told(tmp_path, 1, meeting)
    line = " ".join(words)
    assert "--nnodes 2" in line and "--node-rank 1" in line and f"--dist-init-addr {meeting}" in line
    assert meeting.startswith(seats[0].facts["address"] + ":")
    assert words[-1] == ",".join(seats[1].facts["gpus"])
    await process.stop(0.0)
    await placer.end_of(spec, process)

    cluster.remove_node(second, allow_graceful=False)  # the engine has its places, and is about to start
    process = await placer.start(spec)
    end = await placer.end_of(spec, process)
    assert "is gone" in end.moved or "lost before it began" in end.moved, end
    cluster.add_node(num_cpus=2, num_gpus=4)
    await asyncio.wait_for(placer.place(spec), 60)
    process = await placer.start(spec)
    anew = meeting_of(tmp_path)
    assert anew != meeting
    await told(tmp_path, 1, anew)
    await process.stop(0.0)
    await placer.close()
    assert groups() == []


async def test_who_cannot_begin_takes_back_what_it_asked_for_and_nothing_else(
    cluster: Cluster, placer_of: Callable[..., tuple[RayPlacer, ActorSpec]]
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=3, num_gpus=4)
    placer, spec = placer_of(gpus=16, wait_s=2.0)
    with pytest.raises(SettingsError) as refused:
        await placer.open()
    said = "ray_wait_s = 2.0: no space for generation-0 (1 CPU and 8 GPU, 1 CPU and 8 GPU): the cluster's 3 node(s)"
    assert said in str(refused.value)
    assert groups() == []
    placer, spec = placer_of(gpus=16)
    opening = asyncio.create_task(placer.open())
    while not groups():  # noqa: ASYNC110 - Ray makes it
        await asyncio.sleep(0.05)
    opening.cancel()  # as Ctrl-C does
    await asyncio.gather(opening, return_exceptions=True)
    assert groups() == [], "a group that waits for room is demand for ever"

    first, spec = placer_of()
    await first.open()
    before = groups()
    second, _ = placer_of(wait_s=2.0, engines=2)
    second.add(msgspec.structs.replace(spec, name="generation-1"))
    with pytest.raises(SettingsError, match="no space for generation-1"):
        await second.open()
    assert groups() == before
    await asyncio.wait_for(first.place(spec), 60)
    seats = first._seats.of("generation-0")[0].seats
    ray.kill(seats[1].handle)  # as one ends that had no process for long, its worker pausing after crashes
    await asyncio.wait_for(first.place(spec), 60)
    assert await seats[1].handle.names.remote() == []
    await first.close()
