"""One turn of the model on this worker's engine, however often the engine, its way or its weights change meanwhile.

Reads  nothing    Owns  whether the engine's answers can be used at all
A turn goes on from the tokens it has: after a weight update that ended its request, on a way that broke, behind an engine that
came back. It ends with its last token, or with the reason why its sample must leave this worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from actors.generation.engine import (
    AnswerBroken,
    AnswerRefused,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
    RouteBroken,
    VersionUnknown,
)
from actors.generation.link import EngineLink
from actors.generation.pace import Pace
from actors.generation.pictures import Changed, Pictures
from actors.generation.sample import ModelTurn, Running, limit_of
from actors.runtime.context import Context
from actors.runtime.faultpoints import fault_point
from actors.runtime.prompts import RoutedShape
from actors.runtime.refusals import Streak
from actors.runtime.seeds import seed_for
from bus import Entry
from bus.errors import Poison
from bus.messages.samples import ParkReason, Sampling

RESENDS = 8  # in a row without a new token; then the sample is parked
AGAIN_S = 0.1  # before a request whose way broke is sent again
MOST_BROKEN = 2  # answers to one sample that cannot be read; one more, and it is poison
MOST_REFUSED, GROUPS_REFUSED = 32, 8  # answers in a row, and groups among them; then it is not the samples

Leaves = ParkReason | Literal["lease", "diverged"]
"""Why a sample leaves: parked, a peer took it over, or its program is begun again."""


class Turns:
    """One worker's. `changed`: to be called when the engine was found dead. `routed`: form of the experts that are asked for.
    `decode`: token ids to text, for stops that are texts."""

    def __init__(
        self,
        context: Context,
        link: EngineLink,
        pace: Pace,
        vocabulary: int,
        changed: Callable[[], None],
        routed: RoutedShape | None = None,
        pictures: Pictures | None = None,
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
    ) -> None:
        self._context = context
        self.decode = decode
        self.worker = context.name
        self._link = link
        self._pace = pace
        self._vocabulary = vocabulary
        self._routed = routed
        self._pictures = pictures or Pictures(context)
        self._changed = changed
        remedy = "The engine serves another model than this worker was told of, or is broken."
        self._answers = Streak(context.clock.monotonic, "the engine's answers", remedy, most=MOST_REFUSED, of=GROUPS_REFUSED)

    async def save(self, entry: Entry, running: Running) -> bool:
        """What the sample got since it was saved last, on the bus; False = a peer has taken it over."""
        context = self._context
        fault_point(context.name, "before_save")
        held = await context.bus.save_prefix(entry, context.name, running.task.sample_id, running.next_chunk())
        fault_point(context.name, "after_save")
        if not held:
            context.count("leases_lost")
        return held

    async def run(
        self,
        entry: Entry,
        running: Running,
        turn: ModelTurn,
        sampling: Sampling,
        more: Callable[[ModelTurn], bool] | None = None,
    ) -> Leaves | None:
        """Stream tokens until the turn ends (None) or the sample must leave (the reason). `more`: called after each chunk; False
        ends the turn there."""
        idle = 0
        while idle <= RESENDS:
            before, limit = len(turn.tokens), limit_of(turn, running, sampling)
            if turn.ended(limit, sampling.stop_token_ids):
                return None
            left = limit - before
            if running.park_at is not None:
                left = min(left, running.park_at - running.n_tokens)
            if left <= 0:
                return running.park_why
            reason = await self._stream(entry, running, turn, sampling, left, more)
            if reason != "again":
                return reason
            idle = 0 if len(turn.tokens) > before else idle + 1
        return "engine"

    async def _stream(
        self,
        entry: Entry,
        running: Running,
        turn: ModelTurn,
        sampling: Sampling,
        max_tokens: int,
        more: Callable[[ModelTurn], bool] | None,
    ) -> Leaves | Literal["again"] | None:
        """One request to the engine. "again": it was ended for a reason that is not the sample's."""
        context, link, pace, task = self._context, self._link, self._pace, running.task
        assert turn.asked is not None
        tokens = turn.asked + turn.tokens.tolist()
        try:
            images = await self._pictures.of(task, tokens) if task.pictures else ()
        except Changed as error:
            if turn.tokens:
                context.log.warning("%s: what it has so far is made again", error)
                return "diverged"
            raise Poison(f"{error}: its prompt cannot be sent as it is") from error
        if images:
            await self._pictures.warn(link.kind.sight)
        await link.until_open()
        engine = link.engine
        if link.leaving or context.draining.is_set():
            return "drain"
        if engine is None or link.absent:
            return "engine"
        request = GenerateRequest(
            rid=task.sample_id,
            input_ids=tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            sampling_seed=sampling.seed if turn.no == 0 else seed_for(sampling.seed, f"turn {turn.no}"),
            extra_key=link.salt or None,
            routing_key=task.group_id,
            vocabulary=self._vocabulary,
            routed=None if task.eval_name else self._routed,
            routed_from=turn.experts.n,
            images=images,
        )
        save_every = int(context.knobs.partial_save_tokens) if running.saves else 0
        finish = None
        pace.asked += 1
        try:
            stream = engine.generate(request)
            async for chunk in stream:
                finish = running.take(turn, chunk, link.versions)
                pace.tokens += len(chunk.token_ids)
                running.count_beside(pace.asked, len(chunk.token_ids))
                if more is not None and not more(turn):
                    turn.finish = "stop"
                    await stream.aclose()
                    return None
                due = finish is None and save_every and running.unsaved() >= save_every
                if due and not await self.save(entry, running):
                    await engine.abort(task.sample_id)
                    return "lease"
        except RouteBroken as error:
            context.count("routes_broken")
            context.log.warning("sample %s is sent again: %s", task.sample_id, error)
            await context.clock.sleep(AGAIN_S)
            return "again"
        except VersionUnknown as error:
            if link.routed:
                return "again"  # a peer's engine is ahead of what we heard, or serves what we never will
            await link.fail(error, of=engine)
            self._changed()
            return "engine"
        except EngineUnavailable as error:
            await link.fail(error, of=engine)
            self._changed()
            return "engine"
        except AnswerRefused as error:
            context.count("answers_refused")
            self._answers.failed(task.group_id, str(error))
            running.broken += isinstance(error, AnswerBroken)
            if isinstance(error, AnswerBroken) and running.broken <= MOST_BROKEN:
                await context.clock.sleep(AGAIN_S)
                return "again"
            raise Poison(f"the engine's answer is refused: {error}") from error
        except RequestRefused as error:
            raise Poison(f"the engine refuses the request: {error}") from error
        finally:
            pace.asked -= 1
        self._answers.worked()
        if finish == "abort":
            if link.leaving or context.draining.is_set():
                return "drain"
            kept = link.resends and context.knobs.pause_generation_mode != "abort"
            return "again" if kept or link.released else "abort"
        if finish == "stop":
            turn.finish = "stop"
        return "again" if finish == "length" else "engine" if finish is None else None
