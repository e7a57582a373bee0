"""Which checkpoint a start takes up: flags of Miles and Megatron against what lies in the directories."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.runtime.host import processes_name
from actors.trainer.checkpoint import TRACKER, latest
from actors.trainer.spec import TrainerSpec
from bus import Bus, BusConfig, Commit
from bus.errors import CheckpointRefused
from bus.knobs.live import propose, read_history, values_at
from bus.knobs.plans import cancel, plan
from bus.messages.control import Vitals
from miles_async.launcher import prepare
from miles_async.launcher.place import Place
from miles_async.launcher.plan import backend_config, told
from miles_async.launcher.prepare import engine_token, place_of, prepare_bus
from miles_async.launcher.resume import check_resume, load_dir, move_tracker, resumes_from
from miles_async.settings.checks import check_model
from miles_async.settings.errors import SettingsError
from miles_async.settings.live import check_patch
from miles_async.settings.load import settings_from
from miles_async.settings.run import RunSettings
from miles_async.settings.second_models import reference_dir, start_dir
from tests.actors.test_checkpoint import save
from tests.declared import backend_of


def make(folder: Path, **fields: Any) -> RunSettings:
    base: dict[str, Any] = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 30, "rm_type": "math"}
    return settings_from(**base | {"save": str(folder)} | fields)


def refused(settings: RunSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        check_resume(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_for_runs_that_cannot_be_made_is_refused_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused(make(tmp_path, runs_dir=str(tmp_path / "file" / "runs")))
    assert said.startswith("runs_dir = ") and f"{tmp_path / 'file'} is a file, not a folder" in said
    assert refused(make(tmp_path, runs_dir=str(tmp_path / ("x" * 300)))).startswith("runs_dir = ")


def test_so_is_every_other_folder_that_the_run_would_write_at_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    under, free = tmp_path / "file" / "x", tmp_path / "free"
    for name in ("save", "save_hf", "save_debug_rollout_data", "save_debug_train_data", "tensorboard_dir"):
        inside = {"save": "", "tensorboard_dir": ""}.get(name, "/{rollout_id}_{rank}" if "train" in name else "/{rollout_id}")
        said = refused(make(tmp_path / "ckpt", **{name: f"{under}{inside}"}))
        assert said.startswith(f"{name} = ") and f"{tmp_path / 'file'} is a file, not a folder" in said, said
        check_resume(make(tmp_path / "ckpt", **{name: f"{free}{inside}"}))
    assert refused(make(tmp_path / "ckpt", dump_details=str(under))).startswith("save_debug_rollout_data = ")
    assert not free.exists(), "nothing is made"


def test_a_checkpoint_whose_files_are_not_all_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    check_resume(make(tmp_path))
    model, index = tmp_path / "iter_0000020" / "model", tmp_path / "iter_0000020" / "index.json"
    model.write_bytes(b"123")
    said = refused(make(tmp_path))
    assert "checkpoint 20" in said and "model has 3 bytes instead of 4: it is cut or overwritten. Intact: 10;" in said
    assert refused(make(tmp_path, ckpt_step=20)).startswith("ckpt_step = 20: ")
    model.unlink()
    assert "'model' cannot be read (No such file or directory). Intact: 10;" in refused(make(tmp_path))
    for text, why in (("{}", "index.json is damaged"), ('{"files": {"\\u0000": {"n_bytes": 4}}}', "cannot be read")):
        index.write_text(text)
        assert why in refused(make(tmp_path))
    index.unlink()
    assert "index.json cannot be read (No such file or directory): it was never finished" in refused(make(tmp_path))
    check_resume(make(tmp_path, ckpt_step=10))


def test_the_tracker_or_ckpt_step_says_which(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    settings = make(own)
    assert resumes_from(settings) is None and check_resume(settings) is None and move_tracker(settings) == []
    save(own, 10, 20, 30)
    assert resumes_from(settings) == (own, 30)

    back = make(own, ckpt_step=20)
    check_resume(back)
    [note] = move_tracker(back)
    assert "checkpoint 20 instead of 30 (--ckpt-step)" in note and latest(own) == 20
    assert resumes_from(make(own)) == (own, 20)  # whoever starts again, the trainer among them
    assert "ckpt_step = 14: " in (said := refused(make(own, ckpt_step=14))) and "Nearest: 10 or 20." in said

    branch = make(other, load=str(own), ckpt_step=10)
    assert resumes_from(branch) == (own, 10) and move_tracker(branch) == [] and latest(own) == 20
    save(other, 15)
    assert resumes_from(branch) == (other, 15), "what the run itself has saved since is lost at a restart"


async def test_a_launcher_leaves_the_bus_of_a_trainer_that_saves_on_meanwhile(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier launcher was killed; its actors go on. Whatever the trainer saves while this one looks, the bus is not behind."""
    settings = make(tmp_path / "own", name=run_name, bus_url=redis_url)
    own = {"run_dir": str(tmp_path), "model_dir": "m", "weights_dir": "w", "blob_dir": "b", "stop_token_ids": (), "num_rollout": 9}
    place = Place(**own, fingerprint="f", engine_token=engine_token(tmp_path))  # type: ignore[arg-type]
    save(tmp_path / "own", 2, 3, 4)
    claim = prepare.claim_identity

    async def meanwhile(bus: Bus, *given: Any) -> None:
        if await bus.state("saved") == "4":
            save(tmp_path / "own", 5, 6)
            await bus.commit(Commit(state={"saved": "6"}))
        await claim(bus, *given)

    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await bus.commit(Commit(state={"saved": "4", "sampler": "0:4:4@0-0", "trainer": "6"}, ledger={"issued": 4}))
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "claim_identity", meanwhile)
            notes = await prepare_bus(bus, settings, place)
        assert not any("goes back" in note or "held nothing" in note for note in notes), notes
        assert (await bus.snapshot()).ledger == {"issued": 4}
        (tmp_path / "own" / TRACKER).write_text("4\n")
        assert any("checkpoint 4 is older" in note for note in await prepare_bus(bus, settings, place)), "nobody else wrote it"


