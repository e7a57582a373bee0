"""One sample under way: its program's calls so far, the tokens of each turn exact to the version that made them, their saving.

Pure: this file only folds chunks and answers. Invariant: tokens, log-probs, mask and spans of a turn always cover the same [0, n).
What it holds is the episode's journal. Parked, it is one response (the tokens of all turns in the order of their calls) with the
list of calls; saved on the bus, it is pieces that each add to some of them. A program that is run again is answered from here.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from actors.generation.engine import Chunk, RouteBroken, VersionUnknown
from actors.generation.routing import Rows
from actors.generation.standing import NO_TOKENS
from actors.runtime.content import response_fault
from bus.errors import UNREADABLE
from bus.ledger import spans_after
from bus.messages.base import Packed, join, pack_ints, unpack_ints
from bus.messages.samples import Call, Mark, ParkReason, PrefixResume, Response, SampleTask, Sampling
from bus.messages.versions import PolicyVersion, VersionSpan, extend_spans, spans_within

Finish = Literal["", "stop", "length"]
MOST_MARKS = 40


class PrefixChunk(msgspec.Struct, frozen=True):
    """What a running sample got since the piece before, saved while it runs: tokens [start, start + n), in the order of `calls`.
    Without calls they belong to one turn, in answer to the task's prompt. `fresh`: what was here before is thrown away."""

    start: int
    attempt: int
    tokens: Packed
    logprobs: Packed
    loss_mask: Packed
    spans: tuple[VersionSpan, ...]
    calls: tuple[Call, ...] = ()
    fresh: bool = False


_decode_chunk = msgspec.msgpack.Decoder(PrefixChunk).decode


def digest_of(*asked: bytes | memoryview) -> bytes:
    """What tells one call from another."""
    found = blake2b(digest_size=8)
    for part in asked:
        found.update(part)
    return found.digest()


class ModelTurn:
    """One answer of the model. `asked`: what it answers; None until the program asks for it again."""

    def __init__(self, no: int, asked: list[int] | None = None, digest: bytes = b"") -> None:
        self.no = no
        self.asked = asked
        self.finish: Finish = ""  # empty while more may come
        self.tokens = array("i")
        self.logprobs = array("f")
        self.spans: tuple[VersionSpan, ...] = ()
        self.resumed_mask = b""  # of tokens that were here at the start; later ones have 1
        self.counted = 0  # tokens that the ledger already knows
        self.experts = Rows()  # of `asked` and tokens
        self.floor = NO_TOKENS  # no older version may make any of it
        self._digest = digest
        self._saved = 0
        self._saved_finish: Finish | None = None

    @property
    def digest(self) -> bytes:
        if not self._digest and self.asked is not None:
            self._digest = digest_of(pack_ints(self.asked))
        return self._digest

    def forget(self) -> None:
        """What it answers, now that it has ended: only its digest is kept, or an episode would hold its history once a turn."""
        self._digest, self.asked = self.digest, None

    @property
    def last_version(self) -> int:
        """Version id of the last token."""
        return self.spans[-1].version if self.spans else NO_TOKENS

    @property
    def mask(self) -> bytes:
        return self.resumed_mask + b"\x01" * (len(self.tokens) - len(self.resumed_mask))

    def take_up(self, call: Call, part: Response, *, counted: bool, mask: bool) -> None:
        """Tokens from before, behind those that are here."""
        self._digest = self._digest or call.digest
        self.resumed_mask += bytes(call.n) if mask else bytes(part.loss_mask)
        self.tokens.frombytes(part.tokens)
        self.logprobs.frombytes(part.logprobs)
        for span in part.spans:
            self.spans = extend_spans(self.spans, PolicyVersion(id=span.version, step=span.step), span.n)
        self.counted += call.n if counted else 0
        self.finish = "stop" if call.finish == "stop" else "length" if call.finish else ""
        self._saved, self._saved_finish = len(self.tokens), self.finish

    def unsaved(self) -> int:
        return len(self.tokens) - self._saved

    def cut(self) -> tuple[Call, Response] | None:
        """What is not saved yet; counts as saved from now on. None = nothing is."""
        at = self._saved
        if at == len(self.tokens) and self.finish == (self._saved_finish or ""):
            return None
        self._saved, self._saved_finish = len(self.tokens), self.finish
        return Call(self.no, self.digest, len(self.tokens) - at, self.finish), self.part(at)

    def part(self, at: int = 0, end: int | None = None) -> Response:
        """Tokens [at, end)."""
        n = len(self.tokens) if end is None else end
        whole = at == 0 and n == len(self.tokens)
        return Response(
            tokens=memoryview(self.tokens[at:n].tobytes()),
            logprobs=memoryview(self.logprobs[at:n].tobytes()),
            loss_mask=memoryview(self.mask[at:n]),
            spans=self.spans if whole else spans_within(self.spans, at, n),
        )

    def ended(self, limit: int, stops: Sequence[int]) -> bool:
        """Whether nothing is left to generate: stop token seen or length used up."""
        if not self.finish and self.tokens and self.tokens[-1] in stops:
            self.finish = "stop"  # also when the stream broke off between the stop token and its finish reason
        if not self.finish and len(self.tokens) >= limit:
            self.finish = "length"
        return bool(self.finish)


