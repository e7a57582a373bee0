"""Folders that belong to us alone: a predictable path in a place that others may write to could be somebody's trap."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from bus.errors import BusRefused


def is_private(directory: Path) -> bool:
    """Whether it is a folder, no link, of ours, that nobody else may enter."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o077 == 0


def private_directory(directory: Path) -> Path:
    """Make the folder with its parents, or close one of ours to others. BusRefused, one line, for a link or a folder that another
    user put there: what we write would be theirs, and what we delete could be anything."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            found = directory.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                directory.chmod(0o700)
    except OSError as error:
        raise BusRefused(f"cannot use {directory}: {error.strerror}. Choose another folder.") from error
    if not is_private(directory):
        raise BusRefused(
            f"{directory} refused: it is a link, or belongs to another user, so what a run writes there would not be its own. "
            "Remove it or choose another folder."
        )
    return directory


def write_secret(path: Path, text: str) -> Path:
    """A file that only we may read, also in the instant when it is made; returns its path."""
    path.unlink(missing_ok=True)  # also a link that somebody planted
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path


def kept_secret(path: Path, make: Callable[[], str]) -> str:
    """The secret that such a file holds, made once; OSError where none can be kept there."""
    try:
        known = path.read_text().strip()
    except OSError:
        known = ""
    if not known:
        known = make()
        write_secret(path, f"{known}\n")
    return known
