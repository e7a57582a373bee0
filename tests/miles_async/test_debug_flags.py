"""Debug flags, each by its effect."""

import asyncio
import json
import logging
from functools import partial

import msgspec
import pytest
import torch

from actors.recorder.actor import Recorder, RecorderSpec
from actors.recorder.file import read_records
from actors.trainer.determinism import FILE, step_line, write_line
from actors.trainer.torch_backend import TorchBackend
from actors.trainer.transports.flat import spoken
from bus import Bus
from bus.topology import GROUPS, POLICY
from miles_async.launcher.engines import courier_spec, generation_spec
from miles_async.launcher.env_report import FILE as ENV_FILE
from miles_async.launcher.env_report import write_env_report
from miles_async.launcher.place import Place
from miles_async.launcher.plan import backend_config, recorder_spec, room_specs
from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.tokenizer import save_tokenizer
from miles_async.settings.load import settings_from
from tests.actors.house import open_bus, until
from tests.declared import PLACE, backend_of
from tests.engine.test_damaged_files import PLAIN, Weights, published
from tests.miles_async.console_data import Story, config, step_done

FLAGS = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x", "num_rollout": 1, "rm_type": "math"}


def place(folder):
    return Place(
        run_dir=str(folder),
        model_dir="m",
        weights_dir="",
        blob_dir="",
        stop_token_ids=(),
        num_rollout=1,
        fingerprint="",
    )


def test_details_turn_on_what_is_written(tmp_path):
    s = settings_from(**FLAGS, dump_details="d")
    assert (s.launch.debug_determinism, s.launch.env_report) == (True, True)
    assert s.ckpt.save_debug_rollout_data == "d/rollout_data/{rollout_id}.msgpack"
    trainer = {name: spec for name, _, spec in room_specs(s, place(tmp_path))}["trainer"]
    assert trainer.debug_determinism
    s = settings_from(**FLAGS)
    assert (s.launch.debug_determinism, s.launch.env_report) == (False, False)


def test_the_environment_is_reported_without_its_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("SGLANG_API_KEY", "hunter2")
    monkeypatch.setenv("HOME_OF_NOBODY", "x")
    write_env_report(tmp_path)
    text = (tmp_path / ENV_FILE).read_text()
    found = json.loads(text)
    assert found["variables"]["NCCL_DEBUG"] == "WARN" and "HOME_OF_NOBODY" not in text and "hunter2" not in text
    assert found["packages"]["msgspec"] == msgspec.__version__ and found["processors"] >= 1
    assert text.count("\n") > 20, "a line for each, so that two can be compared"


def test_the_deterministic_mode_reaches_trainer_and_engines(tmp_path):
    plain, fixed = (settings_from(**FLAGS, deterministic_mode=on, train_env_vars='{"NCCL_ALGO": "Tree"}') for on in (False, True))
    here = place(tmp_path)
    assert "enable-deterministic-inference" not in generation_spec(plain, here).server_args
    assert generation_spec(fixed, here).server_args["enable-deterministic-inference"] is True
    variables = [json.loads(room_specs(s, here)[0][2].train_env_vars) for s in (plain, fixed)]
    assert variables[0] == {"NCCL_ALGO": "Tree"}
    assert variables[1] == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Tree",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    megatron = settings_from(**FLAGS, deterministic_mode=True, train_backend="megatron")
    assert backend_config(megatron, here).own.megatron["deterministic_mode"] is True


def test_a_backend_in_the_deterministic_mode_refuses_what_has_no_fixed_order(tmp_path):
    save_model(tmp_path / "m")
    try:
        for on in (True, False):
            backend = TorchBackend()
            backend.setup(backend_of(hf_checkpoint=str(tmp_path / "m"), deterministic_mode=on, model_dtype="float32", device="cpu"))
            unordered = partial(torch.zeros(3).put_, torch.tensor([0]), torch.tensor([1.0]))
            if on:
                with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                    unordered()
            else:
                unordered()
            backend.close()
    finally:
        torch.use_deterministic_algorithms(False)