class Running:
    """A sample between lease and commit."""

    def __init__(self, task: SampleTask) -> None:
        self.task = task
        self.prompt = unpack_ints(task.prompt_tokens)
        self.turns: dict[int, ModelTurn] = {}
        self.told: dict[int, Call] = {}
        self.n_tokens = 0  # of all turns
        self.made_here = 0  # of these, in this process
        self._beside = self._beside_of = 0  # requests as each token came, summed, and the tokens for which they were counted
        self.thrown = 0  # tokens that the ledger knows and the program began again without
        self.has_saved = False  # pieces of it lie on the bus
        self.saves = True  # whether they are of use to anyone
        self.least_step = 0  # of the version that may make the first token
        self.broken = 0  # answers that could not be read
        self.marks: list[Mark] = []
        self.park_at: int | None = None  # tokens at which it gives its slot to others
        self.park_why: ParkReason = "slice"
        self._saved = 0
        self._fresh = False
        self._untold: list[Call] = []  # answers that are not saved yet

    @property
    def remaining(self) -> int:
        return self.task.sampling.max_new_tokens - self.n_tokens

    @property
    def last_version(self) -> int:
        """The newest version of a finished or running turn."""
        return max([turn.last_version for turn in self.turns.values()], default=NO_TOKENS)

    @property
    def beside(self) -> float | msgspec.UnsetType:
        """Requests that its engine had at once, itself included: mean over the tokens that came here. By tokens, since a token then
        takes in the mean what the engine takes at the mean of what runs."""
        return round(self._beside / self._beside_of, 2) if self._beside_of else msgspec.UNSET

    def count_beside(self, requests: int, n: int) -> None:
        """So many requests its engine had, itself included, when `n` tokens came."""
        self._beside += requests * n
        self._beside_of += n

    @property
    def begun(self) -> bool:
        """Whether any call was answered, wholly or in part."""
        return bool(self.told) or bool([turn for turn in self.turns.values() if turn.tokens])

    def mark(self, what: str, who: str, wall: float) -> None:
        """Note what happens to it; of very many the middle is left out."""
        del self.marks[1:-MOST_MARKS]
        self.marks.append(Mark(what, who, self.n_tokens, int(wall * 1000) / 1000))

    def open(self, no: int, asked: list[int]) -> ModelTurn:
        """A new turn."""
        turn = ModelTurn(no, asked)
        turn.floor = self.last_version
        self.turns[no] = turn
        return turn

    def hand_over(self, no: int, to: Running, at: int) -> None:
        """A turn that was made here becomes turn `at` of another sample."""
        turn = to.turns[at] = self.turns.pop(no)
        turn.no = at
        for one, n in ((self, -len(turn.tokens)), (to, len(turn.tokens))):
            one.n_tokens += n
            one.made_here += n

    def answered(self, call: Call) -> None:
        """The environment has answered."""
        self.told[call.no] = call
        self._untold.append(call)

    def take(self, turn: ModelTurn, chunk: Chunk, versions: Mapping[str, PolicyVersion]) -> str | None:
        """Fold one chunk; returns why the request ended, None when it did not. VersionUnknown when it names a version that no
        order named, RouteBroken when a peer's engine made it that is behind what this sample needs."""
        if chunk.token_ids:
            version = versions.get(chunk.weight_version)
            if version is None:
                raise VersionUnknown(
                    f"engine made tokens under unknown version {chunk.weight_version!r} (known: {', '.join(versions) or 'none'})"
                )
            needed = turn.spans[-1].version if turn.spans else turn.floor
            if version.id < needed or (not self.n_tokens and version.step < self.least_step):
                raise RouteBroken(
                    f"it met version {version.id} of step {version.step} on its way, and needs step {self.least_step} and version "
                    f"{needed} or later ones"
                )
            n = len(chunk.token_ids)
            turn.tokens += array("i", chunk.token_ids)
            turn.logprobs += array("f", chunk.logprobs)
            turn.spans = extend_spans(turn.spans, version, n)
            self.n_tokens += n
            self.made_here += n
        if chunk.experts is not None and turn.asked is not None:
            turn.experts.add(chunk.experts, len(turn.asked) + len(turn.tokens) - 1 - chunk.experts.n)
        return chunk.finish

    def unsaved(self) -> int:
        """Tokens that a crash would lose."""
        return self.n_tokens - self._saved

    def dirty(self) -> bool:
        """Whether a crash would lose anything."""
        ended = any(turn.finish != (turn._saved_finish or "") for turn in self.turns.values())
        return bool(self.unsaved() or self._untold or ended)

    def next_chunk(self) -> bytes:
        """What is not saved yet, as a piece; counts as saved from now on."""
        cuts = [cut for no in sorted(self.turns) if (cut := self.turns[no].cut()) is not None]
        whole = joined([part for _, part in cuts])
        calls = (*(call for call, _ in cuts), *self._untold)
        plain = len(calls) == 1 and self._plain()
        piece = PrefixChunk(
            start=self._saved,
            attempt=self.task.attempt,
            tokens=whole.tokens,
            logprobs=whole.logprobs,
            loss_mask=whole.loss_mask,
            spans=whole.spans,
            calls=() if plain else calls,
            fresh=self._fresh,
        )
        self._saved, self._fresh, self.has_saved = self.n_tokens, False, True
        self._untold.clear()
        return msgspec.msgpack.encode(piece)

    def _plain(self) -> bool:
        """Whether all there is is one turn under way, in answer to the task's prompt."""
        first = self.turns.get(0)
        if first is None or self.told or len(self.turns) > 1 or first.finish:
            return False
        return first.asked is None or first.asked == self.prompt

    def response(self) -> Response:
        """All tokens so far, turn after turn. With experts where there is one turn: those of several are chosen again."""
        whole = joined([self.turns[no].part() for no in sorted(self.turns)])
        first = self.turns.get(0) if self._plain() else None
        return whole if first is None else msgspec.structs.replace(whole, experts=first.experts.routed())

    def journal(self) -> tuple[Call, ...] | msgspec.UnsetType:
        """The calls that go with `response`."""
        if self._plain():
            return msgspec.UNSET
        answered = (turn for turn in self.turns.values() if turn.tokens or turn.finish)
        turns = (Call(turn.no, turn.digest, len(turn.tokens), turn.finish) for turn in answered)
        return tuple(sorted((*turns, *self.told.values()), key=lambda call: call.no))

    def uncounted(self) -> tuple[VersionSpan, ...]:
        """Spans of tokens that the ledger does not know yet."""
        return tuple(span for turn in self.turns.values() for span in spans_after(turn.spans, turn.counted))

    def again(self) -> Running:
        """The same sample from its start, without anything of before."""
        anew = Running(self.task)
        anew.has_saved = anew._fresh = True
        anew.thrown = self.thrown + sum(turn.counted for turn in self.turns.values())
        anew.park_at, anew.park_why, anew.broken, anew.marks = self.park_at, self.park_why, self.broken, self.marks
        return anew

    def take_up(self, response: Response, calls: Sequence[Call], *, counted: bool, mask: bool) -> None:
        """What was made before, by a former owner or here."""
        at = 0
        for call in calls or (Call(0, n=response.n_tokens),):
            if call.answer is not None:
                self.told[call.no] = call
                continue
            turn = self.turns.setdefault(call.no, ModelTurn(call.no, digest=call.digest))
            turn.take_up(call, _slice(response, at, at + call.n), counted=counted, mask=mask)
            at += call.n
        if not calls and response.experts is not msgspec.UNSET:
            self.turns[0].experts.add(response.experts, 0)
        self.n_tokens = self._saved = sum(len(turn.tokens) for turn in self.turns.values())


