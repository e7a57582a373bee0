"""A real SGLang server's start, played by a script: which failures get another try, with what, and what is written down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.generation.engine import BootRefused
from actors.generation.engines.sglang.args import GATHER, PREFILL_BATCH, server_args
from actors.generation.engines.sglang.boot_failures import Failure, Launch, classify, next_step
from actors.generation.engines.sglang.calls import Calls
from actors.generation.engines.sglang.server import COMPILING_S, SGLangServer
from actors.generation.spec import GenerationSpec
from actors.runtime.child import command_line
from tests.engine.processes import until_async

FAKE = Path(__file__).with_name("fake_sglang.py")

CUSTOM_ALL_REDUCE = """\
[TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "sglang/srt/distributed/device_communicators/custom_all_reduce_v2.py", line 187, in share_graph_inputs
    handles = self.obj.share_graph_inputs()
RuntimeError: Runtime check failed at custom_all_reduce.cuh:312: CUDA error: invalid argument
[2026-11-20 10:00:00] Received sigquit from a child process. It usually means the child failed."""
OOM = """\
Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB.
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)"""
STARVED = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
BAD_FLAG = "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --mem-fractoin-static 0.5"
PORT = "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use"
KERNEL = "ModuleNotFoundError: No module named 'sgl_kernel.flash_attn'\nReceived sigquit from a child process."
MODEL = "OSError: /models/nothing does not appear to have a file named config.json. Checkout the hub for available files."
UNEQUAL = """\
[TP1] Failed to load generation config for /m: /m does not appear to have a file named generation_config.json. Proceeding without.
  File "sglang/srt/model_executor/model_runner.py", line 1316, in init_torch_distributed
    raise RuntimeError(msg)
RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=68.5

Received sigquit from a child process. It usually means the child failed."""
ASSERTION = """\
Traceback (most recent call last):
  File "sglang/srt/server_args.py", line 4401, in __post_init__
    self.check_server_args()
