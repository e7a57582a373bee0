"""A real SGLang server as a child: started on a free port, given a new chance where the failure allows one, watched.

Owns <folder>/boot.NNN, one per attempt. Always true: `start` returns only a server that is ours (it states the label we
gave it), answers /health, and has made a token. What a start had to give up stays given up, and is told.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from actors.generation.engine import BootRefused, EngineUnavailable, RequestRefused
from actors.generation.engines.sglang.args import default_command, sglang_env, sglang_flags
from actors.generation.engines.sglang.boot_failures import Failure, Launch, classify, next_step
from actors.generation.engines.sglang.boot_record import BootRecord, open_record
from actors.generation.engines.sglang.calls import Calls
from actors.generation.engines.sglang.early_kernels import EarlyKernels
from actors.generation.engines.sglang.inside import VARIABLE
from actors.generation.spec import GenerationSpec
from actors.runtime.child import Child, command_line, flag_name, free_port
from bus.errors import MilesAsyncError
from bus.messages.events import EventKind
from bus.private import write_secret

Report = Callable[[EventKind, str, Literal["info", "warning"]], Awaitable[None]]
POLL_S = 0.25
PROBE_S = 30.0
STOP_S = 10.0
PROBE_TOKEN = 1
GREEDY = {"temperature": 0.0}
SAMPLED = ({"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 20})
"""Ways to choose a token. FlashInfer compiles its kernels when a first batch needs them, and no token comes meanwhile. That may
only happen while the server boots: greedy evaluation beside sampled training would be such a batch."""
COMPILING_S = 10.0
COMPILES = "greedy tokens come, sampled ones not yet: SGLang compiles kernels at the first batch that needs them, and keeps them"
DEVICES = Path("/dev")  # nvidia0, nvidia1, ...: the GPUs of this host; none where another driver names them
_ACTORS_OWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # limits of this process, not of a server with GPUs


class SGLangServer:
    """One server, on the spec's `gpus`. `compiling_s`: how long the first sampled tokens may take before that is told. A
    configuration file of the user's own (`config` among the flags) says itself what the server asks of its callers. Where other
    hosts have parts of it no second start is made from here: all parts start anew together, with this worker."""

    def __init__(self, spec: GenerationSpec, folder: Path, report: Report, *, compiling_s: float = COMPILING_S) -> None:
        self._spec = spec
        self._folder = folder
        self._report = report
        self._compiling_s = compiling_s
        self._launch = Launch(sglang_flags(spec), sglang_env(spec))
        self._command = list(spec.server_command or default_command())
        self._token = "" if "config" in self._launch.args else spec.token
        self._child = Child()
        self._kernels = EarlyKernels()
        self._attempts = len(list(folder.glob("boot.*")))
        self._tried = False
        self.note = ""  # of how it runs otherwise than it was asked to
        self.inside: Path | None = None  # folder of the letters to our function inside it (inside.py)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.alive

    async def start(self) -> str:
        """Boot, with every fallback that fits. BootRefused when none is left or none may be tried."""
        await self.stop()
        history: list[Failure] = []
        while True:
            if self._spec.nodes > 1 and self._tried:
                why = history[-1] if history else "while it served"
                raise MilesAsyncError(f"the engine on several hosts ended ({why}): all its parts start anew")
            self._tried = True
            record, outcome = await self._attempt()
            if isinstance(outcome, str):
                if self._launch.degraded:
                    self.note = f"engine degraded: {', '.join(self._launch.degraded)}"
                    text = f"started with {', '.join(self._launch.degraded)} ({record.folder})"
                    await self._report(EventKind.ENGINE_DEGRADED, text, "warning")
                return outcome
            history.append(outcome)
            answer = next_step(self._launch, history, given=frozenset(map(flag_name, self._spec.server_args)))
            if answer.launch is None:
                raise BootRefused(f"SGLang did not start, {outcome}; {answer.why}. {outcome.remedy} Boot folder: {record.folder}")
            text = f"{outcome}; trying {answer.why} (boot folder: {record.folder})"
            await self._report(EventKind.ENGINE_BOOT_FAILED, text, "warning")
            self._launch = answer.launch
            await asyncio.sleep(answer.wait_s)

    async def stop(self) -> None:
        """End the server and every process it started."""
        await self._kernels.stop()
        await self._child.stop(STOP_S)

    async def _attempt(self) -> tuple[BootRecord, str | Failure]:
        """One start: the URL, or why not."""
        self._attempts += 1
        port, label = free_port(), f"boot-{uuid.uuid4().hex[:12]}"
        args = {**self._launch.args, "model-path": self._spec.model_path, "host": "127.0.0.1", "port": port}
        folder = self._folder / f"boot.{self._attempts:03d}"
        if self._token:  # SGLang takes its key as a flag only, which every user of the host could read, or in such a file
            args["config"] = str(folder.absolute() / "api-key.yaml")
        words = command_line(self._command, {**args, "weight-version": label})
        self.inside = folder.absolute()
        changed = {**self._launch.env, **self._visible(), VARIABLE: str(self.inside)}
        inherited = {name: value for name, value in os.environ.items() if name not in _ACTORS_OWN}
        env = {**inherited, "PYTHONUNBUFFERED": "1", **changed}
        record = open_record(folder, words, env, changed=changed, degraded=self._launch.degraded)
        if self._token:
            write_secret(folder / "api-key.yaml", f"api-key: {json.dumps(self._token)}\n")
        try:
            await self._child.start(words, record.log, env)
        except OSError as error:
            failure = Failure("config", f"{words[0]} cannot be run: {error.strerror}")
            record.result("failed", kind=failure.kind, cause=failure.cause)
            return record, failure
        await self._kernels.start(self._command, folder, env)
        url = f"http://127.0.0.1:{port}"
        began = asyncio.get_running_loop().time()
        outcome: str | Failure
        try:
            async with asyncio.timeout(self._spec.boot_deadline_s):
                ended = asyncio.ensure_future(self._child.wait())
                ready = asyncio.ensure_future(self._until_ready(url, label, record))
                try:
                    await asyncio.wait((ended, ready), return_when=asyncio.FIRST_COMPLETED)
                    if ready.done():
                        ready.result()
                        outcome = url
                    else:
                        outcome = classify(record.log_text(), exit_code=self._child.exit_code)
                finally:
                    for task in (ended, ready):
                        task.cancel()
                    await asyncio.gather(ended, ready, return_exceptions=True)
        except TimeoutError:
            outcome = classify(record.log_text(), exit_code=None, timed_out=True)
        except _NotOurs as error:
            outcome = Failure("port", str(error))
        except (EngineUnavailable, RequestRefused) as error:
            outcome = Failure("unknown", str(error))
        seconds = round(asyncio.get_running_loop().time() - began, 2)
        if isinstance(outcome, Failure):
            await self.stop()
            record.result(
                "failed", kind=outcome.kind, cause=outcome.cause, exit_code=outcome.exit_code, seconds=seconds,
                log_tail=record.log_text().splitlines()[-30:],
            )  # fmt: skip
        else:
            await self._kernels.stop()
            record.result("ready", url=url, pid=self._child.pid, seconds=seconds)
        return record, outcome

    async def _until_ready(self, url: str, label: str, record: BootRecord) -> None:
        """Waits for /health, then for the label we gave, then for a token of each kind. The server is then as after a warm-up."""
        async with AsyncExitStack() as open_calls:
            # The boot's own deadline comes before that of the patient ones.
            calls, patient = (Calls(url, deadline_s=s, token=self._token) for s in (PROBE_S, self._spec.boot_deadline_s))
            for each in (calls, patient):
                open_calls.push_async_callback(each.close)
            while not await _healthy(calls):  # noqa: ASYNC110 - another process, no event to wait for
                await asyncio.sleep(POLL_S)
            model = await calls.json("GET", "/model_info")
            if model.get("weight_version") != label:
                raise _NotOurs(f"another server has the port: {url} states weight version {model.get('weight_version')!r}")
            answer = await calls.json("POST", "/generate", _one_token(GREEDY))
            meta = answer.get("meta_info") or {}
            if meta.get("completion_tokens") != 1 or meta.get("weight_version") != label:
                raise EngineUnavailable(f"the first token of {url} is not as asked: {str(meta)[:200]}")
            tokens = asyncio.gather(*(patient.json("POST", "/generate", _one_token(way)) for way in SAMPLED))
            try:
                if not (await asyncio.wait((tokens,), timeout=self._compiling_s))[0]:
                    await self._report(EventKind.ENGINE_COMPILES, f"{COMPILES} (boot folder: {record.folder})", "info")
                await tokens
            finally:
                tokens.cancel()  # the boot may be over first
            # Objects that are alive now stay: Python's collector need not scan them again and again while requests run.
            with suppress(EngineUnavailable):
                await calls.call("POST", "/freeze_gc")

    def _visible(self) -> dict[str, str]:
        """GPU ids are positions in what this process may see. Its own come first: an engine takes as many as it has ranks."""
        gpus = self._spec.gpus
        if not gpus:
            return {}
        wanted = dict.fromkeys((*gpus, *self._spec.maps))
        allowed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        seen = allowed or [str(i) for i in range(len(list(DEVICES.glob("nvidia[0-9]*"))))]
        try:
            return {"CUDA_VISIBLE_DEVICES": ",".join(seen[gpu] if seen else str(gpu) for gpu in wanted)}
        except IndexError:
            there = f"CUDA_VISIBLE_DEVICES={','.join(allowed)}" if allowed else f"this host has {len(seen)}"
            raise BootRefused(
                f"GPUs {list(gpus)} do not exist here: {there}. Correct --rollout-gpu-ids (0: the trainer's first one)."
            ) from None


class _NotOurs(EngineUnavailable):
    """Somebody else's server answers on the port."""


def _one_token(sampling: Mapping[str, float]) -> dict[str, Any]:
    params = {"max_new_tokens": 1, "ignore_eos": True, **sampling}
    return {"input_ids": [PROBE_TOKEN], "sampling_params": params, "return_logprob": True}


async def _healthy(calls: Calls) -> bool:
    try:
        return (await calls.call("GET", "/health"))[0] == 200
    except EngineUnavailable:
        return False
