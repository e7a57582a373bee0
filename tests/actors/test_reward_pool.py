"""Verifier processes and the remote service: what hangs, crashes or refuses costs one sample at most."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from aiohttp import web

from actors.reward.pool import VerifierPool
from actors.reward.remote import RemoteRefused, RemoteScorer
from actors.reward.sample import Sample, ScorerFailed
from actors.reward.wire import ScoreAnswer, decode_from_verifier, frame, plain
from actors.runtime.run import Refused
from bus.errors import DeadlineExceeded

SYNC_HOOK = """
import os, subprocess, sys, time

print("imports may print")

class Number:
    def __float__(self):
        return 0.25

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def hook(sample):
    print("hooks may print")
    what = sample["response"]
    if what == "raise":
        raise ValueError("no such\\nanswer")
    if what == "exit":
        sys.exit(3)
    if what in ("interrupt", "half", "mute"):
        raise {"interrupt": KeyboardInterrupt(), "half": ValueError(chr(0xd800) + " is no text"), "mute": Mute()}[what]
    if what == "half table":
        return {chr(0xd800): 1.0, "score": chr(0xdfff)}
    if what == "crash":
        os.abort()
    if what == "hang":
        open(sample["label"], "w").write(str(os.getpid()))
        while True:
            time.sleep(0.05)
    if what == "family":
        child = subprocess.Popen(["sleep", "600"])
        open(sample["label"], "w").write(str(child.pid))
        child.wait()
    if what in ("setsid", "setsid bare"):
        env = {} if what == "setsid bare" else None
        daemon = "import os, sys, time; os.fork() and os._exit(0); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", daemon, sample["label"]], start_new_session=True, env=env).wait()
    if what == "stdin":
        return float(len(sys.stdin.read()))
    if what == "dict":
        return {"score": Number(), "why": "text", "none": None, "list": [1, 2]}
    if what == "sample":
        return {name: 1.0 for name in sample} | {"pid": os.getpid(), "n": sample["n_tokens"], "m": sample["metadata"]["k"]}
    return len(what)
"""

ASYNC_HOOK = """
import asyncio, os, time

async def hook(sample):
    what = sample["response"]
    if what == "wait":
        await asyncio.sleep(600)
    if what == "block":
        while not os.path.exists(sample["label"]):
            await asyncio.sleep(0.01)
        while True:
            time.sleep(0.05)
    if what == "crash":
        while not os.path.exists(sample["label"]):
            await asyncio.sleep(0.01)
        os.abort()
    if what == "meet":
        open(sample["label"], "w").close()
        if not os.path.exists(sample["label"] + ".again"):
            open(sample["label"] + ".again", "w").close()
            await asyncio.sleep(600)
        return 7.0
    if what == "raise":
        raise KeyError("gone")
    return os.getpid()
