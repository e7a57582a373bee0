"""Who may be part of a run on a Redis that several hosts reach: refused in one line, before anything starts."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.runtime.context import STOP_WISH, Context
from actors.runtime.host import processes_name
from actors.runtime.leftovers import owner_of
from bus import Bus, BusConfig, Commit
from bus.errors import BusRefused, BusUnreachable, NameTaken
from bus.identity import Identity, read_identity, write_identity
from bus.streams.hold import Who
from miles_async.cli import worker
from miles_async.cli.app import main
from miles_async.cli.staying import Stay, take_worker_name
from miles_async.launcher.joined import DONE, let_go
from miles_async.launcher.place import Place
from miles_async.launcher.prepare import claim_identity, engine_token
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from tests.actors.house import open_bus, running, until
from tests.bus.suite.clock import ManualClock
from tests.miles_async.console_data import vitals

DEAD_PID = 2**22 + 1  # above what the kernel gives


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        (Identity(release="9.1.0"), "is of release 9.1.0, this worker of"),
        (Identity(bus={"url": "", "run": "r", "lease_s": "soon"}), "states its bus as this release does not understand it"),
        (None, "does not say what it is"),
    ],
)
def test_a_worker_that_may_mean_another_thing_by_the_same_message_is_refused(
    redis_url: str, run_name: str, capsys: pytest.CaptureFixture[str], identity: Identity | None, said: str, tmp_path: Path
) -> None:
    async def begin() -> None:
        async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
            await bus.make_readers()
            await bus.set_vitals("sampler", vitals("sampler"))
            if identity is not None:
                await write_identity(bus, identity)

    asyncio.run(begin())
    flags = ["--bus", redis_url, "--run", run_name, "--engine-url", "http://127.0.0.1:1", "--model-path", str(tmp_path)]
    assert main(["worker", *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def another(pid: int = 1, **said: Any) -> Who:
    """A process of another host, unless it says otherwise."""
    return Who(**{"pid": pid, "host": "node7", "processes": "elsewhere", "began": "1:1"} | said)


@asynccontextmanager
async def held_by(url: str, run: str, name: str, who: Who, *, beats: bool) -> AsyncIterator[None]:
    """A name in the hands of another process, which is heard all the time, or not at all."""
    async with Bus(BusConfig(url=url, run=run)) as bus, asyncio.TaskGroup() as tasks:
        bus.names.token = "abcd"
        assert await bus.names.take(name, who, lapse_s=1.0) is None

        async def beat() -> None:
            with suppress(NameTaken):
                while beats:
                    await bus.set_vitals(name, vitals(name))
                    await asyncio.sleep(0.02)

        beating = tasks.create_task(beat())
        yield
        beating.cancel()


@pytest.mark.parametrize(
    ("launcher", "folder", "beats", "refused"),
    [
        ({}, "same", True, True),
        ({}, "same", False, False),  # its host died
        ({"processes": processes_name(), "began": owner_of(1)}, "same", True, False),  # of this host: the lock of its folder tells
        ({"processes": processes_name(), "began": owner_of(1)}, "other", True, True),  # which is no other folder's
        ({"processes": processes_name(), "began": "1:0"}, "other", True, False),  # another process has its number by now
    ],
)
async def test_a_second_launcher_of_a_run_that_another_one_keeps_is_refused(
    redis_url: str, run_name: str, launcher: dict[str, Any], folder: str, beats: bool, refused: bool, tmp_path: Path
) -> None:
    said = {"hf_checkpoint": "m", "prompt_data": "p", "num_rollout": 1, "rm_type": "exact_match", "heartbeat_s": 0.2}
    settings = settings_from(name=run_name, bus_url=redis_url, **said)
    folders = {"run_dir": str(tmp_path / "same"), "weights_dir": "w", "blob_dir": "b"}
    own = {**folders, "model_dir": "m", "stop_token_ids": (), "num_rollout": 1}
    place = Place(**own, fingerprint="f", engine_token=engine_token(tmp_path))  # type: ignore[arg-type]
    who = another(**{"folder": place.run_dir} | launcher)
    place = msgspec.structs.replace(place, run_dir=str(tmp_path / folder))
    async with held_by(redis_url, run_name, "launcher", who, beats=beats), Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        if refused:
            with pytest.raises(SettingsError, match="on host node7 has a run of this name") as refusal:
                await claim_identity(bus, settings, place)
            assert "\n" not in str(refusal.value)
            assert await read_identity(bus) is None, "nothing was changed"
            return
        await claim_identity(bus, settings, place)
        await claim_identity(bus, settings, place)  # as a launcher does that makes its bus anew
        assert await read_identity(bus) is not None


@pytest.mark.parametrize(
    ("had", "beats", "refused"),
    [
        ({}, True, True),
        ({}, False, False),  # its host died
        ({"pid": DEAD_PID, "processes": processes_name()}, True, False),  # it was killed here: the new one need not wait
    ],
)
async def test_a_second_worker_of_a_name_is_refused_while_the_first_is_heard(
    redis_url: str, run_name: str, had: dict[str, Any], beats: bool, refused: bool
) -> None:
    async with held_by(redis_url, run_name, "w", another(**had), beats=beats), Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        if refused:
            with pytest.raises(BusRefused, match="'w' refused: a worker of this name works on host node7"):
                await take_worker_name(bus, "w", 0.2)
        else:
            await take_worker_name(bus, "w", 0.2)
        holder = await bus.names.holder_of("w")
        assert holder is not None and (holder.token == "abcd") == refused


async def _until_it_ends(room: Context) -> None:
    async with asyncio.timeout(10):
        await room.draining.wait()


@pytest.mark.parametrize("changed", ["mask_offpolicy", "bus.lease_s"])
async def test_a_worker_leaves_when_its_run_tells_other_settings(redis_url: str, run_name: str, changed: str) -> None:
    known = Identity(run=run_name, worker={"mask_offpolicy": False, "max_running": 8}, bus={"lease_s": 6.0, "url": ""})
    others = {
        "mask_offpolicy": msgspec.structs.replace(known, worker={"mask_offpolicy": True, "max_running": 8}),
        "bus.lease_s": msgspec.structs.replace(known, bus={"lease_s": 9.0, "url": ""}),
    }
    alike = msgspec.structs.replace(known, worker={"mask_offpolicy": False, "max_running": 4}, release="9.0.1")
    stay, clock = Stay(known), ManualClock()

    async def watch(context: Context, stay: Stay) -> None:
        context.clock = clock
        await stay.watch(context)

    async with open_bus(redis_url, run_name) as bus, running(bus, "generation", watch, stay, heartbeat_s=1.0) as room:
        for told in (alike, others[changed]):
            await until(lambda: _true(clock.sleeping > 0))
            assert not room.draining.is_set(), "what is live, and the doctor's, is no reason"
            await write_identity(bus, told)
            await clock.advance(1.0)
        await _until_it_ends(room)
    assert stay.changed == changed


@pytest.mark.parametrize(("host", "router"), [("here", "http://127.0.0.1:1234"), ("elsewhere", "")])
async def test_only_a_worker_beside_the_launcher_stands_behind_its_router(
    redis_url: str, run_name: str, tmp_path: Path, host: str, router: str
) -> None:
    told = {"model_path": str(tmp_path), "router_url": "http://127.0.0.1:1234"}
    where = {} if host == "here" else {"processes": host}
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await bus.make_readers()
        bus_told = {"url": "", "run": run_name}
        await write_identity(bus, Identity(run=run_name, worker=told, bus=bus_told, run_dir=str(tmp_path)))
        await bus.set_vitals("launcher", vitals("launcher", **where))
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    spec, _ = await worker._spec(parser.parse_args(["--bus", redis_url, "--run", run_name]))
    assert spec.room["router_url"] == router


async def test_a_worker_of_a_run_that_has_stopped_is_refused_before_it_boots(redis_url: str, run_name: str) -> None:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await bus.make_readers()
        await write_identity(bus, Identity(run=run_name))
        await bus.commit(Commit(state={STOP_WISH: "stop@node7:1"}))
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    with pytest.raises(BusRefused, match="has finished or was stopped"):
        await worker._spec(parser.parse_args(["--bus", redis_url, "--run", run_name]))


@pytest.mark.parametrize(("finished", "wish", "waits"), [(True, DONE, True), (False, "stop@node7:1", True), (False, "", False)])
async def test_workers_that_joined_are_waited_for_before_the_runs_own_bus_ends(
    redis_url: str, run_name: str, finished: bool, wish: str, waits: bool
) -> None:
    clock = ManualClock()
    others = {
        "generation-0": vitals("generation-0", "generation"),  # ours
        "killed": vitals("killed", "generation", pid=DEAD_PID),
        "left": vitals("left", "generation", state="stopped"),
        "silent": vitals("silent", "generation", processes="elsewhere"),
        "evaluator": vitals("evaluator"),
    }
    async with Bus(BusConfig(url=redis_url, run=run_name), clock=clock) as bus:
        for name, said in others.items():
            await bus.set_vitals(name, said)
        await bus.link.run("HINCRBY", bus.keys.heard, "silent", -60_000)
        await bus.set_vitals("guest", vitals("guest", "generation"))
        if not finished:
            await bus.commit(Commit(state={STOP_WISH: wish}))
        going = asyncio.create_task(let_go(bus, ["generation-0"], finished=finished, heartbeat_s=2.0, within_s=60.0))
        await until(lambda: _true(going.done() or clock.sleeping > 0))
        assert going.done() != waits and await bus.state(STOP_WISH) == wish
        if waits:
            await bus.set_vitals("guest", vitals("guest", "generation", state="draining"))
            await clock.advance(0.2)
            await until(lambda: _true(going.done() or clock.sleeping > 0))
            assert not going.done(), "it parks what it holds"
            await bus.set_vitals("guest", vitals("guest", "generation", state="stopped"))
            await clock.advance(0.2)
        await going
        if waits:  # one that never leaves keeps nobody for ever
            await bus.set_vitals("guest", vitals("guest", "generation"))
            await let_go(bus, ["generation-0"], finished=finished, heartbeat_s=2.0, within_s=0.01)


async def _true(seen: bool) -> bool:
    return seen


async def test_a_server_that_is_loading_is_away_and_refuses_nobody() -> None:
    """Who waits for the bus to come back asks again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(b"-LOADING Valkey is loading the dataset in memory\r\n" * 4)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        parser = argparse.ArgumentParser()
        worker.add_arguments(parser)
        with pytest.raises(BusUnreachable, match="loading the dataset"):
            await worker._spec(parser.parse_args(["--bus", f"redis://127.0.0.1:{port}", "--run", "r"]))
