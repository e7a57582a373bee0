"""A checkpoint's files: all or nothing, in an order that a power cut may stop anywhere; and the bus it is loaded into."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.trainer.checkpoint import (
    TRACKER,
    BusState,
    Consumed,
    acknowledged,
    bus_state_file,
    consumed_before,
    finish,
    go_back,
    is_older,
    iter_dir,
    latest,
    others,
    read_bus_state,
    refusal,
    restore_bus,
    steps_in,
    write_durably,
)
from bus import Bus, BusConfig, Commit
from bus.errors import CheckpointOfAnother, CheckpointRefused
from bus.ledger import check
from bus.messages.groups import OpenGroup
from bus.messages.versions import PolicyVersion
from bus.streams.redis import LIFE


def state(step: int, **changes: Any) -> BusState:
    plain: dict[str, Any] = {
        "run": "r", "fingerprint": "f", "step": step, "version": PolicyVersion(step + 1, step), "knob_epoch": 0, "knobs": {},
        "state": {}, "ledger": {}, "open_groups": {}, "consumed": (Consumed(f"g{step}", 1, 0, 2, 0, members=(0,)),),
    }  # fmt: skip
    return BusState(**(plain | changes))


def save(folder: Path, *steps: int, keep_last: int = 0, retain: int = 0) -> None:
    """Checkpoints of a backend with one file."""
    for step in steps:
        directory = iter_dir(folder, step)
        directory.mkdir(parents=True)
        (directory / "model").write_bytes(b"1234")
        (directory / "index.json").write_text(json.dumps({"files": {"model": {"n_bytes": 4}}}))
        finish(folder, state(step, after=step - 1), keep_last=keep_last, retain=retain)


class Disk:
    """What is made durable and what is renamed, in order; the calls go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int | str]] = []
        fsync, rename = os.fsync, os.rename

        def synced(handle: int) -> None:
            fsync(handle)
            self.calls.append(("sync", os.fstat(handle).st_ino))

        def renamed(before: Path, after: Path) -> None:
            rename(before, after)
            self.calls.append(("rename", Path(after).name))

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", renamed)


def test_a_file_is_on_the_disk_before_its_name_is_and_then_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, file = Disk(monkeypatch), tmp_path / "new" / "file"
    write_durably(file, b"data")
    assert file.read_bytes() == b"data" and [p.name for p in file.parent.iterdir()] == ["file"]
    assert disk.calls == [("sync", file.stat().st_ino), ("rename", "file"), ("sync", file.parent.stat().st_ino)]


def test_the_tracker_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    finish(tmp_path, state(3), keep_last=0)
    assert [name for kind, name in disk.calls if kind == "rename"] == [bus_state_file(tmp_path, 3).name, TRACKER]
    assert latest(tmp_path) == 3


