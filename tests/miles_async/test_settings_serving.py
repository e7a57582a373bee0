"""Engines, GPUs, router: what is derived, what is passed on word for word, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from miles_async.cli.flags import parse_flags
from miles_async.launcher.engines import engine_specs
from miles_async.launcher.place import Place
from miles_async.launcher.plan import backend_config
from miles_async.settings.dump import dump_toml
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import Loaded, load, settings_from
from miles_async.settings.programs import check_programs
from miles_async.settings.run import RunSettings
from miles_async.settings.serving import notes

BASE = """
[model]
hf_checkpoint = "builtin:arithmetic"
[rollout]
prompt_data = "train.jsonl"
num_rollout = 3
rm_type = "math"
[sglang]
"""


def made(tmp_path: Path, table: str = "", flags: str = "") -> Loaded:
    path = tmp_path / "run.toml"
    path.write_text(BASE + table, "utf-8")
    return load(path, parse_flags(flags.split(), frozenset()).values)


def refusal(tmp_path: Path, table: str = "", flags: str = "") -> str:
    with pytest.raises(SettingsError) as caught:
        made(tmp_path, table, flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "engines", "gpus", "ids", "router"),
    [
        ("", 2, 0, (), False),
        ("--engine sglang", 1, 1, (1,), False),
        ("--engine sglang --rollout-num-gpus 4", 4, 4, (1, 2, 3, 4), True),
        ("--engine sglang --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2", 2, 4, (1, 2, 3, 4), True),
        ("--engine sglang --rollout-num-gpus 2 --actor-num-gpus-per-node 4 --no-use-router", 2, 2, (4, 5), False),
        ("--engine sglang --rollout-num-gpus-per-engine 2", 1, 2, (1, 2), False),
        ("--engine sglang --rollout-num-gpus 2 --debug-rollout-only --no-use-router", 2, 2, (0, 1), False),
        ("--engine sglang --num-generation-workers 2 --rollout-gpu-ids 6 7 --no-use-router", 2, 2, (6, 7), False),
        ("--engine sglang --rollout-num-gpus 2 --pause-generation-mode in_place", 2, 2, (1, 2), False),
        ("--engine sglang --rollout-num-gpus 2 --pause-generation-mode in_place --use-router", 2, 2, (1, 2), True),
        ("--engine sglang --rollout-num-gpus 2 --pause-generation-mode in_place --router-policy random", 2, 2, (1, 2), True),
        ("--engine external --rollout-external-engine-addrs a:1 b:2", 2, 0, (), False),
        ("--sglang-router-ip 10.0.0.1 --sglang-router-port 30000", 2, 0, (), True),
    ],
)
def test_engines_gpus_and_router_follow(
    tmp_path: Path, flags: str, engines: int, gpus: int, ids: tuple[int, ...], router: bool
) -> None:
    s = made(tmp_path, flags=flags).settings.sglang
    assert (s.num_generation_workers, s.rollout_num_gpus, s.rollout_gpu_ids, s.use_router) == (
        engines,
        gpus,
        ids,
        router,
    )


def test_other_programs_flags_are_passed_on_word_for_word(tmp_path: Path) -> None:
    loaded = made(
        tmp_path,
        'engine = "sglang"\nuse_router = true\nrouter_args = {policy = "random"}\n'
        'server_args = { mem-fraction-static = 0.5, attention_backend = "fa3" }\n',
        "--sglang-mem-fraction-static 0.4 --sglang-enable-metrics --sglang-cuda-graph-bs 1 2 4 --sglang-dtype=half "
        "--router-cache-threshold 0.3 --sglang-server-concurrency 9 --sglang-disable-cuda-graph=false",
    )
    s = loaded.settings.sglang
    assert s.server_args == {
        "mem-fraction-static": "0.4",
        "attention-backend": "fa3",
        "enable-metrics": True,
        "cuda-graph-bs": ("1", "2", "4"),
        "dtype": "half",
        "disable-cuda-graph": False,
    }
    assert s.router_args == {"policy": "random", "cache-threshold": "0.3"}
    assert s.sglang_server_concurrency == 9  # a setting of ours is not passed on
    assert loaded.origins["server_args"] == "flag"


@pytest.mark.parametrize("text", ['"auto"', "0"])
def test_auto_is_a_word_in_files_flags_and_dumps(tmp_path: Path, text: str) -> None:
    from_file = made(tmp_path, f"sglang_server_concurrency = {text}").settings
    from_flag = made(tmp_path, flags="--sglang-server-concurrency auto").settings
    assert from_file.sglang.sglang_server_concurrency == from_flag.sglang.sglang_server_concurrency == 0
    assert 'sglang_server_concurrency = "auto"' in dump_toml(from_file)
    path = tmp_path / "again.toml"
    path.write_text(dump_toml(from_file))
    assert load(path).settings.sglang == from_file.sglang


def test_with_a_lane_of_the_tail_there_is_no_router_of_ours(tmp_path: Path) -> None:
    engines = "--engine sglang --num-generation-workers 2"
    assert made(tmp_path, flags=engines).settings.sglang.use_router
    assert not made(tmp_path, flags=f"{engines} --tail-slots 4 --tail-after-tokens 9").settings.sglang.use_router


def test_the_dump_of_passed_flags_loads_back(tmp_path: Path) -> None:
    settings = made(tmp_path, 'engine = "sglang"\nserver_args = { a-b = 1.5, c = true, d = ["x", "y"], e = "q\\"" }').settings
    path = tmp_path / "again.toml"
    path.write_text(dump_toml(settings))
    again = load(path).settings
    assert again.sglang == settings.sglang


@pytest.mark.parametrize(
    ("table", "flags", "words"),
    [
        ("", "--engine sglang --sglang-model-path x", ("--sglang-model-path = 'x'", "decided by --hf-checkpoint")),
        ("", "--engine sglang --sglang-tp-size 2", ("decided by --rollout-num-gpus-per-engine",)),
        ("", "--engine sglang --num-generation-workers 2 --router-port 3", ("--router-port", "--sglang-router-port")),
        ('engine = "sglang"\nserver_args = { "no flag" = 1 }', "", ("not the name of a flag",)),
        ('engine = "sglang"\nserver_args = { a = {} }', "", ("server_args", "a table of names and values")),
        ("", "--sglang-server-concurency 4", ("engine is 'embedded'", "Did you mean sglang_server_concurrency?")),
        ("", "--sglang-tp 4 --sglang-dp 2", ("--sglang-tp = '4': it is for SGLang engines, and engine is 'embedded'",)),
        ("", "--rollout-num-gpus 2", ("rollout_num_gpus = 2", "engine is 'embedded'")),
        (
            "",
            "--engine sglang --rollout-num-gpus 3 --rollout-num-gpus-per-engine 2",
            ("rollout_num_gpus = 3", "take 2"),
        ),
        ("", "--engine sglang --rollout-num-gpus 2 --rollout-gpu-ids 1", ("rollout_gpu_ids = [1]", "1 ids for 2 GPUs")),
        ("", "--engine sglang --rollout-num-gpus-per-engine 2 --rollout-gpu-ids 1 1", ("needs different GPUs",)),
        ("", "--sglang-fused-sampling", ("sglang_fused_sampling = true", "engine is 'embedded'")),
        (
            "",
            "--engine sglang --rollout-num-gpus-per-engine 2 --sglang-fused-sampling",
            ("sglang_fused_sampling = true", "rollout_num_gpus_per_engine is 2"),
        ),
        (
            "",
            "--no-use-router --sglang-router-ip a --sglang-router-port 1",
            ("use_router = false", "sglang_router_ip = 'a'"),
        ),
        (
            "",
            "--engine external --rollout-external-engine-addrs localhost:30000 http://127.0.0.1:30000/",
            ("localhost:30000 and http://127.0.0.1:30000/ are one engine", "a port of its own"),
        ),
        ("", "--sglang-server-concurrency 0.5", ("auto or a whole number > 0",)),
        ("", "--max-masked-fraction 0.01", ("max_masked_fraction = 0.01", "fixed at 512", "concurrency auto")),
        ("", "--sglang-concurrency-max 4", ("sglang_concurrency_min = 8", "above sglang_concurrency_max = 4")),
        ("", "--tail-slots 4", ("tail_slots = 4", "Set --tail-after-tokens as well")),
        ("", "--tail-after-tokens 4", ("tail_after_tokens = 4", "Set --tail-slots as well")),
        ("", "--tail-slots 4 --tail-after-tokens 9 --num-generation-workers 1", ("one worker",)),
        ("", "--tail-slots 513 --tail-after-tokens 9 --num-generation-workers 2", ("Set it to 512 or less",)),
        ("", "--tail-slots 4 --tail-after-tokens 4096 --rollout-max-response-len 4096", ("Set it below 4096",)),
        (
            'engine = "sglang"\nuse_router = true\nrouter_args = {policy = "random"}',
            "--num-generation-workers 2 --tail-slots 4 --tail-after-tokens 9",
            ("use_router sends each request to any engine",),
        ),
        (
            "",
            "--update-weight-wave-fraction 0.5 --update-weight-transport nccl",
            ("update_weight_wave_fraction = 0.5", "'nccl', which reaches all engines at once"),
        ),
        ("", "--no-update-weight-copy", ("update_weight_copy = false", "'disk', which cannot send from the weights")),
        ("", "--update-weight-wave-fraction 0", ("--update-weight-wave-fraction = '0': must be a number > 0 and <= 1",)),
        ("", "--router-policy random", ("--router-policy = 'random'", "use_router is off")),
        ("", "--sglang-router-ip a --sglang-router-port 1 --router-policy random", ("--router-policy = 'random'", "its own flags")),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, table: str, flags: str, words: tuple[str, ...]) -> None:
    text = refusal(tmp_path, table, flags)
    for word in words:
        assert word in text


def settings(**fields: object) -> RunSettings:
    base = {"hf_checkpoint": "builtin:arithmetic", "prompt_data": "x.jsonl", "num_rollout": 3, "rm_type": "math"}
    return settings_from(**{**base, **fields})


@pytest.mark.parametrize("wanted", [True, False])
def test_workers_are_told_whether_their_engine_draws_in_one_pass(wanted: bool) -> None:
    place = Place(run_dir="", model_dir="m", weights_dir="", blob_dir="", stop_token_ids=(), num_rollout=3, fingerprint="")
    specs = engine_specs(settings(engine="sglang", sglang_fused_sampling=wanted), place)
    assert [spec.draws for _, role, spec in specs if role == "generation"] == [wanted]


def test_equal_logprobs_ask_engine_and_trainer_for_the_same_kernels() -> None:
    fields = {"engine": "sglang", "model_dtype": "bfloat16", "true_on_policy_mode": True}
    s = settings(**fields, server_args={"stream-interval": "8"})
    place = Place(run_dir="", model_dir="m", weights_dir="", blob_dir="", stop_token_ids=(), num_rollout=3, fingerprint="")
    [worker] = [spec for _, role, spec in engine_specs(s, place) if role == "generation"]
    assert worker.server_args == {
        "enable-deterministic-inference": True, "attention-backend": "fa3", "stream-interval": "8"
    }  # fmt: skip
    assert backend_config(s, place).own.true_on_policy_mode and backend_config(s, place).selfcheck_logprob_tolerance < 1e-6
    for change, says in (
        ({"model_dtype": "float32"}, "model_dtype = 'float32': true_on_policy_mode needs 'bfloat16'"),
        ({"engine": "embedded"}, "engine = 'embedded'"),
        ({"actor_num_gpus_per_node": 2, "global_batch_size": 8}, "actor_num_gpus_per_node = 2"),
        ({"rollout_num_gpus_per_engine": 2}, "rollout_num_gpus_per_engine = 2"),
        ({"server_args": {"attention-backend": "triton"}}, "sglang-attention-backend = 'triton'"),
    ):
        with pytest.raises(SettingsError) as refused:
            settings(**fields | change)
        assert says in str(refused.value)


def test_the_routers_own_parser_judges_names_and_values() -> None:
    pytest.importorskip("sglang_router")
    check_programs(settings(use_router=True, router_args={"policy": "random", "dp-aware": True, "log-dir": "d"}).flat)
    check_programs(settings(use_router=True, router_args={"dp-aware": False, "cors-allowed-origins": ("a", "b")}).flat)
    for given, why in (
        ({"policy": "rndom"}, "argument --policy: invalid choice: 'rndom'"),
        ({"dp-aware": 3}, "unrecognized arguments: 3"),
        ({"max-payload-size": "big"}, "argument --max-payload-size: invalid int value: 'big'"),
    ):
        with pytest.raises(SettingsError, match=r"router_args: sglang_router\.launch_router refuses these flags") as refused:
            check_programs(settings(use_router=True, router_args=given).flat)
        assert why in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(
        SettingsError,
        match=r"--router-polcy: sglang_router.launch_router has no such flag. Did you mean --router-policy",
    ):
        check_programs(settings(use_router=True, router_args={"polcy": "random"}).flat)


def test_the_routers_flags_reach_the_router_under_the_names_of_miles_too(tmp_path: Path) -> None:
    words = "--sglang-router-policy random --sglang-router-request-timeout-secs 99 --sglang-mem-fraction-static 0.5"
    s = made(tmp_path, flags=f"--engine sglang --use-router {words}").settings
    assert s.sglang.router_args == {"policy": "random", "request-timeout-secs": "99"}
    assert s.sglang.server_args == {"mem-fraction-static": "0.5"}
    place = Place(
        run_dir="", model_dir="m", weights_dir="", blob_dir="", stop_token_ids=(), num_rollout=3, fingerprint="", router_port=9
    )
    [router] = [spec for name, _, spec in engine_specs(s, place) if name == "router"]
    assert router.args == s.sglang.router_args
    with pytest.raises(SettingsError, match="a flag of the router"):
        settings(engine="sglang", server_args={"router-policy": "random"})


def test_a_program_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)  # as find_spec sees a package that is not there
    with pytest.raises(SettingsError, match="sglang is not installed"):
        check_programs(settings(engine="sglang").flat)
    own = settings(engine="sglang", sglang_server_command=("/opt/sglang/bin/python", "-m", "sglang.launch_server"))
    check_programs(own.flat)  # not this Python's business


def test_what_is_surprising_is_noted() -> None:
    for own, text in (
        ({"use_router": True}, "acts like retract behind a router"),
        ({"sglang_server_command": ("serve",)}, "with its own Python: two chunks"),
        ({}, ""),
    ):
        s = settings(engine="sglang", pause_generation_mode="in_place", **own)
        found = [note for note in notes(s.flat) if "in_place" in note]
        assert len(found) == bool(text) and all(text in note for note in found)
    s = settings(engine="sglang", num_generation_workers=2, rollout_gpu_ids=(0, 0))
    assert any("share a GPU" in note for note in notes(s.flat))
    delayed = settings(engine="sglang", rollout_num_gpus_per_engine=2, server_args={"enable-prefill-delayer": True})
    assert any("can stop it for good" in note for note in notes(delayed.flat))
    assert any("share GPUs [0] with the trainer" in note for note in notes(s.flat))
    for fields in ({}, {"colocate": True}, {"debug_rollout_only": True}):
        assert not any("with the trainer" in note for note in notes(settings(engine="sglang", **fields).flat))
