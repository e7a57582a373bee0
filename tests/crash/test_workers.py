"""Workers come and go: engines die, workers join from outside, drain and vanish."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.record import read_record
from bus import Bus, ledger
from bus.topology import DEAD, PREFIXES, PROMPTS
from tests.crash.conftest import Launch
from tests.crash.house import Run, Tables, merged, until
from tests.crash.judge import judge
from tests.crash.mischief import join
from tests.warm.launched import Warmed

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

TWO: Tables = {
    "sglang": {"num_generation_workers": 2, "sglang_server_concurrency": 8},
    "rollout": {"num_rollout": 30},
}


async def letters(bus: Bus) -> list[Any]:
    return [await bus.message(entry) for entry in await bus.scan_all(DEAD)]


def until_it_works(run: Run, name: str) -> None:
    """Wait until a worker's tokens are in the accounts."""

    async def tokens(bus: Bus) -> int:
        return (await ledger.read_accounts(bus)).tokens_by_worker.get(name, 0)

    until(f"tokens of {name}", lambda: run.ask(tokens) > 0)


async def held(bus: Bus, name: str = "guest") -> int:
    """Samples that a worker has taken and not given back."""
    keys = [bus.keys.stream(stream.name) for stream in (PREFIXES, PROMPTS)]
    return sum([len(await bus.link.run("XPENDING", key, "generation", "-", "+", 100, name)) for key in keys])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_an_engine_dies_under_its_worker(number: signal.Signals, run_of: Launch) -> None:
    settings = {**TWO, "sglang": {**TWO["sglang"], "engine_token_deadline_s": 3.0}}
    run = run_of(settings)
    run.start()
    run.until_step(1)
    os.kill(run.engine_pids()[0], number)
    run.finish()
    judge(run)


@pytest.mark.slow
def test_the_only_engine_dies(run_of: Launch) -> None:
    run = run_of({"rollout": {"num_rollout": 30}})
    run.start()
    run.until_step(1)
    os.kill(run.engine_pids()[0], signal.SIGKILL)
    run.finish()
    judge(run)
    records = map(read_record, (run.home / "batches").iterdir())
    lengths = {m.rollout.response.n_tokens for record in records for group in record.groups for m in group.samples}
    assert lengths == {run.setting("rollout", "rollout_max_response_len")}, "an answer that broke off was taken for a whole one"


@pytest.mark.slow
def test_a_worker_vanishes_while_another_works(run_of: Launch) -> None:
    run = run_of(TWO)
    run.start(fault="generation-1:after_save:6:KILL")
    run.finish()
    assert run.struck
    judge(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["drains", "vanishes"])
@pytest.mark.slow
def test_a_worker_joins_and(number: signal.Signals, run_of: Launch) -> None:
    run = run_of({"rollout": {"num_rollout": 100_000}})
    run.start()
    run.until_step(1)
    guest = join(run, "guest")
    try:
        until_it_works(run, "guest")
        run.until("samples under way there", lambda: run.ask(held) > 0)
        guest.send_signal(number)
        assert guest.wait(20) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    finally:
        guest.kill()
        guest.wait()
    run.until("others to take over what it held", lambda: run.ask(held) == 0, seconds=60.0)
    run.until_step(run.step() + 2)
    run.drain()
    judge(run, steps=run.saved())


@pytest.mark.slow
def test_a_worker_that_joined_outlives_the_runs_own(run_of: Launch) -> None:
    run = run_of({"rollout": {"num_rollout": 100_000}})
    run.start()
    run.until_step(1)
    guest = join(run, "guest")
    try:
        until_it_works(run, "guest")
        os.kill(run.pid("generation-0"), signal.SIGSTOP)
        step = run.step()
        until("training to go on with the guest", lambda: run.step() >= step + 2)
        os.kill(run.pid("generation-0"), signal.SIGCONT)
        run.until_step(run.step() + 2)
    finally:
        guest.terminate()
        guest.wait(20)
    run.drain()
    judge(run, steps=run.saved())


