"""The stand-in engine of worker.py: speaks SGLang's HTTP with chunks made beforehand, in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any
from uuid import uuid4

PROMPT_TOKENS, CHUNK, VOCAB = 64, 32, 150_000
PHASES = 16  # of a tick


def framed(data: bytes) -> bytes:
    """One piece of a chunked HTTP body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer_of(tokens: int) -> list[bytes]:
    """All pieces of a streamed answer, as SGLang sends them with --incremental-streaming-output."""
    draw = random.Random(0)
    pieces = []
    for end in range(CHUNK, tokens + 1, CHUNK):
        pairs = [[-draw.random() * 3, draw.randrange(VOCAB), None] for _ in range(CHUNK)]
        meta = {
            "id": uuid4().hex, "finish_reason": {"type": "length", "length": tokens} if end == tokens else None,
            "prompt_tokens": PROMPT_TOKENS, "weight_version": "1", "total_retractions": 0, "completion_tokens": end,
            "cached_tokens": 0, "output_token_logprobs": pairs,
        }  # fmt: skip
        event = {"output_ids": [pair[1] for pair in pairs], "meta_info": meta}
        pieces.append(framed(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"))
    pieces[0] = (
        b"HTTP/1.1 200 OK\r\ndate: Sun, 22 Nov 2026 20:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n" + pieces[0]
    )
    pieces[-1] += framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return pieces


SAID = {
    "model_path": "m", "weight_version": "1", "version": "bench", "stream_interval": 1, "skip_tokenizer_init": True,
    "internal_states": [{}], "tp_size": 1,
}  # fmt: skip


class EngineWire(asyncio.Protocol):
    """One connection to the stand-in: a request at a time, kept alive."""

    def __init__(self, flying: dict[Any, list[bytes]], answers: dict[int, list[bytes]]) -> None:
        self._flying, self._answers = flying, answers
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._flying.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (head := self._rest.find(b"\r\n\r\n")) >= 0:
            lines = self._rest[:head].lower()
            at = lines.find(b"content-length:")
            size = int(lines[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._rest) < head + 4 + size:
                return
            body, self._rest = self._rest[head + 4 : head + 4 + size], self._rest[head + 4 + size :]
            if lines.startswith(b"post /generate "):
                asked = json.loads(body)["sampling_params"]["max_new_tokens"]
                self._flying[self._transport] = list(reversed(self._answers[asked]))
            else:
                text = json.dumps(SAID).encode()
                self._transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
                )


async def serve(port: int, tick_s: float, lengths: list[int]) -> None:
    """Until it is killed."""
    flying: dict[Any, list[bytes]] = {}
    answers = {tokens: answer_of(tokens) for tokens in lengths}
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: EngineWire(flying, answers), "127.0.0.1", port)
    phases = PHASES if tick_s else 1
    for tick in itertools.count():
        began = loop.time()
        for transport, left in list(flying.items()):
            # Chunks are counted from a request's own begin, so they do not all fall into one step of an engine.
            if hash(transport) // 64 % phases == tick % phases and transport.get_write_buffer_size() < 1 << 16:
                transport.write(left.pop())
                if not left:
                    del flying[transport]
        # An engine without pace still steps: its requests get their chunks in turn, not one after the other.
        await asyncio.sleep(max(0.0, began + tick_s / phases - loop.time()) if flying else 0.001)
