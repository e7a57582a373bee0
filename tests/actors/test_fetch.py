"""Versions over the network: whole or not at all, each byte once where links allow it, and to nobody without the token."""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generation.supply import Supply
from actors.publisher.elsewhere import source_of
from actors.runtime import depot as depot_module
from actors.runtime import fetch as fetch_module
from actors.runtime.checksum import checksum
from actors.runtime.context import Context
from actors.runtime.depot import Depot
from actors.runtime.fetch import Damaged, Fetch, FetchFailed, pack_parcel
from actors.runtime.host import place
from bus.errors import BadMessage
from bus.knobs.live import LiveKnobs
from bus.messages.active import Activate
from bus.messages.policy import WeightManifest
from bus.messages.versions import PolicyVersion
from bus.messages.weights import Parcel
from tests.actors.house import open_bus
from tests.declared import actor_of

SIZE = 5 * fetch_module.LEAST_PIECE + 123
Serve = Callable[[Path], Depot]


@pytest.fixture
def version(tmp_path: Path) -> Path:
    folder = tmp_path / "v1"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(Random(1).randbytes(SIZE))
    (folder / "config.json").write_text("{}")
    (folder / "empty.txt").touch()
    return folder


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Depots of folders, whatever the parcel; impatient, so that what never comes is known soon."""
    monkeypatch.setattr(depot_module, "PATIENCE_S", 0.3)
    made: list[Depot] = []

    def make(folder: Path) -> Depot:
        made.append(Depot(lambda _: folder, "secret", host="127.0.0.1", bind="127.0.0.1"))
        return made[-1]

    yield make
    for depot in made:
        depot.close()


def fetching(
    parcel: Parcel, folder: Path, *sources: str, token: str = "secret", deadline_s: float = 5.0
) -> tuple[Fetch, list[int]]:
    came: list[int] = []
    return Fetch(parcel, folder, sources, token=token, deadline_s=deadline_s, came=came.append), came


def same(one: Path, two: Path) -> bool:
    names = [p.name for p in sorted(one.iterdir()) if not p.name.startswith(".")]
    return all((one / n).read_bytes() == (two / n).read_bytes() for n in names) and not list(two.glob("*.part"))


def test_a_version_of_several_files_is_described_as_it_was_written(tmp_path: Path) -> None:
    for n in (2, 1):
        (tmp_path / f"model-0000{n}-of-00002.safetensors").write_bytes(bytes([n]) * 9)
    written = checksum()
    written.update(b"\x01" * 9 + b"\x02" * 9)
    assert len(pack_parcel(tmp_path, written.hexdigest()).files) == 2
    with pytest.raises(Damaged):
        pack_parcel(tmp_path, "0" * 32)


def test_a_worker_of_the_host_that_stands_still_in_its_fetch_holds_up_no_other(version: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetch, _ = fetching(pack_parcel(version), folder, "http://127.0.0.1:1", deadline_s=0.2)
        with pytest.raises(FetchFailed, match="another worker of this host is fetching it, and has stood still"):
            fetch.run()


def test_a_version_is_passed_on_while_it_still_arrives(version: Path, serve: Serve, tmp_path: Path) -> None:
    parcel, middle = pack_parcel(version), tmp_path / "middle"
    middle.mkdir()
    part, body = middle / "model.safetensors.part", (version / "model.safetensors").read_bytes()
    part.write_bytes(body[: 2 * parcel.piece_bytes])
    for name in ("config.json", "empty.txt"):
        (middle / name).write_bytes((version / name).read_bytes())
    third = threading.Event()
    last, came = fetching(parcel, tmp_path / "last", serve(middle).url)
    last._came = lambda n: (came.append(n), third.set() if sum(came) > 2 * parcel.piece_bytes else None)  # type: ignore[assignment]
    thread = threading.Thread(target=last.run)
    thread.start()
    with part.open("ab") as file:  # the last one has two pieces when the third comes here
        file.write(body[2 * parcel.piece_bytes : 3 * parcel.piece_bytes])
    assert third.wait(5.0), "a piece was here and was not passed on"
    assert not (tmp_path / "last" / "model.safetensors").exists()
    with part.open("ab") as file:
        file.write(body[3 * parcel.piece_bytes :])
    part.rename(middle / "model.safetensors")
    thread.join(10.0)
    assert same(version, tmp_path / "last") and sum(came) == parcel.n_bytes


def test_a_source_that_breaks_off_is_followed_by_the_next_where_it_ended(
    version: Path, serve: Serve, tmp_path: Path
) -> None:
    parcel, half = pack_parcel(version), tmp_path / "half"
    half.mkdir()
    body = (version / "model.safetensors").read_bytes()
    (half / "model.safetensors.part").write_bytes(body[: 3 * parcel.piece_bytes + 5])  # and no more comes
    fetch, came = fetching(parcel, tmp_path / "here", serve(half).url, serve(version).url)
    fetch.run()
    assert same(version, tmp_path / "here")
    assert sum(came) == parcel.n_bytes, "no piece came twice"


def test_what_was_here_when_a_fetch_was_killed_does_not_come_again(version: Path, serve: Serve, tmp_path: Path) -> None:
    parcel, here = pack_parcel(version), tmp_path / "here"
    here.mkdir()
    body = (version / "model.safetensors").read_bytes()
    (here / "model.safetensors.part").write_bytes(body[: 2 * parcel.piece_bytes + 7])  # killed in the middle of a piece
    fetch, came = fetching(parcel, here, serve(version).url)
    fetch.run()
    assert same(version, here) and sum(came) == parcel.n_bytes - 2 * parcel.piece_bytes


def test_a_damaged_piece_is_not_taken_and_the_next_source_asked(version: Path, serve: Serve, tmp_path: Path) -> None:
    parcel, bad = pack_parcel(version), tmp_path / "bad"
    bad.mkdir()
    for path in version.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    body = bytearray((version / "model.safetensors").read_bytes())
    body[parcel.piece_bytes + 3] ^= 1
    (bad / "model.safetensors").write_bytes(body)
    fetch, _ = fetching(parcel, tmp_path / "here", serve(bad).url, serve(version).url)
    fetch.run()
    assert same(version, tmp_path / "here")
    alone, _ = fetching(parcel, tmp_path / "other", serve(bad).url, deadline_s=0.2)
    with pytest.raises(
        FetchFailed, match=r"model\.safetensors stopped at .*: piece 1 of model\.safetensors is damaged"
    ):
        alone.run()


def test_nobody_gets_anything_without_the_token_or_from_elsewhere(version: Path, serve: Serve, tmp_path: Path) -> None:
    parcel, source = pack_parcel(version), serve(version).url
    (tmp_path / "secret.json").write_text("no")
    fetch, _ = fetching(parcel, tmp_path / "here", source, token="wrong", deadline_s=0.2)
    with pytest.raises(FetchFailed, match="it refuses the run's token"):
        fetch.run()
    for path in (
        f"/{parcel.id}/../secret.json",
        f"/{parcel.id}/..%2fsecret.json",
        "/config.json",
        f"/{parcel.id}/.lock",
    ):
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(source).port, timeout=5)
        connection.request("GET", path, headers={"Authorization": "Bearer secret", "Range": "bytes=0-1"})
        assert connection.getresponse().status == 400, path
        connection.close()


@pytest.mark.parametrize("name", ["../x", "a/b", ".lock", "", "x" * 200])
def test_a_parcel_that_names_files_elsewhere_is_refused(version: Path, tmp_path: Path, name: str) -> None:
    parcel = pack_parcel(version)
    file = msgspec.structs.replace(parcel.files[0], name=name)
    with pytest.raises(BadMessage):
        fetching(msgspec.structs.replace(parcel, files=(file,)), tmp_path / "here")


def test_what_nobody_has_any_more_is_given_up_for_what_is_newer(version: Path, serve: Serve, tmp_path: Path) -> None:
    parcel, here = pack_parcel(version), tmp_path / "here"
    fetch = Fetch(parcel, here, [serve(tmp_path / "gone").url], token="secret", deadline_s=60.0, came=print, pointless=lambda: True)
    with pytest.raises(FetchFailed, match="it does not have it"):
        fetch.run()
    going_on, _ = fetching(parcel, here, serve(version).url)
    going_on._pointless = lambda: True
    going_on.run()
    assert same(version, here), "what comes is finished, whatever is newer"


def test_a_host_that_is_silent_costs_a_stall_and_no_more(
    version: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "STALL_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the request and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        fetch, _ = fetching(pack_parcel(version), tmp_path / "here", address, serve(version).url)
        fetch.run()
    assert same(version, tmp_path / "here")


async def test_a_relay_says_at_once_that_a_version_will_not_come_to_it_any_more(
    version: Path, tmp_path: Path, redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was away goes on with the order that it had: what it waits for there keeps it from the newest one."""
    monkeypatch.setattr(depot_module, "PATIENCE_S", 3600.0)  # as long as for one that is on its way
    async with open_bus(redis_url, run_name) as bus:
        context = Context(actor_of(name="c", role="generation", bus=bus.config), bus, LiveKnobs(bus))
        supply = Supply(context, token="secret", serves=True, address="127.0.0.1", deadline_s=5.0)
        supply.open()
        parcels = [msgspec.structs.replace(pack_parcel(version), id=f"{n:032x}") for n in (1, 2)]
        for n, parcel in enumerate(parcels, start=1):
            manifest = WeightManifest(transport="network", path="", checksum="", n_tensors=1, n_bytes=1)
            supply.know(Activate(version=PolicyVersion(id=n, step=n), manifest=manifest, mode="retract", parcel=parcel))
        try:
            old, _ = fetching(parcels[0], tmp_path / "here", context.depot, deadline_s=0.0)
            with pytest.raises(FetchFailed, match="does not have it"):
                await asyncio.to_thread(old.run)
            assert supply._find(parcels[1].id) is not None, "the newest is waited for"
            assert supply._find("f" * 32) is not None, "as is one that nobody told of yet"
        finally:
            await supply.close()


