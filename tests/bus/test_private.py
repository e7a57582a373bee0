"""Folders at predictable paths, as another user of the host finds or plants them."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from bus.blobs.files import FileBlobs
from bus.errors import BusRefused
from bus.private import is_private, private_directory
from bus.server import EmbeddedRedis
from tests.second_user import NOBODY, as_nobody, needs_root


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder like /tmp or /dev/shm: everybody may make things in it."""
    place = Path(mkdtemp(prefix="ma-open-"))
    place.chmod(0o1777)
    try:
        yield place
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)


def test_a_folder_is_made_for_us_alone_and_one_of_ours_is_closed(open_place: Path) -> None:
    assert is_private(private_directory(open_place / "deep" / "run"))
    (open_place / "wide").mkdir()
    (open_place / "wide").chmod(0o755)
    assert not is_private(open_place / "wide") and is_private(private_directory(open_place / "wide"))


@pytest.mark.parametrize("plant", [
    lambda at, other: at.symlink_to(other),
    lambda at, other: at.write_text("a file"),
    pytest.param(lambda at, other: (at.mkdir(0o700), os.chown(at, NOBODY, NOBODY)), marks=needs_root),
], ids=["link", "file", "another user's"])  # fmt: skip
def test_what_somebody_planted_is_refused_and_left_alone(plant, open_place: Path) -> None:
    other = open_place / "elsewhere"
    other.mkdir()
    (other / "precious").touch()
    at = open_place / "run"
    plant(at, other)
    for use in (private_directory, FileBlobs, lambda path: EmbeddedRedis(path).start()):
        with pytest.raises(BusRefused, match="refused: it is a link, or belongs to another user"):
            use(at)
    assert [p.name for p in other.iterdir()] == ["precious"] and not is_private(at)


@needs_root
async def test_another_user_reaches_neither_bodies_nor_the_socket_of_a_run(open_place: Path) -> None:
    server = EmbeddedRedis(open_place / "run")
    server.start()
    try:
        await FileBlobs(open_place / "run" / "blobs").put(b"a prompt")
        run = open_place / "run"
        for reach in (
            lambda: os.listdir(run / "blobs"),
            lambda: (run / "redis" / "redis.conf").read_text(),
            lambda: _dial(run / "redis.sock"),
        ):
            reach()
            assert isinstance(as_nobody(reach), PermissionError)
    finally:
        server.stop()


def _dial(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