@pytest.mark.slow
def test_a_worker_that_joined_leaves_with_a_run_that_has_finished(run_of: Launch) -> None:
    """Its bus is the run's own server, which waits for it."""
    run = run_of({"rollout": {"num_rollout": 20}})
    run.start()
    run.until_step(1)
    guest = join(run, "guest")
    try:
        until_it_works(run, "guest")
        run.finish()
        assert guest.wait(20) == 0
    finally:
        guest.kill()
        guest.wait()
    said = (run.home / "guest.log").read_text()
    assert "ERROR" not in said and "the bus is away" not in said, said
    judge(run)


@pytest.mark.slow
def test_a_worker_that_stayed_takes_the_settings_of_the_next_start(run_of: Launch) -> None:
    """And nobody else its name meanwhile."""
    run = run_of({"rollout": {"num_rollout": 100_000}})
    run.start()
    run.until_step(1)
    guest = join(run, "guest")
    said = lambda: (run.home / "guest.log").read_text()  # noqa: E731
    try:
        until_it_works(run, "guest")
        other = run.command("worker", "--name", "guest", "--run", run.dir.name)
        assert other.returncode == 2 and "worker name 'guest' refused" in other.stderr, other.stderr
        run.drain()
        run.start(flags=("--mask-offpolicy-in-partial-rollout",))
        run.until("the guest to join anew", lambda: "joins anew: the run was started again with other" in said())
        assert "(mask_offpolicy)" in said()
        run.until("it to serve again", lambda: "activated" in said().rpartition("joins anew")[2])
    finally:
        guest.terminate()
        guest.wait(20)
    run.drain()
    judge(run, steps=run.saved())


def is_buried(run: Run) -> bool:
    return bool(run.ask(letters))


def check_the_letter(run: Run, files: list[Path]) -> None:
    """The one dead letter names the sample and the place, and two processes ended with their stacks in `files`."""
    [letter] = run.ask(letters)
    assert letter.group_id.endswith("5") and "it ended 2 processes" in letter.error, letter.error
    assert "the event loop of " in letter.error and "episode.py:" in letter.error
    said = "".join(file.read_text() for file in files)
    assert said.count("this process is ended") == 2 and 'episode.py", line' in said


HELD_UP: Tables = {
    # Without an end: others train on meanwhile, and may be done long before a sample has used up its seconds of processor.
    "rollout": {"num_rollout": 100_000, "custom_generate_function_path": "tests.crash.episode.backtracks"},
    "launch": {"loop_deadline_s": 8.0},
    "bus": {"lease_s": 6.0},  # as it is: on a busy machine a watch takes seconds to reach the bus in the place of its process
}


@pytest.mark.slow
def test_a_sample_that_holds_up_its_worker_in_c_ends_two_of_them_and_the_run_goes_on(run_of: Launch) -> None:
    """It never walks on: the third that is given it buries it, with the place."""
    run = run_of(merged(HELD_UP, {"sglang": {"num_generation_workers": 2, "sglang_server_concurrency": 8}}))
    run.start()
    run.until_it_listens()
    run.until("the sample's burial", lambda: is_buried(run))
    run.until_step(run.step() + 2)
    check_the_letter(run, [*(run.dir / "logs").glob("generation-*.log")])
    run.drain()
    judge(run, steps=run.saved())


@pytest.mark.slow
def test_so_do_workers_that_joined(run_of: Launch) -> None:
    """Nobody starts these again, and nobody but their own watch sees that they stand."""
    run = run_of(merged(HELD_UP, {"sglang": {"num_generation_workers": 0, "sglang_server_concurrency": 8}}))
    run.start()
    given = ("--custom-generate-function-path", run.given("rollout", "custom_generate_function_path"))
    names = ("guest-1", "guest-2", "guest-3")
    guests: list[subprocess.Popen[bytes] | Warmed] = []
    run.until_it_listens()
    try:
        for name in names:
            guests.append(join(run, name, *given))
            if name == names[-1]:
                break
            run.until(f"{name} to end", lambda: guests[-1].poll() is not None)
            assert guests[-1].wait(1) == -signal.SIGKILL, (run.home / f"{name}.log").read_text()[-2000:]
        run.until("the sample's burial", lambda: is_buried(run))
        run.until_step(run.step() + 2)
        check_the_letter(run, [run.home / f"{name}.log" for name in names])
        run.drain()
    finally:
        for guest in guests:
            guest.kill()
            guest.wait()
    judge(run, steps=run.saved())
