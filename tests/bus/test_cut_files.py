"""The append-only file of an embedded server cut at each kind of place, as a crash of its machine may leave it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis

from bus.errors import BusRefused
from bus.server import EmbeddedRedis

EACH = 300  # entries in the base, and as many after it
MANIFEST = "appendonly.aof.manifest"


def one(files: Path, kind: str) -> Path:
    [found] = files.glob(f"*.{kind}")
    return found


def cut(file: Path, n_bytes: int) -> None:
    os.truncate(file, file.stat().st_size - n_bytes)


def zeros(file: Path, n_bytes: int = 100_000) -> None:
    with file.open("ab") as opened:
        opened.write(bytes(n_bytes))


def in_the_middle(file: Path) -> None:
    body = file.read_bytes()
    file.write_bytes(body[: len(body) // 2] + bytes(64) + body[len(body) // 2 + 64 :])


def cut_and_zeros(file: Path) -> None:
    cut(file, 60)
    zeros(file)


@pytest.fixture(scope="module")
def written() -> Iterator[Path]:
    """A folder that a server left: a base of EACH entries, and as many after it."""
    with TemporaryDirectory(prefix="ma-test-") as folder:
        server = EmbeddedRedis(Path(folder))
        server.start()
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            for number in range(2 * EACH):
                client.xadd("s", {"body": os.urandom(40)})
                if number == EACH - 1:
                    client.bgrewriteaof()
                    while client.info("persistence")["aof_rewrite_in_progress"]:
                        time.sleep(0.01)
        server.stop()
        yield Path(folder)


@pytest.fixture
def files(written: Path) -> Iterator[Path]:
    """The same in another one."""
    with TemporaryDirectory(prefix="ma-test-") as folder:
        copy = Path(folder) / "redis" / "appendonlydir"
        shutil.copytree(written / "redis" / "appendonlydir", copy)
        yield copy


EARLIER: dict[str, tuple[Callable[[Path], object], int]] = {
    "in the middle of a command": (lambda files: cut(one(files, "incr.aof"), 7), 2 * EACH - 1),
    "zeros after it": (lambda files: zeros(one(files, "incr.aof")), 2 * EACH),
    "zeros in the middle of a command": (lambda files: cut_and_zeros(one(files, "incr.aof")), 2 * EACH - 1),
    "only zeros": (lambda files: one(files, "incr.aof").write_bytes(bytes(9000)), EACH),
    "the last line of the manifest": (
        lambda files: (files / MANIFEST).write_text((files / MANIFEST).read_text().splitlines(keepends=True)[0]),
        EACH,
    ),
    "no manifest": (lambda files: (files / MANIFEST).unlink(), 0),
}


@pytest.mark.parametrize("name", EARLIER)
def test_a_file_that_lost_its_end_is_one_earlier_instant(name: str, files: Path) -> None:
    damage, n_entries = EARLIER[name]
    damage(files)
    server = EmbeddedRedis(files.parents[1])
    server.start()
    try:
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            assert client.xlen("s") == n_entries
            client.xadd("s", {"body": b"on"})
        server.kill()
        server.start()  # what is written from then on is read again
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            assert client.xlen("s") in (n_entries, n_entries + 1)  # a killed server may lose its last second
    finally:
        server.stop()
    said = server.log_path.read_text()
    assert ("bytes of zeros were cut off" in said) == ("zeros" in name)


REFUSED: dict[str, Callable[[Path], object]] = {
    "garbage in the middle": lambda files: in_the_middle(one(files, "incr.aof")),
    "no file of what came last": lambda files: one(files, "incr.aof").unlink(),
    "no base": lambda files: one(files, "base.rdb").unlink(),
    "an empty base": lambda files: os.truncate(one(files, "base.rdb"), 0),
    "half a base": lambda files: cut(one(files, "base.rdb"), one(files, "base.rdb").stat().st_size // 2),
    "the end of the base": lambda files: cut(one(files, "base.rdb"), 20),
    "a base with other bytes": lambda files: in_the_middle(one(files, "base.rdb")),
    "a base with zeros": lambda files: zeros(one(files, "base.rdb"), 4096),
    "half a line of the manifest": lambda files: cut(files / MANIFEST, 10),
    "an empty manifest": lambda files: os.truncate(files / MANIFEST, 0),
    "a manifest of zeros": lambda files: (files / MANIFEST).write_bytes(bytes(80)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_earlier_instant_is_refused_with_the_remedy(name: str, files: Path) -> None:
    REFUSED[name](files)
    server = EmbeddedRedis(files.parents[1])
    with pytest.raises(BusRefused, match=r"Its file is damaged. Move the folder redis of the run away") as refusal:
        server.start()
    assert "\n" not in str(refusal.value) and not server.is_alive()
