"""A whole run on a Redis as a user of least rights, among folders with the names of our packages: who may read what of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bus import STREAMS, Bus, BusConfig
from bus.client import connect
from bus.server import EmbeddedRedis
from tests.bus.test_rights import rights
from tests.crash.house import REPO, RUN_DEADLINE_S, UNLOWERED, Run, until

SECRET = "hunter2-of-this-run"
INSTALLED = "import runpy, sys; del sys.argv[0:3]; runpy.run_module('miles_async', run_name='__main__', alter_sys=True)"


def in_process_lists() -> list[str]:
    """Command lines on this host that show it."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes()
        except OSError:
            continue
        if SECRET.encode() in line:
            found.append(line.decode(errors="replace"))
    return found


def told(run: Run, *commands: tuple[str, ...]) -> list[str]:
    """What commands print, one beside the other, with the password where a user would have put it."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "MILES_ASYNC_BUS_PASSWORD": SECRET}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    python = (sys.executable, "-P", "-m", "miles_async")
    begun = [subprocess.Popen([*python, *w], cwd=run.home, env=environment, stdout=pipe, stderr=both, text=True) for w in commands]
    return [process.communicate(timeout=120)[0] for process in begun]


async def everything_on(url: str) -> bytes:
    """All that lies on the bus, as it lies there."""
    parts: list[bytes] = []
    async with connect(url) as client:
        async for key in client.scan_iter(match="ma:*"):
            kind = await client.type(key)
            if kind == b"hash":
                parts += [value for pair in (await client.hgetall(key)).items() for value in pair]
            elif kind == b"string":
                parts.append(await client.get(key))
            elif kind == b"stream":
                parts += [v for _, fields in await client.xrange(key) for pair in fields.items() for v in pair]
    return b"\n".join(parts)


@pytest.mark.takes(30)
@pytest.mark.timeout(400)  # its processes begin cold, beside the whole matrix
async def test_the_password_of_a_runs_redis_is_nowhere_and_its_files_are_its_owners(
    run_of: Callable[..., Run], private_redis: EmbeddedRedis, monkeypatch
) -> None:
    async with connect(private_redis.url) as client:
        await client.execute_command(*rights(SECRET))
        await client.execute_command("ACL", "SETUSER", "default", "resetpass", ">another")
    url = private_redis.url.replace("unix://", f"unix://trainer:{SECRET}@", 1)
    tables = {"bus": {"bus_url": url}, "rollout": {"num_rollout": 2}, "launch": {"report": True, "console": "plain"}}
    run = run_of(tables)
    for name in ("bus", "actors", "msgspec"):  # a user's own code, in the folder where the run is started
        (run.home / name).mkdir()
        (run.home / name / "__init__.py").write_text("raise ImportError('not ours')")
    run.start(wrap=(*UNLOWERED, sys.executable, "-P", "-c", INSTALLED))
    assert run.launcher is not None
    seen: list[str] = []

    def over() -> bool:
        seen.extend(in_process_lists())
        return run.launcher is not None and run.launcher.poll() is not None

    until("the end of the run", over, seconds=RUN_DEADLINE_S)
    log = (run.home / "launcher.log").read_text()
    assert run.launcher.returncode == 0, log[-2000:]
    assert seen == []
    bare = private_redis.url.replace("unix://", "unix://trainer@", 1)
    verbs = [(verb, "--runs-dir", str(run.dir.parent)) for verb in ("status", "doctor", "ledger", "stop")]
    said = [log, *told(run, ("train", str(run.home / "run.toml"), "--dry-run"), *verbs)]
    for text in said:
        assert text.strip() and SECRET not in text
    assert "trainer@" in said[1], "the address itself is shown"
    monkeypatch.setenv("MILES_ASYNC_BUS_PASSWORD", SECRET)
    assert SECRET.encode() not in await everything_on(private_redis.url.replace("unix://", "unix://:another@", 1))
    files = [path for path in run.dir.rglob("*") if not path.is_symlink()]
    assert {"settings.toml", "report.html", "run.json", "trainer.log", "trainer.json"} <= {p.name for p in files}
    for path in (run.dir, *files):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, f"{path} is open to others: {mode:o}"
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), f"{path} holds the password"
    async with Bus(BusConfig(url=bare, run="r")) as bus:
        assert all([await bus.length(stream) >= 0 for stream in STREAMS])
