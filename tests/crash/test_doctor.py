"""Causes planted in real runs: each is the first thing that the doctor says within a minute; before and after it says nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from bus import Bus
from miles_async.console.doctor.diagnosis import diagnose
from miles_async.console.doctor.finding import Finding
from miles_async.console.scene import read_scene
from tests.crash.conftest import Launch
from tests.crash.house import Run, merged, until

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(1500)]

SETTINGS: dict[str, dict[str, Any]] = {
    "sglang": {"num_generation_workers": 2, "sglang_server_concurrency": 8, "engine_token_deadline_s": 300.0},
    "rollout": {"num_rollout": 100_000},
    "ckpt": {"save_interval": 5, "keep_last": 3},
    "launch": {"restart_budget": 100},
}
# Each answer waits for its environment most of the time: who is looked at for minutes shall not take the processors meanwhile.
CALM = merged(SETTINGS, {"rollout": {"custom_generate_function_path": "tests.crash.episode.slow"}})
HEALTHY_S, MINUTE_S = 30.0, 60.0


def wrong(run: Run) -> list[Finding]:
    """Errors and warnings, gravest first."""

    async def look(bus: Bus) -> list[Finding]:
        return [finding for finding in diagnose(await read_scene(bus)) if finding.level != "info"]

    found: list[Finding] = run.ask(look)
    return found


def said(run: Run, *rules: str, after: Callable[[], None]) -> Finding:
    """The finding of one of these rules, once it is the first, within a minute."""
    after()
    seen: list[Finding] = []

    def first() -> bool:
        seen[:] = wrong(run)
        return bool(seen) and seen[0].rule in rules

    began = time.monotonic()
    try:
        until(" or ".join(rules), first, seconds=MINUTE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; instead: {seen}") from None
    print(f"{seen[0].rule}: after {time.monotonic() - began:.0f} s: {seen[0].text}")
    return seen[0]


def well(run: Run) -> None:
    until("the run to be well again", lambda: not wrong(run), seconds=120)


def command(run: Run, *words: Any) -> Any:
    return run.ask(lambda bus: bus.link.run(*words))


@pytest.fixture
def run(run_of: Launch, request: pytest.FixtureRequest) -> Run:
    """At work, and well."""
    run = run_of(getattr(request, "param", SETTINGS))
    run.start()
    run.until_step(3)
    well(run)
    return run


@pytest.mark.takes(40)
def test_nothing_is_said_of_a_healthy_run(run: Run) -> None:
    end, looks = time.monotonic() + HEALTHY_S, 0
    while time.monotonic() < end:
        assert wrong(run) == []
        looks += 1
    print(f"{looks} looks")


@pytest.mark.takes(70)
@pytest.mark.parametrize("run", [CALM], ids=[""], indirect=True)
def test_what_stands_still_is_named(run: Run) -> None:
    for actor in ("generation-1", "filter", "trainer"):
        pid = run.pid(actor)
        found = said(run, "stopped process", after=lambda pid=pid: os.kill(pid, signal.SIGSTOP))  # type: ignore[misc]
        assert found.about == actor and f"kill -CONT {pid}" in found.text
        os.kill(pid, signal.SIGCONT)
        well(run)

    engine = run.engine_pids()[0]  # while it gives tokens, or while it loads a version
    said(run, "engine silent", "stale worker", after=lambda: os.kill(engine, signal.SIGSTOP))
    os.kill(engine, signal.SIGCONT)
    well(run)


def test_what_is_wrong_with_server_disk_and_content_is_named(run: Run) -> None:
    policy = ("CONFIG", "SET", "maxmemory-policy")
    said(run, "eviction", after=lambda: command(run, *policy, "allkeys-lru"))
    command(run, *policy, "noeviction")
    said(run, "persistence", after=lambda: command(run, "CONFIG", "SET", "appendonly", "no"))
    command(run, "CONFIG", "SET", "appendonly", "yes")
    well(run)

    run.until("a checkpoint", lambda: run.saved() > 0)
    weights = (run.checkpoints / f"iter_{run.saved():07d}").rglob("model.safetensors")
    size = 3 * max(file.stat().st_size for file in weights) // 2  # which only a checkpoint exceeds
    found = said(run, "checkpoint failed", after=lambda: run.limit_file_size("trainer", size))
    assert "not written to" in found.text
    run.limit_file_size("trainer", -1)
    well(run)

    garbage = ("*", "type", "rollout.done", "id", "g0/0", "body", b"\xc1")
    key = run.ask(lambda bus: _key(bus, "rollouts"))
    assert "g0/0" in said(run, "dead letters", after=lambda: command(run, "XADD", key, *garbage)).text
    command(run, "DEL", run.ask(lambda bus: _key(bus, "dead")))
    well(run)


def test_a_crash_loop_and_a_launcher_that_is_gone_are_named(run: Run) -> None:
    def again_and_again(kill: Callable[[], Any], times: Callable[[], list[int]]) -> None:
        for _ in range(3):
            until("a process", lambda: bool(times()))
            before = times()
            kill()
            until("another process", lambda before=before: times() != before and bool(times()))  # type: ignore[misc]

    found = said(run, "crash loop", after=lambda: again_and_again(lambda: run.kill("reward-0"), lambda: run.pids("reward-0")))
    assert found.about == "reward-0" and "signal 9" in found.text

    assert run.launcher is not None
    run.launcher.kill()
    run.launcher.wait()
    said(run, "no launcher", after=lambda: command(run, "DEL", run.ask(lambda bus: _key(bus, "events"))))


async def _key(bus: Bus, stream: str) -> str:
    return bus.keys.stream(stream)
