"""Ways out of the sandbox, of a confined environment and of a confined verifier: none is one, and what holds them lives on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from actors.environments.host import Died, EnvironmentHost
from actors.reward.pool import VerifierPool
from actors.reward.sample import Sample, ScorerFailed
from actors.runtime import confine
from actors.runtime.confine import Profile, lacking
from actors.runtime.sandbox import Sandbox
from tests.actors.escapes import FELT, REFUSED, SECRET, X86, World, unconfined, world

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(lacking()), reason=f"this kernel lacks {' and '.join(lacking())}"),
]
WAYS = {**FELT, **REFUSED, **X86}
NAMES = ("MILES_ASYNC_BUS_PASSWORD", "MILES_ASYNC_ENGINE_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OF_MY_OWN")
LATE = ("NameError", "SyntaxError", "AttributeError", "ImportError")  # the attempt itself is wrong


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def _secrets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.setenv(name, SECRET)
        yield


def judged(way: str, said: str, outside: World, ended: bool) -> None:
    assert outside.felt(said) == ""
    assert not any(f"{error}:" in said for error in LATE), said
    refused = "Error: [Errno " in said or "not allowed to raise" in said or ended
    assert refused or way in FELT, f"it was let: {said}"
    assert refused or way not in X86, f"it went on: {said}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(width=4, memory_bytes=512 << 20) as sandbox:
        yield sandbox


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_leaves_the_sandbox(box: Sandbox, outside: World, way: str) -> None:
    assert box._server is not None
    server = box._server
    ran = await box.run(outside.told(WAYS[way]))
    judged(way, ran.stdout + ran.stderr, outside, ran.cause == "crash")
    assert server.alive and box._server is server, "the server was ended"


class Kept:
    """One environment, anew when it has ended."""

    def __init__(self, folder: Path) -> None:
        self._log, self._host = folder / "log", None

    async def step(self, code: str) -> tuple[str, bool]:
        if self._host is None or not self._host.alive:
            self._host = await EnvironmentHost.start("tests.actors.escaping.Obeys", self._log, Profile())
            await self._host.ask("begin", b"\xc0", 30.0)
        try:
            return msgspec.msgpack.decode(await self._host.ask("step", msgspec.msgpack.encode(code), 30.0)), False
        except Died as error:
            return str(error), True

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    found = Kept(tmp_path_factory.mktemp("environment"))
    yield found
    await found.close()


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_leaves_a_confined_environment_nor_its_threads(kept: Kept, outside: World, way: str) -> None:
    """Also not a thread that its module started while it was imported."""
    said, ended = await kept.step(outside.told(WAYS[way]))
    judged(way, said, outside, ended)
    assert ended or said.count("Traceback") != 1, f"one of its two threads was let: {said}"
    assert (await kept.step("print(7)"))[0] == "7\n7\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verifier() -> AsyncIterator[VerifierPool]:
    async with VerifierPool("tests.actors.escaping.obeys", n_workers=1, boot_deadline_s=60.0, profile=Profile()) as pool:
        yield pool


async def _scored(pool: VerifierPool, code: str) -> str:
    sample: Any = Sample(sample_id="a", prompt="", response=code, label="", metadata={})
    with pytest.raises(ScorerFailed) as told:
        await pool.score(sample, 30.0)
    return str(told.value) + "".join(told.value.__notes__ if hasattr(told.value, "__notes__") else ())


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_leaves_a_confined_verifier(verifier: VerifierPool, outside: World, way: str) -> None:
    said = await _scored(verifier, outside.told(WAYS[way]))
    judged(way, said, outside, "its process" in said)
    assert "7" in await _scored(verifier, "print(7)")


@pytest.mark.parametrize("way", FELT)
async def test_each_of_these_ways_leads_out_where_nothing_holds_it(outside: World, way: str) -> None:
    """What is tried above is something: unconfined, the world feels it."""
    said = await asyncio.to_thread(unconfined, outside.told(FELT[way]))
    end = time.monotonic() + 20
    while not outside.felt(said):  # a signal is felt when its process runs next
        assert time.monotonic() < end, said
        await asyncio.sleep(0.05)


@pytest_asyncio.fixture(loop_scope="module")
async def asked(tmp_path: Path) -> AsyncIterator[Any]:
    """What an environment of this profile says to code."""
    hosts = []

    async def ask(code: str, *how: Any) -> str:
        hosts.append(host := await EnvironmentHost.start("tests.actors.escaping.Obeys", tmp_path / "log", *how))
        await host.ask("begin", b"\xc0", 30.0)
        return str(msgspec.msgpack.decode(await host.ask("step", msgspec.msgpack.encode(code), 30.0)))

    yield ask
    for host in hosts:
        await host.close()


async def test_variables_that_are_passed_on_are_those_that_were_named(asked: Any) -> None:
    code = f"print([name for name in {NAMES} if name in __import__('os').environ])"
    assert await asked(code, Profile(), ("OF_MY_OWN", "MILES_ASYNC_BUS_PASSWORD")) == "['OF_MY_OWN']\n" * 2
    assert await asked(code) == f"{list(NAMES[2:])}\n" * 2, "one of the user's rights has all but ours"


async def test_files_that_were_named_are_read_and_no_other(asked: Any, tmp_path: Path) -> None:
    for name in ("given", "other"):
        (tmp_path / name).write_text(f"{name} is read")
    code = "for name in ('given', 'other'):\n    print(open({!r} + name).read())".format(f"{tmp_path}/")
    async with Sandbox(reads=[str(tmp_path / "given")]) as box:
        ran = await box.run(code)
    for text in (ran.stdout + ran.stderr, await asked(code, Profile(reads=(str(tmp_path / "given"),)))):
        assert "given is read" in text and "Error: [Errno" in text and "other is read" not in text


async def test_of_the_current_folder_nothing_but_modules(asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a home."""
    (tmp_path / "beside.py").write_text("VALUE = 'is imported'")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inside.py").write_text("VALUE = 'is imported too'")
    (tmp_path / "keys").mkdir()
    for secret in ("token", "keys/id", ".hidden.py"):
        (tmp_path / secret).write_text(SECRET)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    code = "import beside, package.inside\nprint(beside.VALUE, package.inside.VALUE)\n"
    code += f"for name in ('token', 'keys/id', '.hidden.py'):\n    try:\n        print(open({f'{tmp_path}/'!r} + name).read())\n"
    code += "    except PermissionError:\n        print('refused')\n"
    assert await asked(code, Profile()) == "is imported is imported too\nrefused\nrefused\nrefused\n" * 2


async def test_a_kernel_that_lacks_a_part_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "lacking", lambda: (confine.NO_LANDLOCK,))
    for step in (confine.confine_files, confine.confine_calls):
        with pytest.raises(confine.Unconfined, match="lacks limits on which files are opened") as told:
            step(Profile())
        assert "--allow-weak-sandbox" in str(told.value) and "\n" not in str(told.value)


async def test_no_capability_is_left_and_none_to_be_had() -> None:
    code = "from actors.runtime.confine import *; confine_files(Profile(reads=('/proc',))); print(open('/proc/self/status').read())"
    said = await asyncio.to_thread(unconfined, code)
    status = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
    assert status["NoNewPrivs"].strip() == "1"
    assert {status[f"Cap{which}"].strip("\t0") for which in ("Inh", "Prm", "Eff", "Amb")} == {""}