async def test_a_refused_start_leaves_the_tracker_where_it_was(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """ "Nothing was changed", it says. The next start without --ckpt-step went back all the same, and lost the steps since."""
    own = {"run_dir": str(tmp_path), "model_dir": "m", "weights_dir": "w", "blob_dir": "b", "stop_token_ids": (), "num_rollout": 9}
    place = Place(**own, fingerprint="other", engine_token=engine_token(tmp_path))  # type: ignore[arg-type]
    save(tmp_path / "own", 2, 3, 4)
    settings = make(tmp_path / "own", name=run_name, bus_url=redis_url, ckpt_step=2)
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        with pytest.raises(CheckpointRefused, match="other data or group settings"):
            await prepare_bus(bus, settings, place)
        assert latest(tmp_path / "own") == 4
        await prepare_bus(bus, settings, msgspec.structs.replace(place, fingerprint="f"))
        assert latest(tmp_path / "own") == 2


async def test_a_run_without_checkpoints_begins_again_once_its_trainer_is_gone(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    """The same command was refused for ever: "its weights are lost"."""
    own = {"run_dir": str(tmp_path), "model_dir": "m", "weights_dir": "w", "blob_dir": "b", "stop_token_ids": (), "num_rollout": 9}
    place = Place(**own, fingerprint="f", engine_token=engine_token(tmp_path))  # type: ignore[arg-type]
    held = Commit(state={"saved": "3", "sampler": "0:4:4@0-0", "trainer": "3:4:StepDone", "version": "4"}, ledger={"trained": 4})
    seen_here = {"pid": os.getpid(), "host": "h", "processes": processes_name()}
    trainer = Vitals(actor="trainer", role="trainer", state="running", wall=0.0, **seen_here)  # type: ignore[arg-type]
    elsewhere = msgspec.structs.replace(trainer, processes="another host's")
    gone = msgspec.structs.replace(trainer, pid=2**22 + 1)
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        for last, again in ((trainer, False), (elsewhere, False), (gone, True), (None, True)):
            for no_save in (False, True):
                await bus.forget_run()
                await bus.commit(held)
                if last is not None:
                    await bus.set_vitals("trainer", last)
                notes = await prepare_bus(bus, make(tmp_path / "own", name=run_name, bus_url=redis_url, no_save=no_save), place)
                assert any("begins again at step 0" in note for note in notes) == (again and no_save), (last, no_save)
                seen = await bus.snapshot()
                assert (not seen.ledger, "trainer" not in seen.state) == (again and no_save,) * 2
                assert seen.state["version"] == "4", "an id is never used twice"


async def test_a_knob_that_was_tuned_stays_until_the_operator_gives_its_setting_another_value(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    """A run that its --max-waves has ended could else never go on: its bus is gone, and `tune` with it."""
    common: dict[str, Any] = {"name": run_name, "bus_url": redis_url}
    own = {"run_dir": str(tmp_path), "model_dir": "m", "weights_dir": "w", "blob_dir": "b", "stop_token_ids": (), "num_rollout": 9}
    place = Place(**own, fingerprint="f", engine_token=engine_token(tmp_path))  # type: ignore[arg-type]

    async def start(**settings: Any) -> tuple[list[str], dict[str, Any]]:
        async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
            notes = await prepare_bus(bus, make(tmp_path / "own", **common | {"use_tis": True} | settings), place)
            history = await read_history(bus)
        return [n for n in notes if "knob" in n], dict(values_at(history, history[-1].epoch).values)

    assert (await start(max_waves=16))[0] == []
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await propose(bus, {"max_waves": 20, "lr": 0.5}, author="me", check=check_patch)
    notes, values = await start(max_waves=16)
    assert values["max_waves"] == 20 and any("max_waves stays 20 (knob epoch 1), the settings say 16" in note for note in notes)
    notes, values = await start(max_waves=40)
    assert values["max_waves"] == 40 and "knob changed since the last start: max_waves was 20 and is 40" in notes
    assert values["lr"] == 0.5 and any("lr stays 0.5" in note for note in notes)
    notes, values = await start(max_waves=40)
    assert values["max_waves"] == 40 and not any("max_waves" in note for note in notes)
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        assert (await read_history(bus))[-1].reason == "settings of this start"
        planned = await plan(bus, {"max_weight_staleness": 1}, at_step=400, author="me", check=check_patch)
    with pytest.raises(SettingsError, match=r"keeps a plan that does not go .* max_weight_staleness = 1"):
        await start(max_waves=40, use_tis=False)
    async with Bus(BusConfig(url=redis_url, run=run_name)) as bus:
        await cancel(bus, planned.epoch, author="me")
        await propose(bus, {"max_weight_staleness": 2}, author="me", check=check_patch)
    with pytest.raises(SettingsError, match="live values that do not go with its settings now: max_weight_staleness = 2"):
        await start(max_waves=40, use_tis=False)


def test_what_cannot_be_resumed_is_told_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(folder, 10, 20)
    (folder / "rollout" / "bus_state_0000020.msgpack").unlink()
    said = refused(make(folder))
    assert "checkpoint 20 has no state of a run beside it" in said and "--finetune" in said and "Intact: 10" in said
    assert "cannot be looked into: file name too long" in refused(make(folder, load=str(tmp_path / ("x" * 300))))
    (folder / TRACKER).write_text("70\n")
    assert f"{folder / TRACKER} says 70, and" in (said := refused(make(folder))) and "Intact: 10; write" in said
    (folder / TRACKER).write_text("newest\n")
    assert "holds 'newest', not a step number" in refused(make(folder))
    (folder / TRACKER).write_text("release\n")
    assert "Give it as --ref-load, or add --finetune" in refused(make(folder))


def model_at(directory: Path) -> str:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 20, "max_position_embeddings": 4096}))
    for name in ("tokenizer.json", "model.safetensors"):
        (directory / name).write_bytes(b"")
    return str(directory)


