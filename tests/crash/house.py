"""One run of the real launcher in a directory of its own, watched and disturbed from outside.

Processes are found by the run directory in their command line, so that nothing else is ever hit. Every wait polls with a
deadline and names what did not come.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec
import psutil

from actors.runtime.priority import COMPUTE_NICE
from bus import Bus, BusConfig, Entry
from bus.server import EmbeddedRedis
from bus.topology import POLICY
from miles_async.launcher.prepare import shared_memory
from tests.warm.launched import Warmed, warmed

REPO = Path(__file__).resolve().parents[2]
STEPS = 6
RUN_DEADLINE_S = 400.0  # for what never comes: eleven processes share the cores of others, and a busy machine is no fault
LEASE_S = 1.5

Tables = dict[str, dict[str, Any]]
SETTINGS: Tables = {
    # Nothing of the policy log is trimmed, so that the judge sees all steps, however many a quick machine makes.
    "ckpt": {"save_interval": 2, "keep_last": 10_000},
    "rollout": {
        "input_key": "prompt",
        "label_key": "label",
        "rollout_shuffle": True,
        "num_rollout": STEPS,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "over_sampling_batch_size": 6,
        "rollout_max_response_len": 48,
        "partial_save_tokens": 8,
        "rm_type": "deterministic_random",
        "max_weight_staleness": 2,
    },
    "bus": {"lease_s": LEASE_S},
    "grpo": {"use_tis": True},
    "optimizer": {"lr": 1e-3},
    "sglang": {"num_generation_workers": 1, "sglang_server_concurrency": 16},
    "launch": {"console": "none", "report": False, "heartbeat_s": 0.5, "drain_timeout_s": 10.0},
}


def toy_tables(toy: Path, home: Path, settings: Tables | None = None) -> Tables:
    """Settings of a run of the toy, every trained batch recorded."""
    places: Tables = {
        "model": {"hf_checkpoint": str(toy / "model")},
        "rollout": {"prompt_data": str(toy / "prompts.jsonl")},
        "ckpt": {"save_debug_rollout_data": str(home / "batches" / "{rollout_id}.msgpack")},
    }
    return merged(merged(SETTINGS, places), settings or {})


def evaluating(toy: Path) -> Tables:
    """Settings that measure the toy's first prompts every second step."""
    return {"eval": {"eval_prompt_data": ["few", f"{toy / 'prompts.jsonl'}@[0:12]"], "eval_interval": 2}}


class Missed(AssertionError):
    """Something that should have come did not."""


def until(what: str, seen: Callable[[], bool], *, seconds: float = 300.0, every_s: float = 0.05) -> None:
    """Poll until `seen`; Missed names `what`."""
    end = time.monotonic() + seconds
    while not seen():
        if time.monotonic() > end:
            raise Missed(f"{what}: not within {seconds:g} s")
        time.sleep(every_s)


FOUND = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
"""Where actors look for packages: this checkout first."""


def usual() -> dict[str, str]:
    """Environment of a command."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": FOUND}


UNLOWERED = ("nice", "-n", str(COMPUTE_NICE))
"""Before a command: who is as low as that already does not lower its session. As runs that are forked from tests/warm, these do not
stand behind all that computes beside them."""


class NoServer:
    """Redis is somebody else's to stop."""

    def stop(self) -> None: ...