# -- who fetches from whom -----------------------------------------------------------------------------------------


def test_hosts_that_begin_together_make_a_chain() -> None:
    parents: dict[str, str] = {}
    serving = dict.fromkeys("abcd", "http://x")
    for host in "abcd":
        parents[host] = source_of(host, parents, serving, ())
    assert parents == {"a": "", "b": "a", "c": "b", "d": "c"}
    assert source_of("late", parents, serving, set("abcd")) == "", "all are done: the trainer's host is free again"
    assert source_of("late", parents, serving, set("b")) == "a", "whom it served has all"


def test_a_host_that_cannot_serve_is_nobodys_source() -> None:
    assert source_of("b", {"a": ""}, {}, ()) == ""


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef"))), max_size=30))
def test_nobody_ever_waits_for_himself(told: list[tuple[str, set[str]]]) -> None:
    parents: dict[str, str] = {}
    serving = dict.fromkeys("abcdef", "http://x")
    for host, done in told:
        source = source_of(host, parents, serving, done)
        parents.pop(host, None)
        parents[host] = source
        for begin in parents:
            at, seen = begin, set()
            while at:
                assert at not in seen, parents
                seen.add(at)
                at = parents.get(at, "")


@pytest.mark.parametrize(
    ("given_", "own", "expected"),
    [
        ("", "10.0.0.5", ("10.0.0.5", "10.0.0.5", 0)),
        ("", "127.0.0.1", ("", "", 0)),  # on the bus's host: others know a way there
        ("", "", ("", "127.0.0.1", 0)),  # a unix socket: nobody else reaches the bus
        ("node7", "127.0.0.1", ("node7", "", 0)),
        ("node7:7070", "10.0.0.5", ("node7", "", 7070)),
        ("[fd00::7]:7070", "", ("fd00::7", "", 7070)),
        ("fd00::7", "", ("fd00::7", "", 0)),
    ],
)
def test_an_address_is_the_setting_or_that_of_the_bus_connection(
    given_: str, own: str, expected: tuple[str, str, int]
) -> None:
    assert place(given_, own) == expected
