"""What a running server can do, tried: each capability that a run rests on, with a figure. No run may use the server meanwhile.

Always true: the server goes on afterwards with the weights and the version it had, unless it died; a check that fails is a
capability that is not there, with its reason, and a server that does not answer ends the qualification without a record.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

from actors.generation.engine import EngineUnavailable, GenerateRequest, PauseMode, RequestRefused
from actors.generation.engines.sglang.attach import describe
from actors.generation.engines.sglang.calls import Calls
from actors.generation.engines.sglang.client import SGLangClient
from actors.generation.engines.sglang.qualified import Capability, Record, is_release
from actors.generation.engines.sglang.sessions import BEGIN, END, UNKNOWN
from bus.errors import MilesAsyncError

CHECK_S = 60.0
QUIET_S = 0.3  # what was under way has arrived
N = 160  # tokens of an answer that something happens to
PROMPT = [5, 9, 33, 2, 17]
CLOSE = 0.1  # |log-prob - teacher-forced|: another batch, another kernel, bfloat16
SINCE = {"sessions": (0, 5, 21), "spans": (0, 5, 19)}
"""From which release on SGLang has it."""


class NotQualified(MilesAsyncError):
    """The server cannot be qualified: one line."""


class Lacks(Exception):
    """A capability that is not there, and why."""


class TriedAnswer:
    """One greedy answer as it comes."""

    def __init__(self, client: SGLangClient, rid: str, n: int = N, prompt: list[int] | None = None, **fields: Any) -> None:
        request = GenerateRequest(rid=rid, input_ids=prompt or PROMPT, max_new_tokens=n, temperature=0.0, **fields)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []
        self.chunks = 0
        self.largest = 1  # tokens of a chunk
        self.finish: str | None = None
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read(client, request))

    async def _read(self, client: SGLangClient, request: GenerateRequest) -> None:
        try:
            async for chunk in client.generate(request):
                self.chunks += 1
                self.largest = max(self.largest, len(chunk.token_ids))
                self.tokens += chunk.token_ids
                self.logprobs += chunk.logprobs
                self.versions += [chunk.weight_version] * len(chunk.token_ids)
                self.finish = chunk.finish
                self._news.set()
        finally:
            self._news.set()

    async def at(self, n: int) -> None:
        """Until `n` tokens are there, or it ended."""
        while len(self.tokens) < n and not self._task.done():
            self._news.clear()
            await self._news.wait()

    async def end(self) -> None:
        await self._task

    def stop(self) -> None:
        self._task.cancel()


class Qualifier:
    """The checks, on one server."""

    def __init__(self, client: SGLangClient, calls: Calls, info: Mapping[str, Any]) -> None:
        self._client, self._calls, self._info = client, calls, info
        self._version = "default"
        self._model = ""
        self._n = N  # tokens of an answer that something happens to: a second of them
        self._long = 8 * N
        self._streams: list[TriedAnswer] = []

    def _start(self, name: str, n: int = 0, **fields: Any) -> TriedAnswer:
        self._streams.append(
            TriedAnswer(self._client, f"qualify-{name}", n or self._n, ignore_eos=fields.pop("ignore_eos", True), **fields)
        )
        return self._streams[-1]

    async def run(self) -> dict[str, Capability]:
        health = await self._client.health()
        self._version, self._model = health.weight_version, health.model_path
        found: dict[str, Capability] = {}
        checks: dict[str, Callable[[], Awaitable[str]]] = {
            "stream": self.stream, "logprobs": self.logprobs, "stop": self.stop, "abort": self.abort, "retract": self.retract,
            "in_place": self.in_place, "pause_abort": self.pause_abort, "boundary": self.boundary, "spans": self.spans,
            "checksums": self.checksums, "sessions": self.sessions,
        }  # fmt: skip
        for name, check in checks.items():
            try:
                async with asyncio.timeout(CHECK_S):
                    found[name] = Capability(ok=True, figure=await check())
            except (Lacks, RequestRefused) as error:
                found[name] = Capability(ok=False, why=" ".join(str(error).split())[:200])
            except TimeoutError:
                found[name] = Capability(ok=False, why=f"not done within {CHECK_S:g} s")
            except EngineUnavailable as error:
                with suppress(EngineUnavailable, RequestRefused):
                    await self._client.resume()
                raise NotQualified(f"the server died, or does not answer, in its qualification ({name}): {error}") from None
            finally:
                for stream in self._streams:
                    stream.stop()
                self._streams.clear()
            await self._restore(name)
        return found

    async def _restore(self, name: str) -> None:
        try:
            await self._client.resume()
            await self._client.set_version(self._version)
        except (EngineUnavailable, RequestRefused) as error:
            raise NotQualified(f"the server could not be put back after {name}: {error}") from None

    async def stream(self) -> str:
        started = asyncio.get_running_loop().time()
        stream = self._start("stream", N)
        await stream.end()
        took_s = asyncio.get_running_loop().time() - started
        if len(stream.tokens) != N or stream.finish != "length":
            raise Lacks(f"{len(stream.tokens)} tokens and the end {stream.finish!r} where {N} were asked")
        if stream.chunks < 2:
            raise Lacks("the answer came in one piece")
        room = int(self._info.get("context_length") or 2048) - 64
        self._n = max(N, min(int(N / took_s), room // 2))
        self._long = max(self._n, min(8 * self._n, room))
        return f"{N} tokens in {stream.chunks} chunks"

    async def logprobs(self) -> str:
        stream = self._start("logprobs", 48)
        await stream.end()
        body = {
            "input_ids": PROMPT + stream.tokens, "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True, "logprob_start_len": len(PROMPT) - 1,
        }  # fmt: skip
        meta = (await self._calls.json("POST", "/generate", body)).get("meta_info") or {}
        try:
            forced = [float(pair[0]) for pair in meta["input_token_logprobs"][-len(stream.tokens) :]]
            apart = max(abs(a - b) for a, b in zip(stream.logprobs, forced, strict=True))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Lacks(f"a prompt is not scored: {type(error).__name__} {error}") from None
        if not apart <= CLOSE:
            raise Lacks(f"{apart:.4f} from a teacher-forced pass, at most {CLOSE}")
        return f"at most {apart:.6f} from a teacher-forced pass of {len(forced)} tokens"

    async def stop(self) -> str:
        first = self._start("first", 1)
        await first.end()
        stream = self._start("stop", 8, ignore_eos=False, stop_token_ids=(first.tokens[0],))
        await stream.end()
        if (stream.tokens, stream.finish) != (first.tokens, "stop"):
            raise Lacks(f"{len(stream.tokens)} tokens and the end {stream.finish!r} where the first is a stop token")
        return "after the stop token, which belongs to the answer"

    async def abort(self) -> str:
        whole, cut = self._start("whole"), self._start("abort", self._long)
        await cut.at(4)
        await self._client.abort("qualify-abort")
        await cut.end()
        made = len(cut.tokens)
        if cut.finish != "abort" or not 4 <= made < self._long:
            raise Lacks(f"{made} tokens and the end {cut.finish!r} of a request that was aborted")
        await whole.end()
        rest = self._start("resume", 16, prompt=PROMPT + cut.tokens)
        await rest.end()
        if len(rest.tokens) != 16:
            raise Lacks(f"its continuation has {len(rest.tokens)} tokens of 16")
        joined = (cut.tokens + rest.tokens)[: self._n]
        same = sum(a == b for a, b in zip(joined, whole.tokens, strict=False))
        return f"ended after {made} tokens and gone on with; {same} of {len(joined)} as without"

    async def _paused(self, mode: PauseMode) -> tuple[TriedAnswer, int]:
        """An answer that stands still, and its tokens so far."""
        stream = self._start(mode)
        await stream.at(8)
        await self._client.pause(mode)
        await asyncio.sleep(QUIET_S)
        made = len(stream.tokens)
        await asyncio.sleep(QUIET_S)
        if len(stream.tokens) != made:
            raise Lacks(f"{len(stream.tokens) - made} tokens came while it was paused")
        return stream, made

    async def retract(self) -> str:
        return await self._goes_on("retract")

    async def in_place(self) -> str:
        return await self._goes_on("in_place")

    async def _goes_on(self, mode: PauseMode) -> str:
        stream, made = await self._paused(mode)
        await self._client.resume()
        await stream.end()
        if len(stream.tokens) != self._n or stream.finish != "length":
            raise Lacks(f"{len(stream.tokens)} of {self._n} tokens and the end {stream.finish!r} after a pause")
        return f"stood still at {made} of {self._n} tokens, went on"

    async def pause_abort(self) -> str:
        stream = self._start("pause", self._long)
        await stream.at(8)
        await self._client.pause("abort")
        await stream.end()
        if stream.finish != "abort":
            raise Lacks(f"a running request ended as {stream.finish!r}")
        return f"ended after {len(stream.tokens)} tokens"

    async def boundary(self) -> str:
        """What runs rely on where `describe` says that a chunk never mixes: what was made before the change is the older version's.
        From outside that is told to within a chunk, which a server may hold back."""
        stream, made = await self._paused("in_place")
        await self._client.set_version("qualify-2")
        await self._client.resume()
        await stream.end()
        old = sum(version == self._version for version in stream.versions)
        if stream.versions != [self._version] * old + ["qualify-2"] * (len(stream.versions) - old):
            raise Lacks(f"versions come as {', '.join(dict.fromkeys(stream.versions))}, not one after the other")
        claims = describe(self._info).exact_in_place
        if made == self._n or not 0 < old < self._n or (claims and not 0 <= old - made < stream.largest):
            raise Lacks(f"{made} tokens were made at the change, {old} are stated as of the version before")
        return f"{old} tokens stated as of the version before, {made} were there" + ("" if claims else "; it claims nothing")

    async def spans(self) -> str:
        """The server's own (SGLang from 0.5.19 on): told at the end of an answer. No run reads them."""
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}}
        meta = (await self._calls.json("POST", "/generate", body)).get("meta_info") or {}
        spans = meta.get("weight_versions")
        if spans is None:
            raise Lacks("it tells none of its own")
        try:
            ends = [(int(span["start"]), int(span["end"])) for span in spans]
        except (KeyError, TypeError, ValueError):
            raise Lacks("they cannot be read") from None
        if not ends or ends[0][0] != 0 or ends[-1][1] != 16 or any(a[1] != b[0] for a, b in pairwise(ends)):
            raise Lacks(f"they do not cover the 16 tokens: {ends}")
        return f"{len(ends)} over 16 tokens"

    async def checksums(self) -> str:
        """Of its tensors, the same after the files it serves were loaded again, which takes a version with them."""
        before = await self._client.weights_checksum()
        if not before:
            raise Lacks("it tells none")
        await self._client.pause("retract")
        await self._client.update_weights_from_disk(self._model, "qualify-3")
        if (said := (await self._client.health()).weight_version) != "qualify-3":
            raise Lacks(f"after an update it states version {said!r}, not the one it was given")
        if await self._client.weights_checksum() != before:
            raise Lacks("they differ after the same files were loaded again")
        return f"{len(before)} tensors, the same after their files"

    async def sessions(self) -> str:
        await self._client.pause("retract")
        await self._calls.call("POST", END, {})  # what somebody left
        status, text = await self._calls.call("POST", BEGIN, {"selector": "all"})
        if status in UNKNOWN:
            raise Lacks("it has none; weights come at any time")
        if status != 200:
            raise Lacks(f"none is opened: {text[:120]}")
        if (again := (await self._calls.call("POST", BEGIN, {"selector": "all"}))[0]) != 400:
            raise Lacks(f"a second one beside the first is answered {again}")
        if (status := (await self._calls.call("POST", END, {}))[0]) != 200:
            raise Lacks(f"its end is answered {status}")
        return "one at a time, ended"