def test_finetune_and_references_take_weights_alone(tmp_path: Path) -> None:
    model, former, new = model_at(tmp_path / "model"), tmp_path / "former", str(tmp_path / "new")
    for step in (4, 8):
        model_at(former / f"iter_{step:07d}")
    (former / TRACKER).write_text("8\n")
    settings = make(Path(new), load=str(former), finetune=True, hf_checkpoint=model, runs_dir=str(tmp_path / "runs"))
    check_model(settings)
    assert load_dir(settings) == new and resumes_from(settings) is None  # the data and step from their beginning
    assert start_dir(settings) == str(former / "iter_0000008")
    config = backend_config(settings, place_of(settings))
    assert config.hf_checkpoint == str(former / "iter_0000008") and config.ref_load == config.published_as == model

    older = make(Path(new), ref_load=str(former), ref_ckpt_step=4, hf_checkpoint=model, runs_dir=str(tmp_path / "runs"))
    check_model(older)
    config = backend_config(older, place_of(older))
    assert config.hf_checkpoint == config.ref_load == reference_dir(older) == str(former / "iter_0000004")
    with pytest.raises(SettingsError, match=r"ref_ckpt_step = 5: .* has no checkpoint of that step. Nearest: 4 or 8\."):
        check_model(make(Path(new), ref_load=str(former), ref_ckpt_step=5, hf_checkpoint=model))
    (former / TRACKER).write_text("release")
    (former / "release").mkdir()
    (former / "release" / ".metadata").write_bytes(b"")
    for given in ({"ref_load": str(former)}, {"load": str(former), "finetune": True}):
        with pytest.raises(SettingsError, match=r"a checkpoint of Megatron \(torch_dist\), which this trainer cannot read"):
            check_model(make(Path(new), hf_checkpoint=model, **given))
        check_model(of_megatron := make(Path(new), hf_checkpoint=model, train_backend="megatron", **given))
        assert str(former / "release") in (reference_dir(of_megatron), start_dir(of_megatron))
    (former / TRACKER).write_text("12\n")
    with pytest.raises(SettingsError, match=r"says 12, and there is no iter_0000012\. Newest: 4 or 8\."):
        check_model(make(Path(new), ref_load=str(former), hf_checkpoint=model))


