"""Mistakes that cost nothing to find: one line, status 2, nothing printed before it, nothing left on disk, no library loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.cli.flags import PEERS, known_flags
from tests.miles_async.mistakes import HUB, MISTAKES, ask, make_folder


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_with_what_is_wrong_and_what_to_do(tmp_path: Path, words: str) -> None:
    what, remedy = MISTAKES[words]
    found = ask(make_folder(tmp_path), words)
    loaded = "['tokenizers', 'aiohttp']\n" if words in HUB else "[]\n"
    assert (found.status, found.output) == (2, loaded), found.errors
    assert len(found.errors.splitlines()) == 1 and what in found.errors and remedy in found.errors, found.errors
    assert not found.left, "nothing is left behind"


def test_what_others_call_a_flag_leads_to_flags_that_there_are() -> None:
    words = [word for names in PEERS.values() for word in names.split()]
    assert set(PEERS) <= set(known_flags()) and len(set(words)) == len(words)
    assert not {f"--{word}" for word in words} & set(known_flags()), "these are flags already"