@pytest.mark.parametrize(("keep_last", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_so_many_checkpoints_are_kept_as_asked_for(tmp_path: Path, keep_last: int, left: list[int]) -> None:
    save(tmp_path, 1, 2, 3, 4, keep_last=keep_last)
    assert [int(p.name[5:]) for p in sorted(tmp_path.glob("iter_*"))] == left
    assert sorted((tmp_path / "rollout").iterdir()) == [bus_state_file(tmp_path, step) for step in left]
    assert latest(tmp_path) == 4


def test_a_run_that_went_back_keeps_the_checkpoint_it_has_just_written(tmp_path: Path) -> None:
    save(tmp_path, 5, 6, 2, keep_last=2)
    assert latest(tmp_path) == 2 and iter_dir(tmp_path, 2).exists()


def test_those_that_a_run_which_went_back_has_left_take_no_place_of_its_own(tmp_path: Path) -> None:
    save(tmp_path, 7, 8)
    save(tmp_path, 2, 3, 4, keep_last=2)
    assert steps_in(tmp_path) == [3, 4, 7, 8], "were the newest one damaged, there is one to go on from"
    save(tmp_path, 9, keep_last=2)
    assert steps_in(tmp_path) == [8, 9], "they go when it has passed them"


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert read_bus_state(tmp_path, 1, fingerprint="f") == state(1)
    with pytest.raises(CheckpointRefused, match="other data or group settings"):
        read_bus_state(tmp_path, 1, fingerprint="other")


@pytest.mark.parametrize("text", [b"", b"12x", b"-1", b"\xff\xfe4", "\u00b2".encode()])
def test_a_damaged_tracker_is_refused_and_the_intact_checkpoints_are_named(tmp_path: Path, text: bytes) -> None:
    assert latest(tmp_path) is None
    save(tmp_path, 1, 2, 3, 4)
    (tmp_path / TRACKER).write_bytes(text)
    (iter_dir(tmp_path, 2) / "model").write_bytes(b"123")
    bus_state_file(tmp_path, 3).write_bytes(b"\xff")
    with pytest.raises(CheckpointRefused, match="Intact: 1, 4; write one of these"):
        latest(tmp_path)
    assert "Intact: 1;" in others(tmp_path, damaged=4)
    assert refusal(CheckpointRefused("damaged."), tmp_path, 4).startswith("damaged. Intact: 1;")
    assert refusal(CheckpointOfAnother("of another model."), tmp_path, 4) == "of another model.", "so are those beside it"


def test_what_checkpoints_before_it_hold_is_known_as_far_back_as_there_is_no_gap(tmp_path: Path) -> None:
    def known() -> tuple[list[str], int]:
        consumed, since = consumed_before(tmp_path, state(4, after=3))
        return [c.group_id for c in consumed], since

    save(tmp_path, 1, 2, 3, 4)
    assert known() == (["g1", "g2", "g3", "g4"], 0)
    bus_state_file(tmp_path, 2).write_bytes(b"\xff")
    assert known() == (["g3", "g4"], 2)


def test_parts_of_one_entry_add_up_and_the_same_samples_count_once() -> None:
    first = Consumed("g", 1, 0, 10, 0, ((1, 10),), (0,), {"stale": (0, 2)}, (0.5,))
    second = Consumed("g", 0, 1, 0, 7, (), (1, 2), {"stale": (1, 3), "outlasted": (0, 1)}, (1.0, 0.0))
    aged = {"stale": (1, 5), "outlasted": (0, 1)}
    both = Consumed("g", 1, 1, 10, 7, ((1, 10),), (0, 1, 2), aged, (0.5, 1.0, 0.0))
    assert first.with_more(second) == both
    assert both.with_more(second) == both and both.with_more(msgspec.structs.replace(second, members=())) == both


# -- the bus -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def bus(redis_url: str, run_name: str) -> AsyncIterator[Bus]:
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        yield bus


async def goes_back(bus: Bus, path: Path, newest: BusState) -> str:
    return await go_back(bus, path, newest, saved=await acknowledged(bus))


async def test_a_bus_that_acknowledged_more_than_the_checkpoint_holds_begins_anew_but_for_version_ids(
    bus: Bus, tmp_path: Path
) -> None:
    before = {"saved": "4", "version": "7", "sampler": "0:4:4@0-0"}
    await bus.commit(Commit(state=before, ledger={"issued": 4}))
    assert not await goes_back(bus, tmp_path, state(4)) and not await goes_back(bus, tmp_path, state(6, after=4))
    assert (await bus.snapshot()).ledger == {"issued": 4}
    assert "checkpoint 3 is older" in await goes_back(bus, tmp_path, state(3))
    seen = await bus.snapshot()
    assert (seen.state, seen.ledger) == ({"version": "7"}, {}), "an id is never used twice"


async def test_so_does_one_that_was_made_anew_from_an_earlier_checkpoint_than_the_one_that_is_chosen_now(
    bus: Bus, tmp_path: Path
) -> None:
    """--ckpt-step 4, some steps, and --ckpt-step 8 again: group 30 of the bus is not the one that checkpoint 8 holds."""
    before, now = {LIFE: "first"}, {LIFE: "second", "saved": "4", "sampler": "0:4:4@0-0"}
    await bus.commit(Commit(state=now, ledger={"issued": 4}))
    for healthy in (state(4, state=before), state(6, state=now), state(6)):  # loaded, written since, of an earlier release
        assert not await goes_back(bus, tmp_path, healthy)
    assert "steps that were left" in await goes_back(bus, tmp_path, state(8, state=before))
    assert (await bus.snapshot()).ledger == {}
    await bus.commit(Commit(state={LIFE: "third"}))
    assert not await goes_back(bus, tmp_path, state(8, state=before)), "there is nothing of another course"


async def test_so_does_one_that_came_back_from_files_older_than_what_the_kept_checkpoints_tell(bus: Bus, tmp_path: Path) -> None:
    save(tmp_path, 5, 6, 7)
    for saved, newest in (("5", state(8, after=7)), ("3", state(8, after=3)), ("", state(8))):
        await bus.commit(Commit(state={"saved": saved, "sampler": "0:4:4@0-0"}))
        assert not await is_older(bus, tmp_path, newest) and not await goes_back(bus, tmp_path, newest)
    await bus.commit(Commit(state={"saved": "3"}))
    assert await is_older(bus, tmp_path, state(8, after=7)), "what step 4 trained would be given out again"
    assert "came back older" in await goes_back(bus, tmp_path, state(8, after=7))
    assert not await bus.state("sampler")


async def test_what_a_lost_bus_held_is_issued_again_and_the_ledger_closes(bus: Bus) -> None:
    opened = OpenGroup(group_id="g2", prompt_id="p", n_samples=2)
    ledger = {
        "issued": 6,
        "trained": 3,
        "dropped/stale": 1,
        "tokens/generated": 50,
        "tokens/trained": 30,
        "tokens/dropped/stale": 8,
    }
    sampler = {"sampler": "0:4:4@0-0", "sampler.data": "9:abc"}  # that the prompts are others is told after a loss too
    kept = sampler | {"version": "5", "eval": "2:3:1", "folded": "0", "trainer": "here"}
    await bus.commit(Commit(state={"version": "9"}))
    await restore_bus(bus, state(3, ledger=ledger, state=kept, open_groups={"g2": msgspec.msgpack.encode(opened)}))
    seen = await bus.snapshot()
    assert seen.state == sampler | {"version": "9", "folded": "0", "saved": "3", "reissue": "pending"}
    assert seen.ledger["tokens/dropped/bus_lost"] == 12
    again = msgspec.msgpack.decode(seen.open_groups["g2"], type=OpenGroup)
    assert again == msgspec.structs.replace(opened, attempt=1)
    found = await check(bus)
    assert found.token_residual == 0 and found.missing == ("g2/0", "g2/1"), "until the sampler has issued them"
