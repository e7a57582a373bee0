"""A process whose loop stands in C is ended with its stack in its log, and what ended two processes is a dead letter."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from actors.reward.pool import VerifierPool
from actors.reward.sample import Sample
from actors.runtime import loopwatch
from actors.runtime.loopwatch_acts import Row, Work, blamed, loads, places
from actors.runtime.loopwatch_child import Look, counted
from bus import Bus
from bus.errors import DeadlineExceeded
from bus.messages.samples import RolloutDone, RolloutLost
from bus.streams.absent import deaths_of
from bus.topology import DEAD, PROMPTS, ROLLOUTS
from tests.actors.garbage import list_open
from tests.actors.house import messages, open_bus, put, task, until
from tests.declared import actor_of

REPO = Path(__file__).parents[2]
DEADLINE_S, LEASE_S = 4.0, 2.4  # the watch keeps the leases in between
ROOM = "standing_room.py"


class House:
    """Processes of the room, which a launcher would start again."""

    def __init__(self, bus: Bus, folder: Path, *, deadline_s: float = DEADLINE_S) -> None:
        self._bus, self._folder, self._deadline_s = bus, folder, deadline_s
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ends: list[int] = []

    def start(self, name: str) -> None:
        spec = actor_of(name=name, role="generation", bus=self._bus.config, loop_deadline_s=self._deadline_s, heartbeat_s=0.2)
        file = self._folder / f"{name}.json"
        file.write_bytes(msgspec.json.encode(spec))
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.actors.standing_room", str(file)], cwd=REPO, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(REPO)},
            )  # fmt: skip

    def keep(self) -> None:
        """Start again what ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.ends.append(process.returncode)
                self.start(name)

    def log(self) -> str:
        return "".join(file.read_text() for file in sorted(self._folder.glob("*.log")))

    def __enter__(self) -> House:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


async def all_ended(bus: Bus, house: House) -> bool:
    await asyncio.sleep(0.05)
    house.keep()
    return await bus.length(PROMPTS) == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("label", "code", "says"),
    [
        ("regex", -signal.SIGKILL, "the event loop of"),
        pytest.param("task", -signal.SIGKILL, "the event loop of", marks=pytest.mark.slow),
        pytest.param("thread", -signal.SIGKILL, "the event loop of", marks=pytest.mark.slow),
        pytest.param("sleep", -signal.SIGKILL, "the event loop of", marks=pytest.mark.slow),
        ("crash", -signal.SIGSEGV, "Segmentation fault"),
    ],
)  # fmt: skip
async def test_what_holds_up_its_process_twice_is_a_dead_letter_that_names_the_place(
    redis_url: str, run_name: str, tmp_path: Path, label: str, code: int, says: str
) -> None:
    """Beside others, which lose nothing by it, and with a peer, which the sample never reaches before its first worker is ended."""
    # Nothing but the watch renews or frees the leases of what crashed: one that lapses first is given out before the death counts.
    async with open_bus(redis_url, run_name, lease_s=60.0 if label == "crash" else LEASE_S) as bus:
        await list_open(bus, *(f"g{i}" for i in range(12)), n=1)
        await put(bus, PROMPTS, *(task(i, 0, n=1, label=label if i == 2 else "7") for i in range(12)))
        with House(bus, tmp_path) as house:
            house.start("w0")
            house.start("w1")
            await until(lambda: all_ended(bus, house), deadline_s=120.0)
            log = house.log()
        [letter] = await messages(bus, DEAD)
        assert letter.sample_id == "g2/0" and says in letter.error and "it ended 2 processes" in letter.error, letter.error
        assert ROOM in letter.error or label == "thread", letter.error
        assert house.ends == [code] * 2, (house.ends, log)
        assert f'File "{Path(__file__).with_name(ROOM)}"' in log or label == "crash"
        assert ", with g2/0: this process is ended" in log or label == "crash"
        ended = await messages(bus, ROLLOUTS)
        assert sorted(m.sample_id for m in ended if isinstance(m, RolloutLost)) == ["g2/0"]
        assert sorted(m.task.sample_id for m in ended if isinstance(m, RolloutDone)) == sorted(
            f"g{i}/0" for i in range(12) if i != 2
        )
        assert await deaths_of(bus, "g2/0") == (0, ""), "a letter that is retried begins anew"


@pytest.mark.timeout(120)
async def test_a_loop_that_goes_on_in_time_is_told_of_and_keeps_its_leases(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name, lease_s=LEASE_S) as bus:
        await list_open(bus, "g0", n=1)
        await put(bus, PROMPTS, task(0, 0, n=1, label="short"))
        with House(bus, tmp_path, deadline_s=60.0) as house:
            house.start("w0")
            await asyncio.sleep(1.0)
            house.start("w1")
            await until(lambda: all_ended(bus, house), deadline_s=60.0)
            log = house.log()
            assert "leases lost" not in log and house.ends == [], log
            assert len(await messages(bus, ROLLOUTS)) == 1