async def qualify(url: str, *, token: str = "", deadline_s: float = 30.0) -> Record:
    """The record of the server at `url`. NotQualified, one line: it cannot be asked, died, or is not the release it says."""
    client = SGLangClient(url, request_deadline_s=CHECK_S, token_deadline_s=CHECK_S, control_deadline_s=deadline_s, token=token)
    calls = Calls(url.rstrip("/"), deadline_s=deadline_s, token=token)
    try:
        info = await client.info()
        release = info.get("version")
        if not isinstance(release, str) or not is_release(release):
            raise NotQualified(f"{url} does not say which release it is ({str(release)[:60]!r}); is this an engine?")
        found = await Qualifier(client, calls, info).run()
        if lie := contradiction(release, found):
            raise NotQualified(f"{url} {lie}; no record is written")
    except (EngineUnavailable, RequestRefused) as error:
        raise NotQualified(str(error)) from None
    finally:
        await client.close()
        await calls.close()
    return Record(release=release, device=str(info.get("device") or ""), by="miles-async qualify", capabilities=found).sealed()


def contradiction(release: str, found: Mapping[str, Capability]) -> str:
    """What a server of that release would have, or would not; empty: nothing (pure)."""
    if not (numbers := re.match(r"(\d+)\.(\d+)\.(\d+)", release)):
        return ""  # no SGLang
    number = tuple(map(int, numbers.groups()))
    for name, since in SINCE.items():
        text = ".".join(map(str, since))
        if name in found and number < since and found[name].ok:
            return f"says it is {release} and has {name}, which SGLang has from {text} on"
        if name in found and number >= since and not found[name].ok and found[name].why.startswith("it "):
            return f"says it is {release} and has no {name}, which SGLang has from {text} on"
    return ""
