"""The embedded Redis killed with SIGKILL: everyone reconnects, what was acknowledged comes back from its file."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from actors.runtime.run import EXIT_BUS_GONE
from miles_async.launcher.run import RESUME
from tests.crash.conftest import Launch
from tests.crash.house import LEASE_S, Run, Tables, merged, until
from tests.crash.judge import judge

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

LONG: Tables = {"rollout": {"num_rollout": 30}}


@pytest.mark.slow
def test_killed_while_the_actors_start(run_of: Launch) -> None:
    run = run_of()
    run.start()
    until("the first actor", lambda: bool(run.pids("trainer")))
    os.kill(run.redis_pid(), signal.SIGKILL)
    run.finish()
    judge(run)


def test_killed_in_the_middle_of_a_run(run_of: Launch) -> None:
    run = run_of(LONG)
    run.start()
    run.until_step(2)
    os.kill(run.redis_pid(), signal.SIGKILL)
    run.finish()
    judge(run)


@pytest.mark.slow
def test_killed_between_a_checkpoint_and_its_acknowledgement(run_of: Launch) -> None:
    run = run_of()
    run.start(fault="trainer:before_ack:2:STOP")
    run.until("the acknowledgement", lambda: run.struck)
    os.kill(run.redis_pid(), signal.SIGKILL)
    os.kill(run.pid("trainer"), signal.SIGCONT)
    run.finish()
    judge(run)


@pytest.mark.slow
def test_killed_again_and_again(run_of: Launch) -> None:
    run = run_of({"rollout": {"num_rollout": 60}})
    run.start()
    for step in (1, 10, 20):
        run.until_step(step)
        os.kill(run.redis_pid(), signal.SIGKILL)
    run.finish()
    judge(run)


@pytest.mark.slow
def test_killed_together_with_the_trainer(run_of: Launch) -> None:
    run = run_of(LONG)
    run.start()
    run.until_step(3)
    os.kill(run.redis_pid(), signal.SIGKILL)
    run.kill("trainer")
    run.finish()
    judge(run)


@pytest.mark.slow
def test_stopped_for_longer_than_a_lease(run_of: Launch) -> None:
    run = run_of(merged(LONG, {"sglang": {"num_generation_workers": 2}}))
    run.start()
    run.until_step(2)
    pid = run.redis_pid()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * LEASE_S)
    os.kill(pid, signal.SIGCONT)
    run.finish()
    judge(run)


@pytest.mark.slow
def test_its_last_second_is_lost(run_of: Launch) -> None:
    """As after a power cut of its machine: the file ends earlier than what actors and checkpoints remember."""
    run = run_of({"rollout": {"num_rollout": 60}})
    run.start()
    run.until_step(3)
    (file,) = (run.dir / "redis").rglob("*.incr.aof")
    kept = file.stat().st_size
    run.until_step(run.step() + 3)
    assert run.launcher is not None
    run.launcher.kill()
    run.launcher.wait()
    os.kill(run.redis_pid(), signal.SIGKILL)
    os.truncate(file, kept)
    run.start()
    run.finish()
    judge(run, whole_policy=False)


def came_back(run: Run, holding: Callable[[Path], None]) -> None:
    """Redis dies, and is started by the launcher with what `holding` makes of its files."""
    assert run.launcher is not None
    run.launcher.send_signal(signal.SIGSTOP)
    os.kill(run.redis_pid(), signal.SIGKILL)
    holding(run.dir / "redis" / "appendonlydir")
    run.launcher.send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["with", "before the first"])
def test_it_comes_back_empty(checkpoint: str, run_of: Launch) -> None:
    """The run is restored by the launcher that is there, and goes on."""
    every = 2 if checkpoint == "with" else 1000
    run = run_of(merged(LONG, {"ckpt": {"save_interval": every}}))
    run.start()
    run.until_step(3)
    if checkpoint == "with":
        run.until("a checkpoint", lambda: run.saved() > 0)
    came_back(run, shutil.rmtree)
    run.finish()
    judge(run, whole_policy=False)
    assert run.output().count("came back without this run") == 1


def incremental(files: Path) -> Path:
    [found] = files.glob("*.incr.aof")
    return found


def half_a_command_and_zeros(files: Path) -> None:
    file = incremental(files)
    os.truncate(file, file.stat().st_size - 30)
    with file.open("ab") as opened:
        opened.write(bytes(1 << 16))


@pytest.mark.slow
def test_its_file_ends_in_zeros(run_of: Launch) -> None:
    """A power cut of a file system that gives a file its blocks first."""
    run = run_of(LONG)
    run.start()
    run.until_step(3)
    came_back(run, half_a_command_and_zeros)
    run.finish()
    judge(run, whole_policy=False)
    assert "bytes of zeros were cut off" in (run.dir / "redis" / "redis.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["incr.aof", "base.rdb", "manifest"])
def test_a_part_of_its_files_is_gone(part: str, run_of: Launch) -> None:
    """The run ends with the remedy in one line; with it, the same command goes on."""
    run = run_of(LONG)
    run.start()
    run.until_step(3)
    run.until("a checkpoint", lambda: run.saved() > 0)

    def without(files: Path) -> None:
        [file] = files.glob(f"*.{part}")
        os.truncate(file, file.stat().st_size - 10) if part == "manifest" else file.unlink()

    came_back(run, without)
    assert run.join() == EXIT_BUS_GONE
    last = run.output().strip().splitlines()[-1]
    assert "Its file is damaged. Move the folder redis of the run away" in last, last
    assert not run.processes()
    (run.dir / "redis").rename(run.dir / "away")
    run.start()
    run.finish()
    judge(run, whole_policy=False)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [50, 1])
def test_it_comes_back_as_it_was_long_ago(kept: int, run_of: Launch) -> None:
    """With all checkpoints kept, what came back is settled with them; else the bus is made anew from the newest. Either way no
    sample of theirs is trained again."""
    run = run_of(merged(LONG, {"rollout": {"num_rollout": 40}, "ckpt": {"keep_last": kept}}))
    run.start()
    run.until_step(3)
    shutil.copytree(run.dir / "redis" / "appendonlydir", run.home / "old", ignore_dangling_symlinks=True)
    run.until_step(run.step() + 8)

    def old(files: Path) -> None:
        shutil.rmtree(files)
        shutil.copytree(run.home / "old", files)

    came_back(run, old)
    run.finish()
    judge(run, whole_policy=False)
    assert ("came back older" in run.output()) == (kept == 1)


@pytest.mark.slow
def test_its_file_is_damaged_when_it_dies(run_of: Launch) -> None:
    """The cause and the remedy are told at once and in the last line, there is a report, and the remedy is one."""

    def damaged(files: Path) -> None:
        for file in files.glob("*.aof"):
            file.write_bytes(b"no such command\n" + file.read_bytes())

    run = run_of({"rollout": {"num_rollout": 60}, "launch": {"report": True}})
    run.start()
    run.until_step(3)
    run.until("a checkpoint", lambda: run.saved() > 0)
    came_back(run, damaged)
    assert run.join() == 75
    said = run.output().splitlines()
    [note] = [line for line in said if line.startswith("note: Redis died and does not start again")]
    [last] = [line for line in said if "ended with status 75" in line]
    assert "All actors end now" in note and "Move the folder redis" in last and RESUME not in last
    assert (run.dir / "report.html").is_file() and said[-1].startswith("report: ")
    shutil.rmtree(run.dir / "redis")
    run.start()
    run.finish()
    judge(run, whole_policy=False)


REFUSALS = {
    "out of memory": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS)
def test_refuses_writes_for_a_while(refusal: str, run_of: Launch) -> None:
    """The operator is told what and why, actors come back by themselves, and nothing is lost."""
    begin, end = REFUSALS[refusal]
    run = run_of({"rollout": {"num_rollout": 60}})
    run.start()
    run.until_step(3)
    with redis.Redis(unix_socket_path=str(run.dir / "redis.sock")) as server:
        server.execute_command(*begin)
        until("an actor to say so", lambda: any(refusal in log.read_text() for log in (run.dir / "logs").glob("*.log")))
        server.execute_command(*end)
    run.finish()
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize("refusal", REFUSALS)
def test_refuses_writes_for_good(refusal: str, run_of: Launch) -> None:
    """The run ends with the cause instead of hanging, and the same command goes on when the server writes again."""
    begin, _ = REFUSALS[refusal]
    run = run_of({"rollout": {"num_rollout": 60}, "bus": {"bus_deadline_s": 5.0}})
    run.start()
    run.until_step(3)
    with redis.Redis(unix_socket_path=str(run.dir / "redis.sock")) as server:
        server.execute_command(*begin)
        assert run.join() == 1
        assert refusal in run.output().strip().splitlines()[-1]
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
@pytest.mark.takes(60)
def test_silent_for_longer_than_the_deadline(run_of: Launch) -> None:
    """The run ends as one that can be resumed, and says so; the same command goes on."""
    run = run_of({"rollout": {"num_rollout": 60}, "bus": {"bus_deadline_s": 5.0}})
    run.start()
    run.until_step(3)
    pid = run.redis_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert run.join() == 75, "not 2, which says that nothing was begun"
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    said = run.output().strip().splitlines()
    wanted = ("ended with status 75", "did not answer", RESUME)
    assert any(all(words in line for words in wanted) for line in said), said
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
def test_another_program_writes_into_the_list_of_open_groups(run_of: Launch) -> None:
    """The run ends at once with the key and the remedy in one line, and with the remedy the same command goes on."""
    run = run_of({"rollout": {"num_rollout": 60}})
    run.start()
    run.until_step(3)
    key = f"ma:{{{run.dir.name}}}:open"
    with redis.Redis(unix_socket_path=str(run.dir / "redis.sock")) as server:
        server.hset(key, "x", b"\xc1")
    run.kill("sampler")  # a living one may not look there for long
    assert run.join() == 1
    [last] = [line for line in run.output().splitlines() if "ended with status 1" in line]
    assert f"field 'x' of key {key}" in last and f"redis-cli HDEL '{key}' 'x'" in last and "6 times" not in last
    server = run.server()
    with redis.Redis(unix_socket_path=str(run.dir / "redis.sock")) as client:
        client.hdel(key, "x")
    server.stop()
    run.start()
    run.finish()
    judge(run)