@pytest.mark.timeout(120)
async def test_a_process_that_was_stopped_and_goes_on_is_not_ended(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name, lease_s=LEASE_S) as bus:
        with House(bus, tmp_path) as house:
            house.start("w0")
            await until(lambda: _beats(bus))
            process = house.processes["w0"]
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3 * DEADLINE_S)
            process.send_signal(signal.SIGCONT)
            await list_open(bus, "g0", n=1)
            await put(bus, PROMPTS, task(0, 0, n=1))
            await until(lambda: all_ended(bus, house))
            assert house.ends == [] and "stands still" not in house.log()
            process.terminate()
            assert process.wait(30) == 11, house.log()  # drained: the watch lets it go


async def _beats(bus: Bus) -> bool:
    return "w0" in await bus.vitals()


@pytest.mark.timeout(60)
async def test_the_watch_ends_with_its_process(redis_url: str, run_name: str, tmp_path: Path) -> None:
    async with open_bus(redis_url, run_name) as bus:
        with House(bus, tmp_path) as house:
            house.start("w0")
            await until(lambda: _beats(bus))
            watch = _child_of(house.processes["w0"].pid)
            assert watch
            house.processes["w0"].kill()
            end = time.monotonic() + 20
            while os.path.exists(f"/proc/{watch}") and _state(watch) != "Z":
                assert time.monotonic() < end
                await asyncio.sleep(0.05)


async def test_an_actor_goes_on_without_a_watch_while_none_can_be_started(
    redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loopwatch, "AGAIN_S", 0.1)
    me, (soft, hard) = os.getpid(), resource.getrlimit(resource.RLIMIT_NOFILE)
    async with open_bus(redis_url, run_name) as bus:
        spec = actor_of(name="w0", role="generation", bus=bus.config, loop_deadline_s=DEADLINE_S)
        async with loopwatch.watched(spec):
            first = _child_of(me)
            os.kill(first, signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # what is open stays
            try:
                await until(lambda: _true("no process can be started: Too many open files" in caplog.text))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await until(lambda: _true(_child_of(me) not in (0, first)))


async def _true(seen: bool) -> bool:
    return seen


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _child_of(pid: int) -> int:
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return next((int(line.split()[0]) for line in found.splitlines() if "loopwatch_child" in line), 0)


def test_time_counts_only_while_a_loop_could_run() -> None:
    assert counted(Look("S", 5.0), Look("S", 5.0), 1.0) == 1.0, "it waits in a call that blocks, or for another thread"
    assert counted(Look("R", 5.0), Look("R", 6.5), 1.0) == 1.0
    assert counted(Look("R", 5.0), Look("R", 5.01), 1.0) == pytest.approx(0.01), "it waits for a core"
    for state in "Tt":
        assert counted(Look("S", 5.0), Look(state, 5.0), 1.0) == 0.0, "stopped, or under a debugger"


STACKS = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 10 in wait
  File "/lib/threading.py", line 20 in run

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/re.py", line 1 in match
  File "/home/user/my agent.py", line 22 in count
  File "/repo/actors/x.py", line 3 in f
  File "/repo/actors/y.py", line 4 in g
"""


def test_the_place_is_that_of_the_loops_own_thread() -> None:
    assert places(STACKS, 0x7F02) == "re.py:1 < my agent.py:22 < x.py:3"
    assert places(STACKS, 0x7F01) == "threading.py:10 < threading.py:20"
    assert places("", 0x7F01) == "a place that Python cannot tell"


def test_a_library_that_is_loaded_is_known_by_its_loader() -> None:
    loader = '  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed\n'
    assert not loads(STACKS)
    assert loads(STACKS.replace('  File "/lib/threading.py", line 10 in wait\n', loader))
    below = STACKS.replace('  File "/repo/actors/y.py", line 4 in g\n', loader)
    assert not loads(below), "a module that hangs while it is loaded computes by itself"


def test_the_sample_whose_code_computes_is_blamed() -> None:
    loop, thread = Row(1, Work("prompts", "1-0", "a/0")), Row(7, Work("prompts", "2-0", "b/0"))
    assert blamed([loop, None], {1: 2.0}, 2.0) == loop.work
    assert blamed([loop, None], {}, 2.0) == loop.work, "it blocks without computing"
    assert blamed([loop, thread], {1: 0.1, 7: 1.9}, 2.0) == thread.work, "the loop waits for the interpreter's lock"
    assert blamed([None, thread], {7: 0.1}, 2.0) is None, "a tool that waits holds up nobody"
    assert blamed([loop, None], {1: 0.1, 9: 1.9}, 2.0) is None, "a thread of nobody's"


async def test_a_verifier_that_stands_in_c_is_ended_with_its_stack_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hook = tmp_path / "standing.py"
    hook.write_text("import re\n\ndef hook(sample):\n    return re.match(sample['label'], sample['response']) is None\n")
    stands = Sample(sample_id="g1/0", prompt="p", response="a" * 60 + "b", label="(a+)+$")
    async with VerifierPool(f"{hook}:hook", n_workers=1, boot_deadline_s=30.0) as verifiers:
        with pytest.raises(DeadlineExceeded):
            await verifiers.score(stands, 2.0)
        assert await verifiers.score(msgspec.structs.replace(stands, label="x"), 30.0) == 1.0
    assert f'File "{hook}", line 4 in hook' in capfd.readouterr().err
