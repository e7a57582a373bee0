"""Who may be part of a run on a Redis that several hosts reach: refused in one line, before anything starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus import Bus, BusConfig
from bus.identity import Identity, read_identity, write_identity
from miles_async.cli.app import main
from miles_async.launcher.place import Place
from miles_async.launcher.prepare import claim_identity, engine_token
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from
from tests.miles_async.console_data import vitals


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


@pytest.mark.parametrize(
    ("launcher", "folder", "silent_s", "refused"),
    [
        ({"processes": "elsewhere", "host": "node7"}, "same", 0, True),
        ({"processes": "elsewhere", "host": "node7"}, "same", 60, False),
        ({"processes": "elsewhere", "state": "stopped"}, "same", 0, False),
        ({"pid": 1, "host": "node7"}, "same", 0, False),  # of this host: the lock of its folder tells
        ({"pid": 1, "host": "node7"}, "other", 0, True),  # which is no other folder's
        ({"pid": 1, "host": "node7"}, "other", 60, False),  # process 1 lives, but is no launcher: it took the number of one
    ],
)
async def test_a_second_launcher_of_a_run_that_another_one_keeps_is_refused(
    redis_url: str, run_name: str, launcher: dict[str, Any], folder: str, silent_s: int, refused: bool, tmp_path: Path
) -> None:
    said = {"hf_checkpoint": "m", "prompt_data": "p", "num_rollout": 1, "rm_type": "exact_match"}
    settings = settings_from(name=run_name, bus_url=redis_url, **said)
    folders = {"run_dir": str(tmp_path / "same"), "weights_dir": "w", "blob_dir": "b"}
    own = {**folders, "model_dir": "m", "stop_token_ids": (), "num_rollout": 1}
    place = Place(**own, fingerprint="f", engine_token=engine_token(tmp_path))  # type: ignore[arg-type]
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await claim_identity(bus, settings, place)
        first = await read_identity(bus)
        await bus.set_vitals("launcher", vitals("launcher", **launcher))
        await bus.link.run("HINCRBY", bus.keys.heard, "launcher", -1000 * silent_s)
        place = msgspec.structs.replace(place, run_dir=str(tmp_path / folder))
        if refused:
            with pytest.raises(SettingsError, match="node7 keeps a run of this name") as refusal:
                await claim_identity(bus, settings, place)
            assert "\n" not in str(refusal.value)
        else:
            await claim_identity(bus, settings, place)
        if refused or folder == "same":
            assert await read_identity(bus) == first, "nothing was changed"
