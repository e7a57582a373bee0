"""A model that reads pictures learns the colour of squares: a whole run through the real launcher, engines and Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.trainer.record import read_record
from actors.trainer.replay import batch_of
from bus.blobs.files import FileBlobs
from scripts.bench import sights
from tests.crash.conftest import Launch
from tests.crash.house import merged
from tests.crash.judge import judge
from tests.system.test_train import records

pytestmark = pytest.mark.timeout(600)


def test_pictures_are_trained_from_and_gone_with_their_group(run_of: Launch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    sights.make_model(tmp_path / "model")
    sights.write_rows(tmp_path / "rows.jsonl", 12)
    keys = {"input_key": "input", "label_key": "label", "apply_chat_template": True, "multimodal_keys": '{"image": "images"}'}
    sizes = {"num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 2}
    where = {"prompt_data": str(tmp_path / "rows.jsonl"), "rm_type": "contains"}
    settings = merged({"model": {"hf_checkpoint": str(tmp_path / "model")}}, {"rollout": {**keys, **sizes, **where}})
    run = run_of(settings)
    run.start()
    assert run.join() == 0, run.story()
    facts = judge(run, n_prompts=12)
    steps = records(run, "step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    # Later steps may train on what older weights made.
    assert steps[0]["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-4
    record = read_record(Path(str(run.setting("ckpt", "save_debug_rollout_data")).replace("{rollout_id}", "0")))
    shown = [sample.pictures for sample in batch_of(record).samples]
    assert all(len(pictures) == 1 and pictures[0][1][:4] == b"\x89PNG" for pictures in shown)
    still_open = {sample.rpartition("/")[0] for sample in facts.open_samples}
    assert len(asyncio.run(FileBlobs(run.dir / "blobs").list_ids())) <= len(still_open)  # one picture each