def save_model(folder):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    Qwen3ForCausalLM(Qwen3Config(**shape, num_key_value_heads=1, head_dim=8)).save_pretrained(folder)
    save_tokenizer(folder, ARITHMETIC)


async def test_hashes_say_which_part_of_a_step_is_another(redis_url, run_name, tmp_path):
    async with Bus(config(redis_url, run_name)) as bus:
        story = Story(bus)
        await story.begin()
        await story.issue("g1")
        await story.generate()
        await story.score()
        await story.judge("g1")
        group = await bus.message((await bus.last(GROUPS))[0])
    metrics = {"train/loss": 0.1, "train/grad_norm": 1.0}
    first = step_line(1, [group], 7, metrics, "w")
    assert first == step_line(1, [group], 7, dict(metrics), "w")
    rewarded = msgspec.structs.replace(group, samples=tuple(msgspec.structs.replace(s, reward=s.reward + 1) for s in group.samples))
    other = step_line(1, [rewarded], 7, metrics | {"train/loss": 0.1 + 1e-17 + 1e-16}, "w")
    assert {name for name in first if first[name] != other[name]} == {"rewards", "loss"}
    backwards = step_line(1, [msgspec.structs.replace(group, samples=group.samples[::-1])], 7, metrics, "w")
    assert backwards["samples"] != first["samples"], "the order counts"
    write_line(tmp_path, first)
    write_line(tmp_path, other)
    assert [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()] == [first, other]


async def test_each_version_on_its_way_is_told(redis_url, run_name, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save_model(tmp_path / "m")
    weights = Weights(tmp_path / "m")
    told = courier_spec(settings_from(**FLAGS, debug_weight_sync=2), PLACE)
    spec = msgspec.structs.replace(PLAIN, verbosity=told.verbosity)
    async with open_bus(redis_url, run_name) as bus, published(bus, tmp_path / "w", weights, spec):
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("weight_sync: ")]
    assert any("version 1, step 0, announced" in line and "bytes, prepared in" in line for line in lines)
    tensors = [name for bucket in weights.export(1 << 20) for name, _ in bucket]
    assert tensors and all(any(line.startswith(f"weight_sync: {name} torch.") for line in lines) for name in tensors)


def test_a_tensors_checksum_is_of_its_bytes():
    said: list[str] = []
    for value in (1.0, 1.0, 2.0):
        for _ in spoken((b for b in [[("w", torch.full((2, 3), value))]]), said.append):
            pass
    assert said[0] == said[1] != said[2] and said[0].startswith("w torch.float32 [2, 3] ")


async def test_a_sample_is_shown_every_so_many_steps(redis_url, run_name, tmp_path):
    (tmp_path / "model").mkdir()
    save_tokenizer(tmp_path / "model", ARITHMETIC)
    spec = recorder_spec(settings_from(**FLAGS, debug_rollout_print_every=2), place(tmp_path))
    assert spec.print_every == 2
    said: list[str] = []

    async def recorded(step):
        return step in [r.get("step") for r in read_records(tmp_path)]

    async with Bus(config(redis_url, run_name)) as bus, asyncio.timeout(20):
        story = Story(bus)
        await story.begin()
        await story.issue("g1")
        await story.generate()
        await story.score()
        await story.judge("g1")
        recorder = Recorder(bus, tmp_path, RecorderSpec(tokenizer_dir=str(tmp_path / "model"), print_every=2), say=said.append)
        stop = asyncio.Event()
        task = asyncio.create_task(recorder.follow(stop))
        for step in range(1, 6):
            await story.say(POLICY, step_done(step))
            await until(partial(recorded, step))
        stop.set()
        await task
    assert [line[:30] for line in said] == ["First rollout sample: step 2 g", "First rollout sample: step 4 g"]
    assert "1+1=" in said[0]
