"""`miles-async qualify` on the embedded engine, on servers that lie, lack, die; and records, which runs obey."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.generation.engine import RequestRefused
from actors.generation.engines.sglang import qualified
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.qualified import SHIPPED, Capability, Record, own_folder, read, record_of, write
from actors.generation.engines.sglang.qualify import NotQualified, qualify
from actors.generation.engines.sglang.wire import NEVER_MIXES
from miles_async.cli.app import main
from tests.engine.conftest import engine_process
from tests.engine.session_server import Gate, gated, said
from tests.engine.test_sessions import client_of

pytestmark = pytest.mark.timeout(300)
Served = tuple[str, subprocess.Popen[str], Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def served(models: Callable[[str], tuple[Path, Path]]) -> Iterator[Served]:
    first, _ = models("qwen3-endless")
    with engine_process(first, "--served-version", "7") as (url, process):
        yield url, process, first


@pytest.fixture
async def gate(served: Served) -> AsyncIterator[Gate]:
    async with gated(served[0]) as one:
        yield one


def test_the_embedded_engine_is_qualified_and_goes_on_as_it_was(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    url, _, model = served
    assert main(["qualify", "--engine-url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    record = record_of("embedded")
    assert record is not None and record.device == "cpu" and str(own_folder()) in lines[-1]
    assert {name for name, one in record.capabilities.items() if not one.ok} == {"spans", "sessions"}
    assert len(lines) == len(record.capabilities) + 1 and "no   it has none" in "\n".join(lines)
    import urllib.request

    with urllib.request.urlopen(f"{url}/model_info") as answer:
        info = json.load(answer)
    assert (info["weight_version"], info["model_path"]) == ("7", str(model))


async def told_as(gate: Gate, **changed: Any) -> None:
    """Its /server_info says this instead."""
    client = client_of(gate.url)
    info = dict(await client.info())
    await client.close()
    gate.answers["/server_info"] = [(200, info | changed)] * 9


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"], ids=["has what it should not", "lacks what it should have"])
async def test_a_server_that_lies_about_its_release_gets_no_record(gate: Gate, release: str) -> None:
    await told_as(gate, version=release)
    with pytest.raises(NotQualified, match=f"says it is {release}") as told:
        await qualify(gate.url)
    assert "\n" not in str(told.value) and record_of(release) is None


@pytest.mark.parametrize("version", [None, "../../etc/passwd", 5, ""])
async def test_a_server_that_names_no_release_gets_no_record(gate: Gate, version: Any) -> None:
    await told_as(gate, version=version)
    with pytest.raises(NotQualified, match="does not say which release"):
        await qualify(gate.url)


async def test_half_a_capability_is_none(gate: Gate) -> None:
    gate.answers["/end_weight_update"] = [(404, {"detail": "Not Capability"})] * 99
    gate.answers["/weights_checker"] = [(400, said("no checker", False))] * 9
    gate.answers["/pause_generation"] = [(200, {})]  # and goes on: the first is that of `retract`
    record = await qualify(gate.url)
    why = {name: one.why for name, one in record.capabilities.items() if not one.ok}
    assert set(why) == {"sessions", "checksums", "spans", "retract"}
    assert why["sessions"] == "its end is answered 404" and "no checker" in why["checksums"]
    assert why["retract"]


async def test_a_server_that_takes_files_and_names_no_version_lacks_checksums_of_them(gate: Gate) -> None:
    gate.answers["/update_weights_from_disk"] = [(200, said("Success"))]
    record = await qualify(gate.url)
    assert "not the one it was given" in record.capabilities["checksums"].why


async def test_a_server_that_dies_in_its_qualification_gets_no_record(served: Served, gate: Gate) -> None:
    gate.answers["/weights_checker"] = [(500, said("gone", False))]
    with pytest.raises(NotQualified, match=r"died, or does not answer, in its qualification \(checksums\)"):
        await qualify(gate.url)
    served[1].kill()
    served[1].wait()
    with pytest.raises(NotQualified) as told:
        await qualify(served[0], deadline_s=5)
    assert "\n" not in str(told.value)


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for url in ("127.0.0.1:1", "http://127.0.0.1:1"):
        assert main(["qualify", "--engine-url", url]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not own_folder().exists()


RECORD = Record(release="embedded", device="cpu", by="a test", capabilities={})


async def test_runs_do_without_what_a_record_says_is_not_there(served: Served) -> None:
    url, _, model = served
    client = client_of(url)

    async def look() -> Any:
        return await client.look(own=True, model_path=str(model), routed=False)

    before = await look()
    assert before.exact and before.exact_in_place and not before.note and await client.weights_checksum()
    lacks = {"boundary": Capability(ok=False, why="two behind"), "checksums": Capability(ok=False, why="none")}
    write(msgspec.structs.replace(RECORD, capabilities=lacks), own_folder() / "embedded.json")
    found = await look()
    assert not found.exact and not found.exact_in_place
    assert "not qualified for boundary, checksums" in found.note and "two behind" in found.note and "\n" not in found.note
    with pytest.raises(RequestRefused, match="not qualified for checksums: none"):
        await client.weights_checksum()
    await client.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace('"a test"', '"somebody"'), "it was changed after"),
        (lambda text: text[:40], "no record of a qualification"),
        (lambda text: "[]", "no record of a qualification"),
        (lambda text: text.replace("embedded", "embedder"), "it was changed after"),
    ],
)
def test_a_record_that_was_changed_is_told_and_not_used(
    change: Callable[[str], str], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = own_folder() / "embedded.json"
    write(RECORD, path)
    assert record_of("embedded") == RECORD.sealed()
    path.write_text(change(path.read_text()))
    assert record_of("embedded") is None
    assert told in caplog.text and str(path) in caplog.text


def test_a_record_under_another_name_is_of_no_release() -> None:
    write(RECORD, own_folder() / "0.5.99.json")
    assert record_of("0.5.99") is None and record_of("../embedded") is None


def test_shipped_records_hold_and_only_they_open_the_inside() -> None:
    shipped = {path.stem: read(path) for path in SHIPPED.glob("*.json")}
    assert set(shipped) == {"0.5.12.post1", "0.5.21"} and qualified.tested() == ("0.5.12.post1",)
    inside = {"inside": Capability(ok=True)}
    write(Record(release="0.5.98", device="", by="", capabilities=inside), own_folder() / "0.5.98.json")
    qualified.tested.cache_clear()
    assert qualified.tested() == ("0.5.12.post1",)


async def test_a_paused_server_that_calls_itself_unwell_is_looked_at(served: Served, gate: Gate) -> None:
    """SGLang from 0.5.21 on answers /health with 503 while it is paused, as a worker that died leaves it."""
    gate.answers["/health"] = [(503, b"")] * 9
    successor: SGLangClient = client_of(gate.url)
    assert (await successor.look(own=False, model_path=str(served[2]), routed=False)).exact == bool(
        (await successor.info())[NEVER_MIXES]
    )
    await successor.close()
