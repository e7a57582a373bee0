"""Continuous batching on one thread: admits waiting requests, steps the batch, and serves control commands between
steps.

Owns the model, the batch, the waiting queue and the served version; nobody else touches them. Everything asked from
outside is a function run on this thread between two steps, so a token's version is exact: the version changes only
where no step runs, and tokens made before it are reported (`Progress`) before it. Waits only when idle or paused, for
the next command.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple, TypeVar

import torch

from actors.generation.engines.embedded.batch import Batch
from actors.generation.engines.embedded.config import ModelRefused
from actors.generation.engines.embedded.decoders import Decodes
from actors.generation.engines.embedded.memory import WEIGHTS, Occupation
from actors.generation.engines.embedded.request import ABORTED, ABORTED_WAITING, FinishReason, Progress, Request
from actors.generation.engines.embedded.wire import BadRequest

T = TypeVar("T")

PauseMode = Literal["abort", "retract", "in_place"]
Posted = list[tuple[Request, Progress]]

PATIENCE_STEPS = 3
"""Decode steps a waiting request may be held back so that several prompts share one forward pass."""

JOIN_SHARE = 8
"""... unless at least one eighth as many wait as run."""


class Load(NamedTuple):
    running: int
    waiting: int
    paused: bool
    released: tuple[str, ...]
    """Tags of memory that is given back; no token is made while there is one."""
    version: str
    tokens_per_s: float
    """Over the last second or so of decoding."""
    used_tokens: int
    """Rows times the longest: what `max_total_tokens` limits."""


class Scheduler:
    """Public methods marked [any thread] may be called from anywhere; all others run on the scheduler's thread."""

    def __init__(
        self,
        decoder: Decodes,
        *,
        version: str,
        max_running: int,
        max_total_tokens: int,
        stream_interval: int,
        post: Callable[[Posted], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`post` gets progress to hand out, `on_death` the exception that ended the thread; both are called on it."""
        self._batch = Batch(decoder, max_running, max_total_tokens)
        self._decoder = decoder
        self._memory = Occupation(decoder, self._batch)
        self._version = version
        self._stream_interval = stream_interval
        self._post = post
        self._on_death = on_death
        self._waiting: deque[Request] = deque()
        self._paused: PauseMode | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._held_steps = 0
        self._outbox: Posted = []
        self._meter = _Meter()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)

    # [any thread]

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps; its result or exception arrives in the future. Not run if the future was cancelled
        before its turn: whoever asked has left, and a result for nobody must not end this thread."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - handed to whoever asked
                future.set_exception(error)
            else:
                future.set_result(result)

        self._commands.put(command)
        return future

    def submit(self, request: Request) -> None:
        self._commands.put(lambda: self._waiting.append(request))

    def abort(self, rid: str | None) -> None:
        """End one request, or all with None; what was made so far is delivered. An unknown id is not an error."""
        self._commands.put(lambda: self._abort(rid))

    def close(self, deadline_s: float) -> None:
        """Abort everything and end the thread."""

        def closing() -> None:
            self._abort(None)
            self._closing = True

        self._commands.put(closing)
        self._thread.join(deadline_s)

    # control, through `call`

    def load(self) -> Load:
        return Load(
            len(self._batch.requests),
            len(self._waiting),
            self._paused is not None,
            tuple(sorted(self._memory.released)),
            self._version,
            self._meter.rate,
            len(self._batch.requests) * self._batch.longest(),
        )

    def pause(self, mode: PauseMode) -> None:
        """No token is made until `resume`. retract: rows give up their keys and values, and are computed anew;
        in_place: they keep them; abort: all end with what they have."""
        if mode == "abort":
            self._abort(None)
        elif mode == "retract":
            self._retract_all()
        self._paused = mode

    def resume(self) -> None:
        self._paused = None

    def flush(self) -> bool:
        """True if no request holds keys and values and, unless paused, none waits."""
        if self._batch.requests or (self._waiting and self._paused is None):
            return False
        self._batch.clear()
        return True

    def set_version(self, version: str, abort_all: bool) -> None:
        if abort_all:
            self._abort(None)
        self._report_all()
        self._version = version

    @property
    def version(self) -> str:
        """The served version's label."""
        return self._version

    def look(self, question: Callable[[Decodes], T]) -> T:
        """An answer about the model; nothing changes."""
        self._need_weights()
        return question(self._decoder)

    def update_weights(self, load: Callable[[Decodes], T], version: str | None) -> T:
        """All or nothing (see weights.py). Unless paused in place, no row goes on with keys and values of the old
        weights."""
        self._need_weights()
        loaded = load(self._decoder)
        self._report_all()
        if version is not None:
            self._version = version
        if self._paused != "in_place":
            self._retract_all()
            self._batch.clear()
        return loaded

    def _need_weights(self) -> None:
        """ModelRefused while their memory is given back: reading it would end the process."""
        if WEIGHTS in self._memory.released:
            raise ModelRefused("weights are released, there is no place for new ones; resume them first.")

    def release_memory(self, tags: Sequence[str]) -> None:
        """See Occupation.release. BadRequest while a request runs or waits, paused or not: SGLang 0.5.12 would end there."""
        running, waiting = len(self._batch.requests), len(self._waiting)
        if running or waiting:
            raise BadRequest(
                f"memory is not released beside requests at work ({running} run, {waiting} wait); pause in abort mode first."
            )
        self._memory.release(tags)

    def resume_memory(self, tags: Sequence[str]) -> None:
        """See Occupation.resume."""
        self._memory.resume(tags)

    # the thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._serve_commands()
                    self._step()
                    self._hand_out()
        except Exception as error:  # noqa: BLE001 - told to everyone waiting, then the process ends
            gone: FinishReason = {
                "type": "abort",
                "message": f"engine failed: {error}",
                "status_code": 500,
                "err_type": None,
            }
            for request in (*self._batch.requests, *self._waiting):
                self._end(request, gone)
            self._hand_out()
            self._on_death(error)

    @property
    def _stands(self) -> bool:
        return self._paused is not None or bool(self._memory.released)

    def _serve_commands(self) -> None:
        idle = self._stands or not (self._batch.requests or self._waiting)
        if idle:
            self._meter.stop()
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _step(self) -> None:
        if self._stands or self._closing:
            return
        self._score_prompts()
        if self._waiting and self._may_admit():
            self._finish(self._batch.prefill(self._take_waiting()))
        if not self._batch.requests:
            return
        self._shed()
        self._meter.count(len(self._batch.requests))
        self._finish(self._batch.decode())
        interval = self._stream_interval
        for request in self._batch.requests:
            if request.stream and len(request.tokens) - request.sent >= interval:
                self._report(request)

    def _score_prompts(self) -> None:
        """Requests for no new token want log-probabilities of their prompt: one at a time, without a row of the batch."""
        for request in [r for r in self._waiting if r.limit == 0]:
            self._waiting.remove(request)
            first, prompt = request.score_from, request.prompt
            logps = self._decoder.score(torch.tensor(prompt))[first:].tolist()
            request.input_pairs = [(p, t, None) for p, t in zip((None, *logps), prompt[first:], strict=True)]
            self._end(request, {"type": "length", "length": 0})

    def _may_admit(self) -> bool:
        running = len(self._batch.requests)
        if running >= self._batch.max_rows:
            return False
        self._held_steps += 1
        if running and JOIN_SHARE * len(self._waiting) < running and self._held_steps <= PATIENCE_STEPS:
            return False
        self._held_steps = 0
        return True

    def _take_waiting(self) -> list[Request]:
        """First come, first served, as many as fit with one more token each."""
        rows, longest = len(self._batch.requests), self._batch.longest()
        taken: list[Request] = []
        while self._waiting and rows < self._batch.max_rows:
            longest = max(longest, self._waiting[0].length + 1)
            if rows and not self._batch.cache.fits(rows + 1, longest):
                break
            rows += 1
            taken.append(self._waiting.popleft())
        return taken

    def _shed(self) -> None:
        """Rows outgrew the token budget: those that lose least go back to the head of the queue."""
        while len(self._batch.requests) > 1 and not self._batch.cache.fits(len(self._batch.requests), self._batch.longest()):
            request = min(self._batch.requests, key=lambda r: r.length)
            self._batch.remove(request)
            request.retractions += 1
            self._waiting.appendleft(request)

    def _retract_all(self) -> None:
        rows = self._batch.clear()
        for request in rows:
            request.retractions += 1
        self._waiting.extendleft(reversed(rows))

    def _abort(self, rid: str | None) -> None:
        for request in [r for r in self._batch.requests if rid is None or r.rid == rid]:
            self._batch.remove(request)
            self._end(request, ABORTED)
        for request in [r for r in self._waiting if rid is None or r.rid == rid]:
            self._waiting.remove(request)
            self._end(request, ABORTED if request.tokens else ABORTED_WAITING)

    def _end(self, request: Request, finish: FinishReason) -> None:
        request.finish = finish
        self._report(request)

    def _finish(self, ended: list[Request]) -> None:
        for request in ended:
            self._report(request)

    def _report_all(self) -> None:
        """The boundary before a new version."""
        for request in (*self._batch.requests, *self._waiting):
            if request.stream and len(request.tokens) > request.sent:
                self._report(request)

    def _report(self, request: Request) -> None:
        request.sent = len(request.tokens)
        self._outbox.append((request, Progress(request.sent, self._version, request.finish)))

    def _hand_out(self) -> None:
        if self._outbox:
            posted, self._outbox = self._outbox, []
            self._post(posted)


class _Meter:
    """Tokens per second over windows of about a second of decoding; pauses and idle time do not count."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._tokens = 0
        self._since: float | None = None

    def count(self, tokens: int) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since >= 1.0:
            self.rate = self._tokens / (now - self._since)
            self._since, self._tokens = now, 0
        self._tokens += tokens

    def stop(self) -> None:
        self._since, self._tokens = None, 0