class Run:
    """`<directory>/runs/<name>`. `start` may be called again: that is a rerun of the command. `warm`: socket of a process that has
    loaded what fork servers load (tests/warm); a start with `wrap` does without."""

    like: int | None = None  # a process on whose host it is started (tests/hosts)

    def __init__(self, directory: Path, tables: Tables, warm: Path | None = None, name: str = "r") -> None:
        self.home, self._warm = directory, warm
        self.dir = directory / "runs" / name
        self.checkpoints = self.dir / "checkpoints"
        self.launcher: subprocess.Popen[bytes] | Warmed | None = None
        self._faults: list[str] = []
        self._made_with = self._tables = merged(tables, {"launch": {"runs_dir": str(directory / "runs"), "name": name}})

    def take(self, settings: Tables) -> None:
        """Settings of the next start, over those it was made with."""
        self._tables = merged(self._made_with, settings)

    def write(self) -> Path:
        """The file of settings of the next start."""
        file = self.home / "run.toml"
        file.write_text(toml_of(self._tables))
        return file

    @property
    def steps(self) -> int:
        return int(self._tables["rollout"]["num_rollout"])

    @property
    def left(self) -> Path:
        """All that it leaves."""
        return self.home

    def setting(self, table: str, name: str) -> Any:
        """A value the run was given."""
        return self._tables[table][name]

    def given(self, table: str, name: str) -> Any:
        """The same, None where it was not given."""
        return self._tables.get(table, {}).get(name)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, *, fault: str = "", flags: tuple[str, ...] = (), wrap: tuple[str, ...] = ()) -> None:
        """Run the command. `fault`: see actors.runtime.faultpoints; each strikes once per test."""
        file, environment = self.write(), usual()
        if fault:
            self._faults = fault.split(",")
            (self.home / "faults").mkdir(exist_ok=True)
            environment |= {"MILES_ASYNC_FAULT": fault, "MILES_ASYNC_FAULT_ONCE": str(self.home / "faults")}
        with (self.home / "launcher.log").open("ab") as log:
            self.launcher = self._started(wrap, ["train", str(file), *flags], environment, log, log)

    def _started(
        self, wrap: Sequence[str], words: Sequence[str], env: Mapping[str, str], stdout: IO[Any], stderr: IO[Any]
    ) -> subprocess.Popen[bytes] | Warmed:
        if self._warm is not None and not wrap:
            words = ["miles_async", *words]
            return Warmed(self._warm, words, env=env, cwd=self.home, stdout=stdout, stderr=stderr, like=self.like)
        command = [*wrap, sys.executable, "-m", "miles_async", *words]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env, cwd=self.home)

    def environment(self) -> dict[str, str]:
        """Of a process of ours beside the run, whose engine is to be warm."""
        return usual() if self._warm is None else warmed(self._warm, usual())

    def beside(self, *words: str, log: str) -> subprocess.Popen[bytes] | Warmed:
        """Another miles-async command meanwhile, in the run's home, with its runs; what it prints is added to that file there."""
        with (self.home / log).open("ab") as out:
            words = (*words, "--runs-dir", str(self.dir.parent))
            return self._started((), words, {**usual(), "PYTHONUNBUFFERED": "1"}, out, out)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another miles-async command, in the run's home, with its runs."""
        words = (*words, "--runs-dir", str(self.dir.parent))
        with TemporaryFile() as out, TemporaryFile() as err:
            code = self._started((), words, usual(), out, err).wait(180)
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(words, code, out.read().decode(), err.read().decode())

    @property
    def to_come(self) -> list[str]:
        """Armed faults that have not happened."""
        return [fault for fault in self._faults if not (self.home / "faults" / fault).exists()]

    @property
    def struck(self) -> bool:
        """Whether all armed faults have happened."""
        return not self.to_come

    def join(self, *, seconds: float = RUN_DEADLINE_S) -> int:
        """Wait for the launcher; its exit status."""
        assert self.launcher is not None
        try:
            return self.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Missed(f"the run did not end within {seconds:g} s\n{self.story()}") from None

    def finish(self, *, seconds: float = RUN_DEADLINE_S) -> None:
        """Wait for a good end."""
        code = self.join(seconds=seconds)
        assert code == 0, f"exit {code}\n{self.story()}"

    def drain(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the run to stop, and wait for a good end."""
        assert self.launcher is not None
        self.launcher.send_signal(number)
        self.finish()

    def output(self) -> str:
        """What the launcher printed."""
        return (self.home / "launcher.log").read_text(errors="replace")

    def story(self) -> str:
        """Last lines of all logs, for a failure's message."""
        parts = [f"launcher: {self.output()[-1500:]}"]
        for log in sorted((self.dir / "logs").glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            parts.append("\n".join([f"-- {log.name}", *(line[:300] for line in lines[-12:])]))
        return "\n".join(parts)

    # -- what is there ------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """All actors and engines of this run that live, whoever started them."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(self.dir) + "/" in word for word in words):
                found.append(process)
        return found

    def pids(self, actor: str) -> list[int]:
        """Pids of one actor by its name; several only when something is wrong."""
        wanted = str(self.dir / "actors" / f"{actor}.json")
        return [p.pid for p in self.processes() if wanted in (p.info["cmdline"] or [])]

    def engine_pids(self) -> list[int]:
        """Pids of embedded engines."""
        return [p.pid for p in self.processes() if "actors.generation.engines.embedded" in (p.info["cmdline"] or [])]

    def pid(self, actor: str) -> int:
        """The living process of an actor."""
        found: list[int] = []  # of one look: it may be about to die
        until(f"a process of {actor}", lambda: bool(found.extend(self.pids(actor)) or found))
        return found[0]

    @property
    def keeps_its_redis(self) -> bool:
        return "bus_url" not in self._tables.get("bus", {})

    def server(self) -> EmbeddedRedis | NoServer:
        """The run's embedded Redis, adopted or started."""
        if not self.keeps_its_redis:
            return NoServer()
        server = EmbeddedRedis(self.dir)
        server.start()
        return server

    def redis_pid(self) -> int:
        """Pid of the living server."""
        return int((self.dir / "redis" / "redis.pid").read_text())

    def ask(self, question: Callable[[Bus], Any]) -> Any:
        """Answer of an async function of the run's bus, which must be up."""
        reference = msgspec.json.decode((self.dir / "run.json").read_bytes())
        blobs = str(self.dir / "blobs") if self.keeps_its_redis else ""
        config = BusConfig(url=reference["bus_url"], run=reference["run"], blob_dir=blobs)

        async def answer() -> Any:
            async with Bus(config) as bus:
                return await question(bus)

        return asyncio.run(answer())

    def step(self) -> int:
        """Newest step on the bus, 0 when there is none yet."""
        if not (self.dir / "run.json").exists():
            return 0
        return int(self.ask(_newest_step))

    def until(self, what: str, seen: Callable[[], bool], *, seconds: float = RUN_DEADLINE_S) -> None:
        """Poll until `seen`. A launcher that ended before is told at once, with the logs."""

        def ended() -> bool:
            return self.launcher is not None and self.launcher.poll() is not None

        was_seen = False

        def look() -> bool:
            nonlocal was_seen
            was_seen = seen()
            return was_seen or ended()

        until(what, look, seconds=seconds)
        if not (was_seen or seen()):  # what holds for a moment only was seen; what came with the end is looked for once more
            raise Missed(f"{what}: the run ended before\n{self.story()}")

    def until_step(self, step: int) -> None:
        """Wait until training has come so far."""
        self.until(f"step {step}", lambda: self.step() >= step)

    def until_it_listens(self) -> None:
        """Wait until the launcher may be signalled: before, a signal only ends its process."""
        self.until("a launcher that listens", self.listens)

    def listens(self) -> bool:
        """Whether it may be signalled. Its bus and the run's identity are there by then."""
        assert self.launcher is not None
        file = self.dir / "launcher.pid"
        return file.exists() and file.read_text().strip() == str(self.launcher.pid)

    def saved(self) -> int:
        """Step of the newest durable checkpoint, 0 without one."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    # -- what is done to it -------------------------------------------------------------------------------------

    def kill(self, actor: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal an actor; its pid."""
        pid = self.pid(actor)
        os.kill(pid, number)
        return pid

    def limit_file_size(self, actor: str, size: int) -> None:
        """Let an actor write no file above `size` bytes (-1: any), as if the disk were full. Linux."""
        limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY) if size < 0 else (size, resource.RLIM_INFINITY)
        resource.prlimit(self.pid(actor), resource.RLIMIT_FSIZE, limits)

    def kill_all(self) -> None:
        """SIGKILL to launcher, actors, engines and Redis: what a power cut does, but for the page cache."""
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait(10)

        def ended() -> bool:
            for process in self.processes():  # one that was just started may not have been there before
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            return not self.processes()

        until("all processes to end", ended, seconds=30)
        end_server(self.dir)

    def clean(self) -> None:
        """Nothing of this run is left, in memory or on disk."""
        self.kill_all()
        shutil.rmtree(shared_memory(self.dir).parent, ignore_errors=True)


async def _newest_step(bus: Bus) -> int:
    """Tests ask many times a second, so all of the log is read only where its end does not tell."""
    if newest := _steps(await bus.last(POLICY, 32)):
        return newest[0]
    return [0, *_steps(await bus.scan_all(POLICY))][-1]


def _steps(entries: Sequence[Entry]) -> list[int]:
    return [int(e.fields["id"].removeprefix("step")) for e in entries if e.fields["type"] == "policy.step"]


def end_server(run_dir: Path) -> None:
    """SIGKILL to the embedded Redis of a run directory, if one lives."""
    try:
        process = psutil.Process(int((run_dir / "redis" / "redis.pid").read_text()))
        if process.cwd() == str(run_dir / "redis"):
            process.kill()
            process.wait(10)
    except (OSError, ValueError, psutil.Error):
        return


def toml_of(tables: Tables) -> str:
    """Numbers, strings and booleans read alike in JSON and TOML. None: the setting is not given."""
    lines: list[str] = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None)]
    return "\n".join(lines) + "\n"


def merged(base: Tables, more: Tables) -> Tables:
    """Tables of `base` with those of `more` over them."""
    return {table: {**base.get(table, {}), **more.get(table, {})} for table in {*base, *more}}
