"""One sample under way: the tokens so far, exact to the version that made each, and their saving.

Pure but for `Running.save_due`'s caller: this file only folds chunks. Invariant: tokens, log-probs, mask and spans always
cover the same [0, n).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import msgspec

from actors.generation.engine import Chunk, RouteBroken, VersionUnknown
from actors.generation.standing import NO_TOKENS
from actors.runtime.content import response_fault
from bus.messages.base import EMPTY, Packed, join
from bus.messages.samples import PrefixResume, Response, SampleTask
from bus.messages.versions import PolicyVersion, VersionSpan, extend_spans


class PrefixChunk(msgspec.Struct, frozen=True):
    """Tokens [start, start + n) of a running sample, saved while it runs."""

    start: int
    attempt: int
    tokens: Packed
    logprobs: Packed
    loss_mask: Packed
    spans: tuple[VersionSpan, ...]


_decode_chunk = msgspec.msgpack.Decoder(PrefixChunk).decode


class Running:
    """A sample between lease and commit."""

    def __init__(self, task: SampleTask, base: Response, *, counted: int, has_saved: bool = False) -> None:
        self.task = task
        self.base = base
        self.counted = counted  # tokens that the ledger already knows
        self.saved = base.n_tokens
        self.has_saved = has_saved  # pieces of it lie on the bus
        self.finish: str | None = None
        self.least_step = 0  # of the version that may make the first token
        self.broken = 0  # answers that could not be read
        self._tokens = array("i")
        self._logprobs = array("f")
        self._spans: tuple[VersionSpan, ...] = base.spans
        self._new_spans: tuple[VersionSpan, ...] = ()  # since the last save

    @property
    def n_tokens(self) -> int:
        return self.base.n_tokens + len(self._tokens)

    @property
    def made_here(self) -> int:
        """Tokens made in this process."""
        return len(self._tokens)

    @property
    def remaining(self) -> int:
        return self.task.sampling.max_new_tokens - self.n_tokens

    @property
    def last_version(self) -> int:
        """Version id of the last token."""
        return self._spans[-1].version if self._spans else NO_TOKENS

    def input_ids(self) -> list[int]:
        """Prompt and tokens so far."""
        ids = array("i")
        ids.frombytes(self.task.prompt_tokens)
        ids.frombytes(self.base.tokens)
        return (ids + self._tokens).tolist()

    def take(self, chunk: Chunk, versions: Mapping[str, PolicyVersion]) -> None:
        """Fold one chunk; VersionUnknown when it names a version that no order named, RouteBroken when a peer's engine made it
        that is behind what this sample needs."""
        if chunk.token_ids:
            version = versions.get(chunk.weight_version)
            if version is None:
                raise VersionUnknown(
                    f"engine made tokens under unknown version {chunk.weight_version!r} (known: "
                    f"{', '.join(versions) or 'none'})"
                )
            if version.id < self.last_version or (not self._spans and version.step < self.least_step):
                raise RouteBroken(
                    f"it met version {version.id} of step {version.step} on its way, and needs step {self.least_step} and version "
                    f"{self.last_version} or later ones"
                )
            self._tokens.extend(chunk.token_ids)
            self._logprobs.extend(chunk.logprobs)
            self._spans = extend_spans(self._spans, version, len(chunk.token_ids))
            self._new_spans = extend_spans(self._new_spans, version, len(chunk.token_ids))
        if chunk.finish is not None:
            self.finish = chunk.finish

    def unsaved(self) -> int:
        """Tokens that a crash would lose."""
        return self.n_tokens - self.saved

    def next_chunk(self) -> bytes:
        """What is not saved yet, as a chunk; counts as saved from now on."""
        start = self.saved - self.base.n_tokens
        chunk = PrefixChunk(
            start=self.saved,
            attempt=self.task.attempt,
            tokens=memoryview(self._tokens[start:].tobytes()),
            logprobs=memoryview(self._logprobs[start:].tobytes()),
            loss_mask=memoryview(b"\x01" * (len(self._tokens) - start)),
            spans=self._new_spans,
        )
        self.saved = self.n_tokens
        self.has_saved = True
        self._new_spans = ()
        return msgspec.msgpack.encode(chunk)

    def response(self) -> Response:
        """All tokens so far."""
        return Response(
            tokens=join((self.base.tokens, memoryview(self._tokens.tobytes()))),
            logprobs=join((self.base.logprobs, memoryview(self._logprobs.tobytes()))),
            loss_mask=join((self.base.loss_mask, memoryview(b"\x01" * len(self._tokens)))),
            spans=self._spans,
        )

    def ended(self) -> bool:
        """Whether nothing is left to generate: stop token seen or length used up."""
        if self.remaining <= 0:
            self.finish = self.finish or "length"
            return True
        last = self._tokens[-1:]
        if not last:
            last.frombytes(self.base.tokens[-4:])
        if last and last[0] in self.task.sampling.stop_token_ids:
            self.finish = "stop"  # also when the stream broke off between the stop token and its finish reason
            return True
        return False


def start(message: SampleTask | PrefixResume, pieces: Sequence[bytes], *, mask_prefix: bool) -> Running:
    """A sample from its entry and from what a former owner saved of it, in order, as far as the pieces join."""
    if isinstance(message, PrefixResume):
        task, base, counted = message.task, message.response, message.response.n_tokens
    else:
        task, base, counted = message, Response(tokens=EMPTY, logprobs=EMPTY, loss_mask=EMPTY), 0
    for raw in pieces:
        try:
            chunk = _decode_chunk(raw)
        except msgspec.DecodeError:
            break  # damaged: what follows is made again
        if chunk.start != base.n_tokens or chunk.attempt != task.attempt:
            break
        mask = memoryview(bytes(len(chunk.loss_mask))) if mask_prefix else chunk.loss_mask
        spans = base.spans
        for span in chunk.spans:
            spans = extend_spans(spans, PolicyVersion(id=span.version, step=span.step), span.n)
        longer = Response(
            tokens=join((base.tokens, chunk.tokens)),
            logprobs=join((base.logprobs, chunk.logprobs)),
            loss_mask=join((base.loss_mask, mask)),
            spans=spans,
        )
        if response_fault(longer):
            break
        base = longer
    return Running(task, base, counted=counted, has_saved=bool(pieces))
