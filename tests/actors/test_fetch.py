"""Versions over the network: whole or not at all, each byte once where links allow it, and to nobody without the token."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.publisher.elsewhere import source_of
from actors.runtime import fetch as fetch_module
from actors.runtime.checksum import checksum
from actors.runtime.depot import Depot, depot_at
from actors.runtime.fetch import Damaged, Fetch, FetchFailed, pack_parcel
from actors.runtime.host import place
from bus.errors import BadMessage, BusRefused
from tests.actors.parcels import Serve, fetching, same


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


def test_a_source_that_breaks_off_is_followed_by_the_next_where_it_ended(version: Path, serve: Serve, tmp_path: Path) -> None:
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
    with pytest.raises(FetchFailed, match=r"model\.safetensors stopped at .*: piece 1 of model\.safetensors is damaged"):
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


def test_what_is_withdrawn_is_sent_no_further(serve: Serve, tmp_path: Path) -> None:
    """Its file is deleted, and stays in memory for as long as it is open."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(64 << 20)  # more than a connection holds
    depot = serve(tmp_path)
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(depot.url).port, timeout=5)
    asked = {"Authorization": "Bearer secret", "Range": f"bytes=0-{(64 << 20) - 1}"}
    connection.request("GET", f"/{'0' * 32}/model.safetensors", headers=asked)
    answer = connection.getresponse()
    assert len(answer.read(10)) == 10
    depot.withdraw("0" * 32)
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
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


def test_what_the_version_s_own_host_has_no_more_is_given_up_at_once(version: Path, serve: Serve, tmp_path: Path) -> None:
    origin = serve(tmp_path / "gone").url
    fetch, _ = fetching(pack_parcel(version), tmp_path / "here", "http://127.0.0.1:1", origin, deadline_s=3600.0)
    with pytest.raises(FetchFailed, match=r"config\.json stopped at 0 of .*(does not have it|refused)"):
        fetch.run()


def test_a_source_that_is_not_reached_is_asked_once_and_then_last(version: Path, serve: Serve, tmp_path: Path) -> None:
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as dead:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, peer = dead.accept()
                    asked.append(peer)
                    connection.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{dead.getsockname()[1]}"
        fetch, _ = fetching(pack_parcel(version), tmp_path / "here", address, serve(version).url)
        fetch.run()
        dead.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)
    assert same(version, tmp_path / "here") and len(asked) == 1, "for the first of its files"


def test_a_source_that_waited_in_vain_for_a_version_is_asked_last_for_its_next_file(
    version: Path, serve: Serve, tmp_path: Path
) -> None:
    asked: list[str] = []
    depot = Depot(lambda parcel_id: asked.append(parcel_id), "secret", host="127.0.0.1", bind="127.0.0.1")
    fetch, _ = fetching(pack_parcel(version), tmp_path / "here", depot.url, serve(version).url)
    fetch.run()
    depot.close()
    assert same(version, tmp_path / "here") and len(asked) == 1


def test_a_depot_follows_its_host_to_another_address(tmp_path: Path) -> None:
    depot = depot_at(("127.0.0.1", "127.0.0.1", 0), None, lambda parcel_id: None, "secret")
    try:
        assert depot_at(depot.at, depot, lambda parcel_id: None, "secret") is depot
        nowhere = ("192.0.2.1", "192.0.2.1", 0)  # of no host
        assert depot_at(nowhere, depot, lambda parcel_id: None, "secret") is depot, "it may come yet"
        depot = depot_at(("127.0.0.2", "127.0.0.2", 0), old := depot, lambda parcel_id: None, "secret")
        assert depot is not old and depot.url.startswith("http://127.0.0.2:")
        with pytest.raises(BusRefused):
            depot_at(nowhere, None, lambda parcel_id: None, "secret")
    finally:
        depot.close()


def test_small_files_that_an_earlier_version_has_do_not_come_again(version: Path, serve: Serve, tmp_path: Path) -> None:
    earlier, parcel = tmp_path / "earlier", pack_parcel(version)
    earlier.mkdir()
    (earlier / "config.json").write_bytes((version / "config.json").read_bytes())
    (earlier / "model.safetensors").write_bytes(b"old weights")
    fetch, came = fetching(parcel, tmp_path / "here", serve(version).url)
    fetch._earlier = (tmp_path / "none", earlier)
    fetch.run()
    assert same(version, tmp_path / "here")
    assert sum(came) == parcel.n_bytes - (version / "config.json").stat().st_size


def test_what_a_killed_fetch_left_of_a_small_file_that_need_not_come_is_gone(version: Path, serve: Serve, tmp_path: Path) -> None:
    """A source would send it, and wait for its rest."""
    earlier, here = tmp_path / "earlier", tmp_path / "here"
    for folder in (earlier, here):
        folder.mkdir()
    (earlier / "config.json").write_bytes((version / "config.json").read_bytes())
    (here / "config.json.part").touch()
    fetch, _ = fetching(pack_parcel(version), here, serve(version).url)
    fetch._earlier = (earlier,)
    fetch.run()
    assert same(version, here)


def test_a_small_file_that_changed_comes(version: Path, serve: Serve, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    body = (version / "config.json").read_bytes()
    (earlier / "config.json").write_bytes(bytes([body[0] ^ 1]) + body[1:])
    fetch, came = fetching(pack_parcel(version), tmp_path / "here", serve(version).url)
    fetch._earlier = (earlier,)
    fetch.run()
    assert same(version, tmp_path / "here") and sum(came) == pack_parcel(version).n_bytes


def test_a_host_that_is_silent_costs_a_stall_and_no_more(
    version: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "STALL_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the request and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        fetch, _ = fetching(pack_parcel(version), tmp_path / "here", address, serve(version).url)
        fetch.run()
    assert same(version, tmp_path / "here")


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
def test_an_address_is_the_setting_or_that_of_the_bus_connection(given_: str, own: str, expected: tuple[str, str, int]) -> None:
    assert place(given_, own) == expected
