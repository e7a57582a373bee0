"""What gpu_tails.py runs on: servers that its runs share, one run after the other, its share of the time, where it ended."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from actors.generation.engines.sglang.client import SGLangClient
from scripts.bench import REPO, command, gpu_bench
from scripts.bench import gpu_parts as parts
from scripts.bench.gpu_decode import fuse
from scripts.bench.gpu_tails_run import VARIABLE

ENDING_S = 12.0  # of a run that is told to end


Servers = list[tuple[str, dict[str, Any]]]
"""URL and facts of each."""


class Bench:
    """One call. `servers`: those that all runs share, while they are well."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(mkdtemp(prefix="gpu-tails-"))
        self.end = time.monotonic() + args.budget_s
        self.boots: list[dict[str, Any]] = []
        self._server = AsyncExitStack()
        self._up: Servers = []
        self._args: dict[str, Any] = {}
        self._fused = False  # of the server that runs

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    async def servers(self, model: Path, max_running: int, *, n: int = 1, fused: bool = False, **flags: Any) -> Servers:
        """URLs and facts of `n` servers on one GPU, with these flags, that are well and idle; boots them if need be, one after the
        other (two at once disturb each other's look at its memory). `fused`: they draw by our sampler."""
        gpu = self.args.engine == "sglang"
        args = gpu_bench.GPU_ARGS | flags | json.loads(self.args.server_args) if gpu else {}
        well = all([await _idle(url) for url, _ in self._up])
        if self._up and (self._args != args or len(self._up) != n or (self._fused and not fused) or not well):
            await self.stop()
        while len(self._up) < n:
            folder = self.scratch / f"server-{len(self.boots)}"
            made = parts.server(
                self.args.engine,
                model,
                folder,
                args=args,
                max_running=max_running,
                gpus=(1,) if gpu else (),  # the trainer takes the first
            )
            url, facts = await self._server.enter_async_context(made)
            self._up.append((url, facts | {"log": next(iter(sorted(folder.rglob("log"))), None)}))
            self._args = args
            self.boots.append({"boot_s": facts["boot_s"], "note": facts["note"], "args": args})
        if fused and not self._fused:
            for url, facts in self._up:
                await fuse(url, facts["inside"])
            self._fused = True
        return self._up

    async def stop(self) -> None:
        self._up, self._fused = [], False
        await self._server.aclose()

    async def run(self, name: str, words: list[str], servers: Servers, limit_s: float) -> dict[str, Any]:
        """One run to its end or its limit, on these servers: how it ended. What it says is read by others."""
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
            VARIABLE: json.dumps({_at(url): facts["inside"] for url, facts in servers}),
        }
        began = time.monotonic()
        with (self.out / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "scripts.bench.gpu_tails_run", "train", *words, *_external(servers)),
                *("--no-save", "--console", "none", "--no-report", "--runs-dir", str(self.scratch / "runs"), "--name", name),
                stdout=log, stderr=log, env=env, cwd=REPO, start_new_session=True,
            )  # fmt: skip
            cut = False
            try:
                await asyncio.wait_for(process.wait(), limit_s)
            except TimeoutError:
                cut = True
            finally:
                await _end(process)
                if self.metrics(name).exists():
                    packed = self.out / f"{name}.metrics.jsonl.gz"
                    packed.write_bytes(gzip.compress(self.metrics(name).read_bytes()))
                said = self.metrics(name).parent / "logs" / "trainer.log"  # why torch compiled again, among others
                if said.exists():
                    (self.out / f"{name}.trainer.log").write_bytes(said.read_bytes()[-100_000:])
        return {"exit": process.returncode, "cut": cut, "seconds": round(time.monotonic() - began, 1)}

    def metrics(self, name: str) -> Path:
        return self.scratch / "runs" / name / "metrics.jsonl"

    def engine_logs(self, name: str) -> list[Path]:
        """Of the SGLang servers that a run booted itself, kept beside its results."""
        logs = sorted((self.scratch / "runs" / name).rglob("boot.*/log"))
        for n, log in enumerate(logs):
            (self.out / f"{name}.engine-{n}.log").write_bytes(log.read_bytes()[-100_000:])
        return logs

    def save(self, values: dict[str, Any]) -> None:
        head = {"task": self.args.task, "command": command(), "engine": self.args.engine, "boots": self.boots}
        text = json.dumps(head | values | {"machine": parts.facts_of_machine()}, indent=1, default=str)
        (self.out / f"{self.args.task}.json").write_text(text)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Politely, then with every process of its session."""
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), ENDING_S)
        except TimeoutError:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    await process.wait()


async def _idle(url: str) -> bool:
    """Whether a server answers, after everything that a run left there was ended and its pause lifted."""
    client = SGLangClient(url, request_deadline_s=20, token_deadline_s=20, control_deadline_s=20)
    try:
        await client.abort_all()
        await client.resume()
        await client.health()
    except Exception as error:  # noqa: BLE001 - whatever it is: the next run gets a server of its own
        print(f"the server is not well: {error}", flush=True)
        return False
    finally:
        await client.close()
    return True


async def run_all(
    b: Bench,
    chosen: Mapping[str, Any],
    one: Callable[[str, Any, float], Awaitable[None]],
    failed: dict[str, str],
    save: Callable[[], None],
) -> None:
    """Each run with its share of the time that is left. One that fails is told, and the server with it given up."""
    waiting = dict(chosen)
    for name, run in chosen.items():
        share_s = b.left_s * run.weight / sum(r.weight for r in waiting.values())
        del waiting[name]
        if b.left_s < 20 + ENDING_S:
            failed[name] = "not begun: no time left"
            continue
        began = time.monotonic()
        try:
            await one(name, run, share_s)
        except Exception as error:  # noqa: BLE001 - the other runs go on
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"[:2000]
            await b.stop()
        save()
        print(f"[{name}] {time.monotonic() - began:.1f} s of {share_s:.0f}; {b.left_s:.0f} left", flush=True)
    await b.stop()


def _external(servers: Servers) -> list[str]:
    """Flags of a run that attaches these; none for one with engines of its own."""
    at = [_at(url) for url, _ in servers]
    if not at:
        return []
    return ["--engine", "external", "--rollout-external-engine-addrs", *at, "--num-generation-workers", str(len(at))]


def _at(url: str) -> str:
    return url.removeprefix("http://")


def tail_of(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]