def start(message: SampleTask | PrefixResume, pieces: Sequence[bytes], *, mask_prefix: bool) -> Running:
    """A sample from its entry and from what a former owner saved of it, in order, as far as the pieces join."""
    running = Running(message.task if isinstance(message, PrefixResume) else message)
    if isinstance(message, PrefixResume):
        running.marks += message.response.marks or ()
    if isinstance(message, PrefixResume) and (message.response.n_tokens or message.journal):
        calls = () if message.journal is msgspec.UNSET else message.journal
        running.take_up(message.response, calls, counted=True, mask=False)
    for raw in pieces:
        try:
            piece = _decode_chunk(raw)
        except UNREADABLE:
            break  # damaged: what follows is made again
        base = running.again() if piece.fresh else running
        if piece.start != base.n_tokens or piece.attempt != base.task.attempt:
            break
        part = Response(tokens=piece.tokens, logprobs=piece.logprobs, loss_mask=piece.loss_mask, spans=piece.spans)
        if response_fault(part) or (piece.calls and sum(call.n for call in piece.calls) != part.n_tokens):
            break
        base._fresh = False
        base.take_up(part, piece.calls, counted=False, mask=mask_prefix)
        running = base
    running.has_saved = bool(pieces)
    return running


def limit_of(turn: ModelTurn, running: Running, sampling: Sampling) -> int:
    """Most tokens that a turn may have."""
    return min(sampling.max_new_tokens, len(turn.tokens) + max(0, running.remaining))


def _slice(response: Response, at: int, end: int) -> Response:
    return Response(
        tokens=response.tokens[4 * at : 4 * end],
        logprobs=response.logprobs[4 * at : 4 * end],
        loss_mask=response.loss_mask[at:end],
        spans=spans_within(response.spans, at, end),
    )


def joined(parts: Sequence[Response]) -> Response:
    """One response of several, without their experts."""
    if len(parts) == 1:
        return parts[0]
    spans: tuple[VersionSpan, ...] = ()
    for part in parts:
        for span in part.spans:
            spans = extend_spans(spans, PolicyVersion(id=span.version, step=span.step), span.n)
    return Response(
        tokens=join(p.tokens for p in parts),
        logprobs=join(p.logprobs for p in parts),
        loss_mask=join(p.loss_mask for p in parts),
        spans=spans,
    )
