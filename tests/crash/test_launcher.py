"""The launcher killed, everything killed, everything drained: the same command goes on."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.crash.conftest import Launch
from tests.crash.episode import HELD
from tests.crash.house import REPO, UNLOWERED, Run, Tables, evaluating, merged, until
from tests.crash.judge import judge
from tests.crash.test_detach import go_on

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1200)]

LONG: Tables = {"rollout": {"num_rollout": 30}}
LONGER: Tables = {"rollout": {"num_rollout": 50}, "sglang": {"num_generation_workers": 2}}


def kill_launcher(run: Run) -> None:
    """SIGKILL to the launcher alone."""
    assert run.launcher is not None
    run.launcher.kill()
    run.launcher.wait(10)


def actors(run: Run) -> dict[str, list[int]]:
    """Pids of all actors by name."""
    names = [file.stem for file in (run.dir / "actors").glob("*.json")]
    return {name: run.pids(name) for name in names}


def test_a_killed_launcher_is_followed_by_one_that_adopts(run_of: Launch) -> None:
    run = run_of(merged(LONGER, {"rollout": {"num_rollout": 100_000}}))
    run.start()
    run.until_step(2)
    before = actors(run)
    kill_launcher(run)
    step = run.step()
    until("training to go on without a launcher", lambda: run.step() > step)
    run.start()
    run.until_it_listens()
    assert {name: pids for name, pids in actors(run).items() if pids} == before
    go_on(run)
    stopped = run.command("stop", "--wait", "60")
    assert stopped.returncode == 0, stopped.stderr
    assert run.join() == 0, "the launcher ends with the actors"
    assert not run.processes()
    judge(run, steps=run.saved())


@pytest.mark.slow
def test_a_launcher_with_other_settings_replaces_what_still_runs(run_of: Launch) -> None:
    run = run_of(merged(LONGER, {"rollout": {"num_rollout": 100_000}}))
    run.start()
    run.until_step(2)
    before = actors(run)
    kill_launcher(run)
    wanted = run.step() + 20
    run.start(flags=("--num-rollout", str(wanted), "--num-generation-workers", "1"))
    run.finish()
    after = (run.dir / "logs" / "trainer.log").read_text()
    assert "restored" in after, "the trainer went on with its old settings"
    assert before["generation-1"]
    assert not run.processes()
    judge(run, steps=wanted)


@pytest.mark.slow
def test_an_adopted_actor_that_dies_is_started_again(run_of: Launch) -> None:
    run = run_of(LONGER)
    run.start()
    run.until_step(2)
    kill_launcher(run)
    run.start()
    run.until_it_listens()
    for actor in ("generation-0", "trainer", "filter"):
        run.kill(actor)
    run.finish()
    judge(run)


@pytest.mark.slow
def test_actors_that_died_without_a_launcher_are_started_again(run_of: Launch) -> None:
    run = run_of(LONGER)
    run.start()
    run.until_step(2)
    kill_launcher(run)
    for actor in ("sampler", "publisher", "reward-0"):
        run.kill(actor)
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
def test_a_run_that_ended_without_its_launcher_is_finished_by_the_next(run_of: Launch) -> None:
    run = run_of()
    run.start()
    run.until_step(1)
    kill_launcher(run)
    until("the trainer to end by itself", lambda: not run.pids("trainer"))
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
def test_two_launchers_of_one_run(run_of: Launch) -> None:
    """The second one refuses, and the first goes on unharmed."""
    run = run_of(LONGER)
    run.start()
    run.until_step(1)
    first = run.launcher
    run.start()
    code = run.join()
    run.launcher = first
    assert code == 2
    assert "already" in run.output()
    run.finish()
    judge(run)


@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.slow
def test_everything_killed_and_run_again(step: int, run_of: Launch) -> None:
    run = run_of(LONG)
    run.start()
    run.until_step(step)
    run.kill_all()
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
def test_everything_killed_twice(run_of: Launch) -> None:
    run = run_of(LONG)
    for step in (3, 12):
        run.start()
        run.until_step(step)
        run.kill_all()
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
def test_the_bus_is_gone(run_of: Launch) -> None:
    """A fresh Redis: the outstanding groups of the checkpoint are issued again."""
    run = run_of(LONG)
    run.start()
    run.until_step(3)
    run.until("a checkpoint", lambda: run.saved() > 0)
    run.kill_all()
    shutil.rmtree(run.dir / "redis")
    run.start()
    run.finish()
    judge(run, whole_policy=False)
    assert "issued again" in run.output()


@pytest.mark.slow
def test_the_bus_is_gone_before_the_first_checkpoint(run_of: Launch) -> None:
    """Nothing is left, so all begins anew."""
    run = run_of(merged(LONG, {"ckpt": {"save_interval": 1000}}))
    run.start()
    run.until_step(1)
    run.kill_all()
    shutil.rmtree(run.dir / "redis")
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
def test_the_bus_is_gone_in_the_middle_of_an_evaluation(run_of: Launch, toy: Path) -> None:
    run = run_of(merged(LONG, evaluating(toy)))
    run.start(fault="evaluator:collecting:5:STOP")
    run.until("an evaluation", lambda: run.struck)
    run.until("a checkpoint", lambda: run.saved() > 0)
    run.kill_all()
    shutil.rmtree(run.dir / "redis")
    run.start()
    run.finish()
    judge(run, whole_policy=False)


@pytest.mark.slow
def test_killed_while_groups_of_a_lost_bus_are_issued_again(run_of: Launch) -> None:
    run = run_of(LONG)
    run.start()
    run.until_step(3)
    run.until("a checkpoint", lambda: run.saved() > 0)
    run.kill_all()
    shutil.rmtree(run.dir / "redis")
    run.start(fault="sampler:reissuing:2:KILL")
    run.finish()
    assert run.struck
    judge(run, whole_policy=False)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["knobs_restored", "restored"])
def test_the_launcher_killed_while_it_restores_a_lost_bus(point: str, run_of: Launch) -> None:
    run = run_of(LONG)
    run.start()
    run.until_step(3)
    run.until("a checkpoint", lambda: run.saved() > 0)
    run.kill_all()
    shutil.rmtree(run.dir / "redis")
    run.start(fault=f"launcher:{point}:1:KILL")
    assert run.join() == -signal.SIGKILL
    run.start()
    run.finish()
    judge(run, whole_policy=False)


@pytest.mark.slow
def test_drained_and_run_again(run_of: Launch) -> None:
    run = run_of(LONG)
    run.start()
    run.until_step(2)
    run.drain(signal.SIGINT)
    assert not run.processes()
    step = run.saved()
    assert step >= 2, "a drain ends with a checkpoint"
    judge(run, steps=step)
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["a signal", "the command", "two signals"])
def test_a_drain_waits_for_the_step_under_way_unless_asked_again(run_of: Launch, by: str) -> None:
    """Also beyond its deadline: else all that was trained since the last checkpoint is trained again."""
    hook = {"num_rollout": 30, "rollout_sample_filter_path": "tests.crash.episode.holds"}
    run = run_of({"rollout": hook, "launch": {"drain_timeout_s": 1.0}, "ckpt": {"save_interval": 100}})
    run.start()
    log = run.dir / "logs" / "trainer.log"
    run.until("the third batch to be held", lambda: log.exists() and HELD in log.read_text())
    assert run.launcher is not None
    again = by == "two signals"
    if by == "the command":
        assert run.command("stop", "--wait", "90").returncode == 0
    else:
        run.launcher.send_signal(signal.SIGINT)
    if again:
        until("the others to have drained", lambda: not run.pids("sampler"))
        run.launcher.send_signal(signal.SIGINT)
    run.finish()
    assert not run.processes()
    killed = "trainer did not drain within --drain-timeout-s and was killed" in run.output()
    assert (run.saved(), killed) == ((0, True) if again else (3, False)), run.output()
    assert "no living" not in run.output(), "rooms that ended as they were asked are nothing to be told of"
    judge(run, steps=2 if again else 3)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_drain(run_of: Launch) -> None:
    run = run_of(LONG)
    run.start(fault="trainer:checkpoint_half:6:KILL")
    run.until_step(2)
    run.until("the first checkpoint", lambda: run.saved() >= 2)
    run.drain()
    run.start()
    run.finish()
    judge(run)


@pytest.mark.slow
def test_an_actor_that_cannot_live_ends_the_run_with_its_cause(run_of: Launch) -> None:
    """A crash loop is no hang: the budget ends it, and the text says what died and how."""
    run = run_of({"launch": {"restart_budget": 2}, "rollout": {"num_rollout": 500}})
    run.start()
    run.until_step(1)
    for _ in range(3):
        pid = run.kill("filter")
        until("the end of the process", lambda pid=pid: not psutil.pid_exists(pid))
        until("another one, or the end", lambda: bool(run.pids("filter")) or run.launcher.poll() is not None)
    assert run.join() == 1
    assert "filter failed 3 times" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.slow
def test_a_worker_that_fails_again_and_again_is_tried_later_while_its_peer_works(run_of: Launch) -> None:
    run = run_of(
        {
            "launch": {"restart_budget": 1},
            "rollout": {"num_rollout": 100_000},
            "sglang": {"num_generation_workers": 2},
        }
    )
    run.start()
    run.until_step(1)
    for _ in range(2):
        pid = run.kill("generation-1")
        until("the end of the process", lambda pid=pid: not psutil.pid_exists(pid))
    record = run.dir / "metrics.jsonl"
    until("the word of it", lambda: "generation-1 failed 2 times within 60 s" in record.read_text())
    assert "tried again in 30 s, the run goes on without it" in record.read_text()
    step = run.step()
    until("training to go on", lambda: run.step() >= step + 3)
    until("another try", lambda: bool(run.pids("generation-1")))
    run.drain()
    judge(run, steps=run.saved())


def test_a_trainer_that_never_gets_further_ends_the_run_with_its_words(run_of: Launch, tmp_path: Path) -> None:
    """However long each of its lives takes: here no two failures count as quick ones."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if {'actors.trainer', 'actors.trainer.actor'} & set(sys.orig_argv):\n"
        "    import torch\n"
        "    from actors.trainer.training import ranked\n"
        "    whole = ranked.train_batch\n"
        "    def fits_twice(core, batch):\n"
        "        if batch.step >= 2:\n"
        "            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 302.00 MiB.')\n"
        "        return whole(core, batch)\n"
        "    ranked.train_batch = fits_twice\n"
        "elif 'miles_async' in sys.orig_argv:\n"
        "    from miles_async.launcher import restart\n"
        "    restart.QUICK_S = 0.0\n"
    )
    run = run_of({"launch": {"restart_budget": 1}, "rollout": {"num_rollout": 500}})
    run.start(wrap=(*UNLOWERED, "env", f"PYTHONPATH={tmp_path}:{REPO}"))
    assert run.join() == 1
    assert "step 3 does not fit into cpu, where " in run.output() and "lower --max-tokens-per-gpu" in run.output()
    assert "trainer crashed 2 times before step 3" in run.output() and "Traceback" not in run.output()