"""


def sample(response: str, label: str = "", **fields: Any) -> Sample:
    return Sample(**{"sample_id": "g1/0", "prompt": "p", "response": response, "label": label, **fields})


@pytest.fixture
def sync_hook(tmp_path: Path) -> str:
    path = tmp_path / "sync_hook.py"
    path.write_text(SYNC_HOOK)
    return f"{path}:hook"


@pytest.fixture
def async_hook(tmp_path: Path) -> str:
    path = tmp_path / "async_hook.py"
    path.write_text(ASYNC_HOOK)
    return f"{path}:hook"


def pool(path: str, n_workers: int = 1) -> VerifierPool:
    return VerifierPool(path, n_workers=n_workers, boot_deadline_s=30.0)


async def gone(pid: int) -> None:
    """Wait until a process has ended (a zombie has); fails at its deadline."""
    async with asyncio.timeout(10.0):
        while True:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                return
            if state == "Z":
                return
            await asyncio.sleep(0.02)


async def appears(path: Path) -> str:
    async with asyncio.timeout(10.0):
        while True:
            if path.exists() and (text := path.read_text()):
                return text
            await asyncio.sleep(0.02)


def pids_of(verifiers: VerifierPool) -> list[int]:
    """Living verifier processes, those of single samples left out."""
    return [seat.process.pid for seat in verifiers._seats if seat.process is not None and seat.alive]


# -- sync hooks ---------------------------------------------------------------------------------------------------


async def test_a_hook_gets_the_sample_and_answers_in_numbers(sync_hook: str) -> None:
    async with pool(sync_hook) as verifiers:
        assert await verifiers.score(sample("four"), 10.0) == 4.0
        table = await verifiers.score(sample("dict"), 10.0)
        assert table == {"score": 0.25, "why": "text", "none": None, "list": "<list>"}
        table = await verifiers.score(sample("sample", n_tokens=5, metadata={"k": 2}), 10.0)
        assert table.pop("pid") == pids_of(verifiers)[0] != os.getpid()
        names = ("sample_id", "prompt", "response", "label", "metadata", "n_tokens", "finish")
        assert table == {**dict.fromkeys(names, 1.0), "n": 5.0, "m": 2.0}
        assert await verifiers.score(sample("stdin"), 10.0) == 0.0
        assert await verifiers.score(sample("x" * 5_000_000), 20.0) == 5e6


async def test_what_a_hook_raises_comes_back_in_one_line_with_its_place(sync_hook: str) -> None:
    async with pool(sync_hook) as verifiers:
        with pytest.raises(ScorerFailed, match=r"on g1/0 raised ValueError: no such answer at sync_hook.py:18") as caught:
            await verifiers.score(sample("raise"), 10.0)
        assert "Traceback" in caught.value.__notes__[0]
        for what, said in (
            ("exit", "SystemExit: 3"),
            ("interrupt", "KeyboardInterrupt"),
            ("half", r"ValueError: \\ud800 is no text"),
            ("mute", "Mute: its text cannot be made"),
        ):
            with pytest.raises(ScorerFailed, match=f"raised {said}"):
                await verifiers.score(sample(what), 10.0)
        assert await verifiers.score(sample("half table"), 10.0) == {r"\ud800": 1.0, "score": r"\udfff"}
        pids = pids_of(verifiers)
        assert await verifiers.score(sample("ok"), 10.0) == 2.0
        assert pids_of(verifiers) == pids


async def test_a_hook_that_hangs_is_killed_while_others_go_on(sync_hook: str, tmp_path: Path) -> None:
    async with pool(sync_hook, n_workers=2) as verifiers:
        assert verifiers.capacity == 2
        hanging = asyncio.create_task(verifiers.score(sample("hang", str(tmp_path / "pid")), 4.0))
        pid = int(await appears(tmp_path / "pid"))
        assert await asyncio.gather(*(verifiers.score(sample("ok"), 20.0) for _ in range(8))) == [2.0] * 8
        with pytest.raises(DeadlineExceeded, match=r"scoring g1/0 with .* took longer than 4 s"):
            await hanging
        await gone(pid)
        assert pid not in pids_of(verifiers)
        assert await verifiers.score(sample("ok"), 20.0) == 2.0


@pytest.mark.skipif(sys.platform != "linux", reason="verifiers adopt them on Linux")
@pytest.mark.parametrize("how", ["setsid", "setsid bare"])
async def test_what_a_hook_sent_into_a_session_of_its_own_ends_with_the_pool(sync_hook: str, how: str, tmp_path: Path) -> None:
    """Also when it cleared its environment."""
    async with pool(sync_hook) as verifiers:
        await verifiers.score(sample(how, str(tmp_path / "pid")), 20.0)
        pid = int(await appears(tmp_path / "pid"))
        assert psutil.pid_exists(pid), "a hook may keep a helper while its verifier lives"
    await gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="found by their environment, which psutil reads on Linux")
async def test_what_a_killed_actor_left_behind_ends_when_the_next_one_starts(sync_hook: str, tmp_path: Path) -> None:
    code = (
        "import asyncio, os, signal, sys; from actors.reward.pool import VerifierPool; from actors.reward.sample import Sample\n"
        "async def main():\n"
        "    async with VerifierPool(sys.argv[1], n_workers=1, boot_deadline_s=30.0) as pool:\n"
        "        await pool.score(Sample(sample_id='g', prompt='p', response='setsid', label=sys.argv[2]), 20.0)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, sync_hook, str(tmp_path / "pid"))
    assert await child.wait() == -9
    pid = int(await appears(tmp_path / "pid"))
    assert psutil.pid_exists(pid)
    async with pool(sync_hook):
        await gone(pid)


async def test_what_a_hook_started_is_killed_with_it(sync_hook: str, tmp_path: Path) -> None:
    async with pool(sync_hook) as verifiers:
        with pytest.raises(DeadlineExceeded):
            await verifiers.score(sample("family", str(tmp_path / "pid")), 5.0)
        await gone(int(await appears(tmp_path / "pid")))


async def test_a_queue_costs_no_sample_its_time(sync_hook: str, tmp_path: Path) -> None:
    async with pool(sync_hook) as verifiers:
        hanging = asyncio.create_task(verifiers.score(sample("hang", str(tmp_path / "pid")), 3.0))
        await appears(tmp_path / "pid")
        assert await verifiers.score(sample("ok"), 2.9) == 2.0  # waits for nearly all of the 3 s
        with pytest.raises(DeadlineExceeded):
            await hanging


async def test_a_crash_names_its_signal_and_the_next_sample_is_scored(sync_hook: str) -> None:
    async with pool(sync_hook) as verifiers:
        with pytest.raises(ScorerFailed, match="its process ended, killed by SIGABRT"):
            await verifiers.score(sample("crash"), 10.0)
        assert await verifiers.score(sample("ok"), 10.0) == 2.0


async def test_the_processes_end_with_the_pool(sync_hook: str, tmp_path: Path) -> None:
    async with pool(sync_hook) as verifiers:
        hanging = asyncio.create_task(verifiers.score(sample("hang", str(tmp_path / "pid")), 60.0))
        pid = int(await appears(tmp_path / "pid"))
        hanging.cancel()
        await asyncio.wait([hanging])
    await gone(pid)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def other(sample): ...", "has no attribute 'hook'"),
        ("import nothing_of_this_name", "No module named"),
        ("raise RuntimeError('not\\ntoday')", "RuntimeError: not today"),
        ("import os; os._exit(1)", "ended at once"),
        ("hook = 3", "is a int, not a function"),
    ],
)
async def test_a_hook_that_does_not_load_is_refused_at_start(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "bad_hook.py").write_text(text)
    with pytest.raises(Refused, match=why):
        await pool(f"{tmp_path / 'bad_hook.py'}:hook").__aenter__()


async def test_a_hook_that_never_finishes_loading_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slow_hook.py").write_text("import threading; threading.Event().wait(600)")
    with pytest.raises(Refused, match="not ready within 3 s"):
        await VerifierPool(f"{tmp_path / 'slow_hook.py'}:hook", n_workers=1, boot_deadline_s=3.0).__aenter__()


# -- async hooks --------------------------------------------------------------------------------------------------


async def test_an_async_hook_scores_many_at_once_and_gives_up_one_at_its_deadline(
    async_hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.reward.process.CANCEL_GRACE_S", 20.0)  # nobody is killed because it was slow
    async with pool(async_hook) as verifiers:
        assert verifiers.capacity == 32
        waiting = asyncio.create_task(verifiers.score(sample("wait"), 3.0))
        [pid] = pids_of(verifiers)
        assert await asyncio.gather(*(verifiers.score(sample("pid"), 20.0) for _ in range(40))) == [float(pid)] * 40
        with pytest.raises(ScorerFailed, match="raised KeyError: 'gone'"):
            await verifiers.score(sample("raise"), 20.0)
        with pytest.raises(DeadlineExceeded):
            await waiting
        assert pids_of(verifiers) == [pid]  # it let go when asked to


@pytest.mark.parametrize("what", ["block", "crash"])
async def test_who_lost_its_process_to_a_neighbour_is_scored_again(async_hook: str, tmp_path: Path, what: str) -> None:
    meeting = str(tmp_path / "meeting")
    async with pool(async_hook) as verifiers:
        neighbours = [asyncio.create_task(verifiers.score(sample("meet", meeting), 40.0)) for _ in range(3)]
        # The blocker is to blame at once. A crash among four is nobody's for sure: each is tried alone, where it is.
        error = DeadlineExceeded if what == "block" else ScorerFailed
        with pytest.raises(error):
            await verifiers.score(sample(what, meeting), 3.0 if what == "block" else 40.0)
        assert await asyncio.gather(*neighbours) == [7.0] * 3


# -- wire ---------------------------------------------------------------------------------------------------------


def test_every_answer_travels() -> None:
    values = [1, True, 2.5, float("inf"), 10**400, None, "text", [1], {"a": 1, "b": object(), 3: None}, object()]
    for value in values:
        body = frame(ScoreAnswer(1, plain(value)))
        assert int.from_bytes(body[:4], "little") == len(body) - 4
        assert decode_from_verifier(body[4:]) == ScoreAnswer(1, plain(value))
    assert plain(10**400) == float("inf") and plain({3: True}) == {"3": 1.0}
    assert plain(np.array([1, 2])) == [1.0, 2.0] == plain([np.float32(1), np.int64(2)]) and plain(np.array([3])) == 3.0
    assert plain(np.array(["1"])) == ["1"]
    nan = plain(float("nan"))
    assert isinstance(nan, float) and math.isnan(nan)


# -- remote -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def service(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/rm", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/rm"
    finally:
        await runner.cleanup()


async def test_the_service_gets_prompt_response_and_label_and_its_json_is_the_value() -> None:
    seen: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.Response(body=msgspec.json.encode({"score": 0.5, "len": len(seen[-1]["response"])}))

    async with service(handle) as url, RemoteScorer([url]) as scorer:
        assert await scorer.score(sample("ré\n" * 100_000, "l"), 20.0) == {"score": 0.5, "len": 300_000}
    asked = {"prompt": "p", "response": "ré\n" * 100_000, "label": "l", "metadata": {}, "sample_id": "g1/0"}
    assert seen == [asked]


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (503, b"later", ScorerFailed, "answered 503 for g1/0: 'later'"),
        (429, b"", ScorerFailed, "answered 429"),
        (400, b"bad", RemoteRefused, "answered 400"),
        (302, b"", RemoteRefused, "answered 302 for g1/0: 'it sends us to /elsewhere, which is not followed'"),
        (200, b"<html>", ScorerFailed, "answered no JSON"),
        (200, b'{"score": "\xff"}', ScorerFailed, "answered no JSON"),
        (200, b"[" * 100_000, ScorerFailed, "answered no JSON"),
        (200, b"1" * 5_000_000, ScorerFailed, "more than 4194304 bytes"),
    ],
)
async def test_refusals_say_whether_to_try_again(status: int, body: bytes, error: type[Exception], text: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        headers = {"Location": "/elsewhere?key=secret"} if status == 302 else {}
        return web.Response(status=status, body=body, headers=headers)

    async with service(handle) as url, RemoteScorer([url]) as scorer:
        with pytest.raises(error, match=text):
            await scorer.score(sample("x"), 20.0)


async def test_a_silent_service_runs_into_the_deadline_and_an_absent_one_is_tried_again() -> None:
    silent = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        await silent.wait()
        return web.Response(body=b"1")

    async with service(handle) as url:
        async with RemoteScorer([url]) as scorer:
            with pytest.raises(DeadlineExceeded, match="reward of g1/0 from http://127"):
                await scorer.score(sample("x"), 0.2)
        silent.set()
    secret = url.replace("//", "//user:secret@") + "?key=secret"
    for absent in ("http://a..b/rm", secret):  # a name that cannot be is one that is not found
        async with RemoteScorer([absent]) as scorer:
            with pytest.raises(ScorerFailed, match="not reached for g1/0") as caught:
                await scorer.score(sample("x"), 20.0)
    assert "secret" not in str(caught.value)
