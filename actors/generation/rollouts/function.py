"""A rollout function written for Miles, which makes whole groups: what it holds, and the address at which it asks the engine.

Owns   the function's process, and the groups that it was given
Always true: a sample that is here stays leased, and leaves by one way: returned (to be scored), left out (dropped as cancelled),
or, when the function fails or its group cannot stay on this worker, back to the bus with its whole group, to be made from its
start. Tokens are known by what they are, so samples of one prompt may change places inside the function. No journal is kept.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from actors.generation.rollouts import Program, Segment, Task, Trajectory, single
from actors.generation.rollouts.adapters import AnsweredCall, answer_of, program_of, sampling_of, trajectory_of
from actors.generation.rollouts.held import HeldGroup, HeldSample, seat_of
from actors.generation.rollouts.programs import LeftOut, ProgramFailed
from actors.generation.spec import GenerationSpec
from actors.runtime.child import PYTHON, Child
from actors.runtime.context import Context
from actors.runtime.deadline import beside, within
from actors.runtime.listener import Listener, http_log
from actors.runtime.miles import Decode, MilesSample
from actors.runtime.prompts import decoder_of
from actors.runtime.refusals import RunEnds, Streak
from actors.runtime.whole import said
from bus.errors import Poison

PATIENCE_S = 5.0  # without a further group; then fewer are given than were asked for
BOOT_S = 120.0  # to load the function's module
PARTS_S = 60.0  # a group some of whose samples do not come is given without them
MOST_FAILED = 3  # in a row
MAX_BODY_BYTES = 1 << 30
Reply = Mapping[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Wrong(Exception):
    """What the function returned, or asks for, cannot be."""


class _Ends:
    """Ends a turn that the function has aborted."""

    blind = True  # it needs not see the tokens

    def __init__(self, rid: str) -> None:
        self.rid, self.asked = rid, False

    def __call__(self, tokens: object) -> bool:
        return self.asked


class RolloutFunction:
    """The program of a worker that has one. `beside`: the program of evaluation samples, which the function does not see.
    `values`: what it finds on `args`. `deadline_s`: its longest time between two calls of ours."""

    resumable = False
    has_deadline = True

    def __init__(
        self, context: Context, path: str, *, beside: Program, values: Callable[[], Mapping[str, Any]], decode: Decode,
        deadline_s: float,
    ) -> None:  # fmt: skip
        self._context, self._path, self._beside, self._values = context, path, beside, values
        self._decode, self._deadline_s = decode, deadline_s
        self._row = Streak(context.clock.monotonic, str(self), "Mend it.", most=MOST_FAILED)
        self._groups: list[HeldGroup] = []
        self._ending: set[_Ends] = set()
        self._left: set[str] = set()  # groups that went elsewhere since the function was called
        self._took = False  # since then
        self._over: RunEnds | None = None
        self._rollout_id = -1
        self._due = math.inf
        self._key, self.url = "", ""
        self._news, self._broken = asyncio.Event(), asyncio.Event()
        self.wanted = 0  # groups that it waits for
        self.why = ""  # it failed last

    def __str__(self) -> str:
        return f"--rollout-function-path {self._path}"

    # -- samples ------------------------------------------------------------------------------------------------

    async def __call__(self, task: Task, session: Any) -> list[Trajectory]:
        """One sample, until the function has done with it."""
        if task.eval_name:
            return await self._beside(task, session)
        if self._over is not None:
            raise self._over
        known = [g for g in self._groups if g.key.partition("~")[0] == task.group_id]
        group = next((g for g in known if not g.taken), None)
        if group is None:
            group = HeldGroup(f"{task.group_id}~{len(known)}" if known else task.group_id)
            self._groups.append(group)
        seat = group.seats[task.index] = HeldSample(task, session, group)
        self._tell()
        try:
            return await seat.done
        finally:
            if seat.done.cancelled() and group in self._groups:
                self._send_away(group, seat)
            for call in seat.calls:
                call.cancel()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _send_away(self, group: HeldGroup, first: HeldSample) -> None:
        """One sample leaves this worker, and with it all of its group."""
        self._groups.remove(group)
        self._left.add(group.key)
        self._context.count("function_groups_left")
        for seat in group.seats.values():
            for call in seat.calls:
                call.cancel()
            if seat is not first:
                seat.session.leave(first.session.reason or "drain")
        self._tell()

    def _close(self, group: HeldGroup, error: Exception) -> None:
        self._groups.remove(group)
        for seat in group.seats.values():
            if not seat.done.done():
                seat.done.set_exception(error)

    # -- the function's process ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled, or the run ends: keeps the process; woken by its end, a failure, or every second by the clock."""
        while self._over is None:
            self._key, self._broken = secrets.token_urlsafe(24), asyncio.Event()
            self._due = self._context.clock.monotonic() + max(BOOT_S, self._deadline_s)
            child, words = Child(), [*PYTHON, "actors.generation.rollouts.function_child", self._path, self.url]
            started = asyncio.ensure_future(child.start_spare(words))
            waits: list[Any] = []
            try:
                await asyncio.shield(started)
                child.order(f"{self._key}\n".encode())
                waits = [ended, _] = [asyncio.ensure_future(child.wait()), asyncio.ensure_future(self._broken.wait())]
                while not any(one.done() for one in waits):
                    if self._context.clock.monotonic() > self._due:
                        late = f"did not return within {self._deadline_s:g} s (--rollout-timeout-s)"
                        self.failed(f"{late}; it waits for {self.wanted} further groups" if self.wanted > 0 else late)
                    await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if not self._broken.is_set():
                    self.failed(f"ended its process with status {ended.result()}")
            finally:
                self._key = ""
                for one in waits:
                    one.cancel()
                stopped = asyncio.ensure_future(_stop(child, started))
                try:
                    await asyncio.shield(stopped)
                finally:
                    await stopped  # also when this is cancelled in the middle of it

    def _extend(self) -> None:
        self._due = self._context.clock.monotonic() + self._deadline_s

    def failed(self, text: str) -> None:
        """What it holds is made again; after so many times in a row the run ends."""
        self.why = text
        self._context.count("programs_failed")
        self._context.log.warning("%s %s", self, text)
        error: Exception = ProgramFailed(f"{self} {text}")
        try:
            self._row.failed("", text)
        except RunEnds as end:
            error = self._over = end
        for group in [g for g in self._groups if g.taken or self._over is not None]:
            self._close(group, error)
        self._broken.set()

    # -- what it asks -------------------------------------------------------------------------------------------

    async def serve(self, http: web.Request) -> web.Response:
        """A question of the function's process, msgpack."""
        key, shown = self._key, http.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
        if not key or not secrets.compare_digest(shown, key.encode()):
            return web.Response(status=401)
        body = await http.read()
        try:
            told = msgspec.msgpack.decode(body)
            answer = await {"next": self._next, "get": self._get, "add": self._add}[http.match_info["verb"]](told)
        except Exception as error:  # noqa: BLE001 - whatever may be wrong with what it made
            text = str(error) if isinstance(error, Wrong | Poison) else said(error)
            self.failed(f"returned what cannot be used: {text}")
        if key != self._key or self._broken.is_set():
            return web.Response(status=409)
        return web.Response(body=msgspec.msgpack.encode(answer, enc_hook=str))

    async def _next(self, told: Reply) -> Any:
        """It has returned, or begins."""
        if "error" in told:
            self.failed(str(told["error"]))
            return None
        if "groups" in told:
            self._take(told["groups"])
            self._row.worked()
        self._left.clear()
        self._took = False
        self._rollout_id = max(self._rollout_id + 1, self._context.version)
        self._extend()
        return {"rollout_id": self._rollout_id, "values": dict(self._values())}

    async def _get(self, told: Reply) -> Any:
        """As many groups as are asked for; fewer when for some time no more come. Time does not count while it holds none."""
        n, key = max(1, int(told["n"])), self._key
        if not any(g.taken for g in self._groups):
            self._due = math.inf
        while True:
            free = [g for g in self._groups if not g.taken]
            some = [g for g in free if g.whole]
            self.wanted = n - len(some)
            if self.wanted <= 0:
                break
            if not await within(PATIENCE_S if some else PARTS_S if free else None, self._news):
                some = some or free
                break
        self.wanted = 0
        self._extend()
        if key != self._key:
            return None
        for group in some[:n]:
            group.taken = self._took = True
        return [[seat.shown() for seat in group.in_order] for group in some[:n]]

    async def _add(self, told: Reply) -> Any:
        """Given back: they come again, as far as they are, before others."""
        for parts in told["groups"]:
            group = self._named(parts)
            if group is None:
                continue
            for seat, part in zip(group.in_order, parts, strict=True):
                seat.filled = {name: value for name, value in part[0].items() if name != "group_index"}
            group.taken = False
            self._groups.remove(group)
            self._groups.insert(0, group)
        self._tell()

    def _named(self, parts: list[list[dict[str, Any]]]) -> HeldGroup | None:
        """The group that these are of; None for one that went elsewhere meanwhile. Raises Wrong."""
        keys = {str(fields["group_index"]) for part in parts for fields in part}
        key = keys.pop() if len(keys) == 1 else None
        if key is None:
            raise Wrong("a group whose samples have more than one group_index")
        if key in self._left:
            return None
        group = next((g for g in self._groups if g.taken and g.key == key), None)
        if group is None:
            raise Wrong(f"group {key!r:.60}, which data_source.get_samples did not give, or which was given back already")
        if len(parts) != len(group.seats):
            raise Wrong(f"{len(parts)} of the {len(group.seats)} samples of group {key}; remove_sample takes one out of training")
        return group

    def _take(self, groups: list[list[list[dict[str, Any]]]]) -> None:
        """What it returned leaves as made; what it holds still was left out. Raises Wrong, Poison."""
        if not self._took and not groups:
            raise Wrong("no group, and asked data_source for none")
        found: list[tuple[HeldSample, list[Trajectory]]] = []
        done: list[HeldGroup] = []
        for parts in groups:
            group = self._named(parts)
            if group is None:
                continue
            if group in done:
                raise Wrong(f"group {group.key} twice")
            done.append(group)
            prompt = group.in_order[0].task.prompt
            alike = sorted((g for g in self._groups if g.in_order[0].task.prompt == prompt), key=lambda g: g is not group)
            turns = [turn for one in alike for seat in one.in_order for turn in seat.turns]
            for seat, part in zip(group.in_order, parts, strict=True):
                found.append((seat, [trajectory_of(MilesSample(**one), seat.task, turns, seat.own) for one in part]))
        for seat, trajectories in found:
            if not seat.done.done():
                seat.done.set_result(trajectories)
        for group in done:
            self._groups.remove(group)
        for group in [g for g in self._groups if g.taken]:
            self._context.count("function_groups_left_out")
            self._close(group, LeftOut())

    # -- the engine, as it sees it ------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.Response:
        """SGLang's /generate: input_ids of one request, or of several."""
        payload = await http.json()
        ids = payload.get("input_ids")
        rid = str(payload.get("rid") or http.headers.get("X-SMG-Routing-Key") or "")
        try:
            if not isinstance(ids, list) or not ids or payload.get("stream"):
                raise Wrong("give input_ids, a list of token ids, and no stream")
            if isinstance(ids[0], list):
                return web.json_response(await asyncio.gather(*(self._answer(one, payload, "") for one in ids)))
            return web.json_response(await self._answer(ids, payload, rid))
        except (Wrong, Poison, msgspec.ValidationError) as error:
            self._context.log.warning("%s asks the engine in vain: %s", self, error)
            return web.json_response({"error": {"message": str(error)}}, status=400)

    async def _answer(self, ids: list[int], payload: Reply, rid: str) -> dict[str, Any]:
        seat = seat_of(ids, rid, [seat for group in self._groups if group.taken for seat in group.in_order])
        if seat is None and not self._left:
            raise Wrong("no sample that get_samples gave begins with these tokens; name the one it is: rid = sample.session_id")
        aborted = answer_of(Segment("model", []), self._decode)
        aborted["meta_info"]["finish_reason"] = {"type": "abort", "message": "its sample went elsewhere"}
        if seat is None:
            return aborted
        ends = _Ends(rid)
        self._ending.add(ends)
        call = asyncio.ensure_future(seat.session.generate(ids, sampling_of(seat.task, payload), watch=ends))
        seat.calls.add(call)
        try:
            await asyncio.wait([call])
        finally:
            seat.calls.discard(call)
            self._ending.discard(ends)
            call.cancel()
        if call.cancelled():
            return aborted
        seat.turns.append(AnsweredCall(ids, call.result(), seat))
        answer = answer_of(call.result(), self._decode)
        if ends.asked:
            answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "as asked"}
        return answer

    async def abort(self, http: web.Request) -> web.Response:
        """SGLang's /abort_request: turns end with what they have."""
        asked = await http.json()
        for ends in self._ending:
            ends.asked = ends.asked or bool(asked.get("abort_all")) or (bool(ends.rid) and ends.rid == asked.get("rid"))
        return web.json_response({})

    async def workers(self, http: web.Request) -> web.Response:
        """The router's lists of engines: this address stands for all."""
        return web.json_response({"urls": [self.url], "workers": [{"url": self.url}]})

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Its address and its process, as long as this is open."""

        @web.middleware
        async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
            listener.admit(request)  # the function's own calls to engines show no key: a whole request will do
            return await handler(request)

        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[admit])
        app.router.add_post("/function/{verb:next|get|add}", self.serve)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        for path in ("/workers", "/list_workers"):
            app.router.add_get(path, self.workers)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, logger=http_log())
        await runner.setup()
        listener = Listener(runner)
        try:
            self.url = f"http://127.0.0.1:{await listener.open('127.0.0.1', 0)}"
            async with beside(self.run()):
                yield
        finally:
            await listener.close()
            await runner.cleanup()


async def _stop(child: Child, started: asyncio.Future[None]) -> None:
    await started
    await child.stop(0.5)


@asynccontextmanager
async def open_function(context: Context, spec: GenerationSpec) -> AsyncIterator[RolloutFunction]:
    """The rollout function that a worker was told of. Raises Refused."""
    decode = decoder_of(spec.model_path)

    def values() -> dict[str, Any]:
        return {**context.knobs.values, **spec.program_values}

    beside = program_of(spec.program, values, decode) if spec.program else single.rollout
    function = RolloutFunction(
        context, spec.rollout_function, beside=beside, values=values, decode=decode, deadline_s=spec.program_deadline_s
    )
    async with function.open():
        yield function