@pytest.mark.parametrize("name", ["finetune", "no_load_optim", "no_load_rng"])
def test_a_new_beginning_that_each_restart_would_repeat_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{name} = true: load and save are one directory .* each restart would do it again"):
        make(tmp_path, load=f"{tmp_path}/", **{name: True})
    apart = make(tmp_path, load=str(tmp_path / "old"), **{name: True})
    spec = told(TrainerSpec, apart.flat, backend=backend_of(hf_checkpoint="m"), weights_dir="", num_rollout=3)
    assert name == "finetune" or getattr(spec, name)


def test_a_checkpoint_that_would_be_passed_over_is_refused(tmp_path: Path) -> None:
    make(tmp_path, no_save=True, load=str(tmp_path))
    with pytest.raises(SettingsError, match=r"^load = .*no_save is on.* --hf-checkpoint") as caught:
        make(tmp_path, no_save=True, load=str(tmp_path / "old"))
    assert "\n" not in str(caught.value)


def test_kept_checkpoints_fall_on_saved_ones(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"save_retain_interval = 25: no multiple of save_interval = 10\. Nearest: 20 or 30\."):
        make(tmp_path, save_retain_interval=25)
    folder = tmp_path / "c"
    save(folder, 10, 20, 30, 40, 50, keep_last=2, retain=20)
    assert sorted(int(p.name[5:]) for p in folder.glob("iter_*")) == [20, 40, 50]