AssertionError: tp_size 3 does not divide the number of attention heads 16"""


@pytest.mark.parametrize(
    ("log", "exit_code", "kind"),
    [
        (CUSTOM_ALL_REDUCE, -9, "custom_all_reduce_ipc"),
        (OOM, 1, "memory"),
        (STARVED, -3, "memory"),
        (BAD_FLAG, 2, "config"),
        (ASSERTION, 1, "config"),
        (PORT, 1, "port"),
        (KERNEL, -9, "missing_kernel"),
        (MODEL, 1, "model"),
        ("usage: ...\nsomething about --flags", 2, "config"),
        ("Segmentation fault (core dumped)", -11, "unknown"),
        ("", -9, "unknown"),
    ],
)
def test_a_log_and_an_exit_status_tell_the_kind(log: str, exit_code: int, kind: str) -> None:
    failure = classify(log, exit_code=exit_code)
    assert failure.kind == kind
    assert failure.cause and failure.remedy.endswith(".")
    assert "\n" not in str(failure)


def test_the_cause_is_the_line_that_tells() -> None:
    assert classify(CUSTOM_ALL_REDUCE, exit_code=-9).cause.startswith("RuntimeError: Runtime check failed")
    assert classify(BAD_FLAG, exit_code=2).cause.endswith("--mem-fractoin-static 0.5")
    assert str(classify(UNEQUAL, exit_code=-9)).startswith("unknown (signal 9): RuntimeError: The memory capacity is unbalanced")
    assert classify(ASSERTION, exit_code=1).cause.startswith("AssertionError: tp_size 3")
    first = "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1). Run `dmesg -T | grep -i oom` to check."
    assert classify(f"[TP0] Traceback\nValueError: what it was\nTraceback\n{first}", exit_code=1).cause == "ValueError: what it was"
    assert classify(f"Traceback\n{first}", exit_code=1).cause == first
    assert str(classify("Segmentation fault", exit_code=-11)) == "unknown (signal 11): Segmentation fault"
    assert classify("loading shards", exit_code=None, timed_out=True).kind == "timeout"


def test_what_a_library_mentioned_long_before_does_not_decide() -> None:
    log = "\n".join([KERNEL, *["[info] loading"] * 300, "ValueError: something else"])
    assert classify(log, exit_code=1) == Failure("unknown", "ValueError: something else", 1)


def test_the_ladder_of_custom_all_reduce_goes_one_rung_at_a_time_and_ends() -> None:
    launch = Launch({"cuda-graph-max-bs": 256}, {})
    failure = classify(CUSTOM_ALL_REDUCE, exit_code=-9)
    names = []
    for n in range(1, 9):
        answer = next_step(launch, [failure] * n, given=frozenset())
        if answer.launch is None:
            break
        assert len(answer.launch.degraded) == n
        launch = answer.launch
        names.append(launch.degraded[-1])
    assert names == [
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0",
        "disable-custom-all-reduce",
        "cuda-graph-max-bs=16",
        "disable-cuda-graph",
    ]
    assert answer.launch is None


def test_a_starved_start_waits_once_and_then_takes_more_while_a_shortage_takes_less() -> None:
    starved = classify(STARVED, exit_code=1)
    launch = Launch({"mem-fraction-static": 0.5}, {})
    first = next_step(launch, [starved], given=frozenset())
    assert first.launch is launch and first.wait_s >= 5
    second = next_step(launch, [starved, starved], given=frozenset())
    assert second.launch is not None and second.launch.args["mem-fraction-static"] == 0.55
    short = next_step(launch, [classify(OOM, exit_code=1)], given=frozenset())
    assert short.launch is not None and short.launch.args["mem-fraction-static"] == 0.45


def test_kernels_the_user_chose_are_not_replaced() -> None:
    failure = classify(KERNEL, exit_code=1)
    free = next_step(Launch({}, {}), [failure], given=frozenset())
    assert free.launch is not None and free.launch.args["attention-backend"] == "triton"
    chosen = frozenset({"attention-backend", "sampling-backend"})
    assert next_step(Launch({"attention-backend": "fa3"}, {}), [failure], given=chosen).launch is None


@pytest.mark.parametrize(
    "log",
    [
        "launch_server.py: error: unrecognized arguments: --enable-prefill-delayer --prefill-delayer-queue-min-ratio 0.1",
        "launch_server.py: error: unrecognized arguments: --prefill-max-requests 64",
        "AssertionError: To use PrefillDelayer, disable_overlap_schedule must be False.",
    ],
)
def test_an_sglang_that_cannot_gather_prompts_does_without(log: str) -> None:
    launch = Launch(server_args(tp_size=1, max_running=8, seed=1, given={"dtype": "half"}), {})
    failure = classify(log, exit_code=1)
    answer = next_step(launch, [failure], given=frozenset({"dtype"}))
    assert answer.launch is not None and answer.launch.degraded == ("prefill at once",)
    assert not GATHER.keys() & answer.launch.args.keys() and answer.launch.args["dtype"] == "half"
    assert next_step(answer.launch, [failure, failure], given=frozenset()).launch is None
    chosen = Launch(dict.fromkeys(GATHER, 1), {})
    again = next_step(chosen, [failure], given=frozenset(GATHER))
    assert again.launch is None or again.launch is chosen  # what the user chose is not taken away


def test_prompts_are_gathered_unless_the_user_has_a_say_in_it() -> None:
    plain = server_args(tp_size=1, max_running=256, seed=1, given={})
    assert plain.items() >= GATHER.items()
    assert plain["max-running-requests"] == 256 + PREFILL_BATCH  # fewer free slots would hold prompts back without a limit
    for own in ({"prefill-max-requests": 8}, {"disable_overlap_schedule": True}, {"max-running-requests": 100}):
        args = server_args(tp_size=1, max_running=256, seed=1, given=own)
        assert "enable-prefill-delayer" not in args and args["max-running-requests"] in (100, 256)
    several = server_args(tp_size=2, max_running=256, seed=1, given={})
    assert not GATHER.keys() & several.keys() and several["max-running-requests"] == 256  # its ranks may disagree for good


def test_arguments_become_words_and_what_the_run_decides_is_not_overruled() -> None:
    args = server_args(
        tp_size=2,
        max_running=64,
        seed=7,
        given={"stream_interval": 4, "tp-size": 9, "grammar-backend": False, "dtype": "half"},
    )
    words = command_line(["serve"], {**args, "cuda-graph-bs": ("1", "2"), "enable-metrics": True})
    text = " ".join(words)
    assert "--tp-size 2" in text and "--stream-interval 4" in text and "--dtype half" in text
    assert "--skip-tokenizer-init --" in text and "grammar-backend" not in text
    assert text.endswith("--cuda-graph-bs 1 2 --enable-metrics")


# -- with a child process ------------------------------------------------------------------------------------------

Boot = Callable[..., Any]


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Boot:
    """boot(failures, **settings) -> (server, events): a server that was not started yet."""

    @asynccontextmanager
    async def make(*failures: dict[str, Any], **settings: Any) -> AsyncIterator[tuple[SGLangServer, list[tuple[str, str]]]]:
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(failures))
        monkeypatch.setenv("FAKE_SGLANG", str(plan))
        events: list[tuple[str, str]] = []

        async def report(kind: str, text: str, level: str) -> None:
            assert level == ("info" if kind == "engine compiles" else "warning")
            events.append((kind, text))

        compiling_s = settings.pop("compiling_s", COMPILING_S)
        given = {"model_path": "m", "max_running": 8, "seed": 1, "server_args": {"mem-fraction-static": 0.5}}
        defaults: dict[str, Any] = {"server_command": (sys.executable, str(FAKE)), "boot_deadline_s": 20.0}
        server = SGLangServer(GenerationSpec(**given | defaults | settings), tmp_path / "engines", report, compiling_s=compiling_s)
        try:
            yield server, events
        finally:
            await server.stop()

    return make


def attempts(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / "attempt.json").read_text()) for folder in sorted((tmp_path / "engines").glob("boot.*"))]


async def test_a_server_that_starts_leaves_its_whole_contract(boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("SOME_API_KEY", "hush")
    async with boot(gpus=(1, 2)) as (server, events):
        url = await server.start()
        assert url.startswith("http://127.0.0.1:") and server.alive and server.note == "" and events == []
        [attempt] = attempts(tmp_path)
        assert attempt["outcome"] == "ready" and attempt["url"] == url and attempt["visible_gpus"] == "5,6"
        inside = tmp_path / "engines" / "boot.001"
        assert attempt["environment_set_by_us"] == {"CUDA_VISIBLE_DEVICES": "5,6", "MILES_ASYNC_INSIDE": str(inside)}
        assert server.inside == inside
        assert attempt["environment_beyond_a_login_shell"]["SOME_API_KEY"] == "(set, not shown)"
        assert "torch" in attempt["versions"] and "--mem-fraction-static" in attempt["argv"]
        script = (tmp_path / "engines" / "boot.001" / "reproduce.sh").read_text()
        assert "hush" not in script and "export CUDA_VISIBLE_DEVICES=5,6" in script
    assert not server.alive


@pytest.mark.parametrize(("maps", "seen"), [((0,), "5,6,4"), ((2,), "5,6")], ids=["another", "its own"])
async def test_a_server_sees_the_gpu_whose_memory_it_maps(
    boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maps: tuple[int, ...], seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    async with boot(gpus=(1, 2), maps=maps) as (server, _):
        await server.start()
        assert attempts(tmp_path)[0]["visible_gpus"] == seen, "its own first"


async def test_its_key_comes_by_a_file_and_stands_in_no_record(boot: Boot, tmp_path: Path) -> None:
    async with boot(token="hush-hush") as (server, _):
        url = await server.start()
        for token, answer in (("hush-hush", 200), ("", 401)):
            calls = Calls(url, deadline_s=5.0, token=token)
            assert (await calls.call("GET", "/model_info"))[0] == answer
            await calls.close()
        folder = tmp_path / "engines" / "boot.001"
        assert (folder / "api-key.yaml").stat().st_mode & 0o777 == 0o600
        for name in ("attempt.json", "reproduce.sh"):
            assert "hush" not in (folder / name).read_text() and "api-key.yaml" in (folder / name).read_text()
        assert "hush" not in " ".join(psutil.Process(server.pid).cmdline())


async def test_custom_all_reduce_over_ipc_is_answered_with_the_older_one(boot: Boot, tmp_path: Path) -> None:
    failure = {"log": CUSTOM_ALL_REDUCE, "exit": -9, "unless_env": "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0"}
    async with boot(failure) as (server, events):
        await server.start()
        assert server.note == "engine degraded: SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2=0"
        assert [kind for kind, _ in events] == ["engine boot failed", "engine degraded"]
        first, second = attempts(tmp_path)
        assert (first["outcome"], first["kind"], first["exit_code"]) == ("failed", "custom_all_reduce_ipc", -9)
        assert second["environment_set_by_us"]["SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"] == "0"
        await server.start()  # what was given up stays given up
        assert len(attempts(tmp_path)) == 3


async def test_the_last_rung_is_reached_when_only_that_helps(boot: Boot) -> None:
    async with boot({"log": CUSTOM_ALL_REDUCE, "exit": 1, "unless_flag": "disable-cuda-graph"}) as (server, _):
        await server.start()
        assert server.note.endswith("disable-cuda-graph") and server.note.count(",") == 3


async def test_a_shortage_of_memory_lowers_the_share_by_a_notch(boot: Boot) -> None:
    async with boot({"log": OOM, "exit": 1, "unless_flag": "mem-fraction-static=0.4"}) as (server, _):
        await server.start()
        assert server.note == "engine degraded: mem-fraction-static=0.45, mem-fraction-static=0.4"


@pytest.mark.parametrize(("log", "exit_code"), [(BAD_FLAG, 2), (MODEL, 1), (ASSERTION, 1)], ids=["flag", "model", "arguments"])
async def test_what_would_fail_again_is_not_tried_again(boot: Boot, tmp_path: Path, log: str, exit_code: int) -> None:
    async with boot({"log": log, "exit": exit_code}) as (server, _):
        with pytest.raises(BootRefused) as caught:
            await server.start()
    assert len(attempts(tmp_path)) == 1
    assert "\n" not in str(caught.value) and "boot.001" in str(caught.value)


async def test_a_taken_port_is_answered_with_another(boot: Boot, tmp_path: Path) -> None:
    async with boot({"log": PORT, "exit": 1, "times": 1}) as (server, _):
        await server.start()
        first, second = attempts(tmp_path)
        port = first["argv"].index("--port") + 1
        assert first["argv"][port] != second["argv"][port] and server.note == ""


async def test_an_unknown_end_is_tried_once_more_and_no_more(boot: Boot, tmp_path: Path) -> None:
    async with boot({"log": "ValueError: 1234", "exit": 1}) as (server, _):
        with pytest.raises(BootRefused, match="failed twice in the same way"):
            await server.start()
    assert len(attempts(tmp_path)) == 2


async def test_a_start_that_hangs_ends_at_its_deadline_with_its_last_line(boot: Boot, tmp_path: Path) -> None:
    async with boot({"log": "loading shard 3 of 9", "exit": None}, boot_deadline_s=2.0) as (server, _):
        with pytest.raises(BootRefused, match=r"timeout: not ready in time; last log line: loading shard 3 of 9"):
            await server.start()
        assert not server.alive
    assert [attempt["kind"] for attempt in attempts(tmp_path)] == ["timeout", "timeout"]


async def test_a_program_that_is_not_there_is_named(boot: Boot) -> None:
    async with boot(server_command=("/nowhere/python", "-m", "sglang.launch_server")) as (server, _):
        with pytest.raises(BootRefused, match="/nowhere/python cannot be run"):
            await server.start()


async def test_gpus_that_are_not_there_are_named(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    async with boot(gpus=(1,)) as (server, _):
        with pytest.raises(BootRefused, match="--rollout-gpu-ids"):
            await server.start()


async def test_gpus_that_this_host_does_not_have_are_named(boot: Boot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("actors.generation.engines.sglang.server.DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    async with boot(gpus=(1, 2)) as (server, _):
        with pytest.raises(BootRefused, match=r"GPUs \[1, 2\] do not exist here: this host has 2\. .*--rollout-gpu-ids"):
            await server.start()


async def test_a_server_is_ready_once_it_has_sampled_in_each_way(boot: Boot, tmp_path: Path) -> None:
    async with boot() as (server, _):
        await server.start()
    [file] = tmp_path.rglob("*.asked")
    asked = [json.loads(line) for line in file.read_text().splitlines()]
    assert [a["max_new_tokens"] for a in asked] == [1, 1, 1]
    assert sorted((a["temperature"], a.get("top_p", 1.0)) for a in asked) == [(0.0, 1.0), (0.9, 0.9), (1.0, 1.0)]


async def test_a_first_sampled_token_that_takes_its_time_is_told_and_waited_for(boot: Boot, tmp_path: Path) -> None:
    compiling = tmp_path / "plan.json.compiling"
    compiling.touch()
    async with boot(compiling_s=0.05) as (server, events):
        starting = asyncio.create_task(server.start())
        await until_async(lambda: _now(events), "the event")
        [(kind, text)] = events
        assert kind == "engine compiles" and str(tmp_path / "engines" / "boot.001") in text and not starting.done()
        compiling.unlink()
        await starting
        assert len(events) == 1 and server.note == ""


async def test_the_end_of_a_running_server_is_seen(boot: Boot) -> None:
    async with boot() as (server, _):
        await server.start()
        assert server.pid
        os.kill(server.pid, signal.SIGKILL)
        await until_async(lambda: _now(not server.alive), "the server's end is noticed")
        url = await server.start()
        assert url and server.alive


async def _now(value: object) -> bool:
    return bool(value)
