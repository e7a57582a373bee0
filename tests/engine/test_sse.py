"""Events survive any cut of the byte stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generation.engines.sglang.sse import SseOverflow, SseParser

PAYLOADS = st.lists(st.binary(max_size=30).filter(lambda b: not set(b) & set(b"\r\n")), max_size=8)


@given(PAYLOADS, st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_payloads_come_out_whole_however_the_stream_is_cut(payloads: list[bytes], end: bytes, data: st.DataObject) -> None:
    stream = b"".join(b"data: " + payload + end + end for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    parser = SseParser()
    got: list[bytes] = []
    for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += parser.feed(stream[a:b])
    assert got == payloads


def test_comments_other_fields_and_split_data_lines() -> None:
    parser = SseParser()
    assert parser.feed(b": keep-alive\n\nevent: x\nid: 1\n\n") == []
    assert parser.feed(b"event: x\ndata:a\ndata: b\n\n") == [b"a\nb"]
    assert parser.feed(b"data: half") == []
    assert parser.feed(b" a line\n\n") == [b"half a line"]


@given(PAYLOADS, st.sampled_from([b"\n", b"\r\n"]))
def test_payloads_come_out_whole_byte_by_byte(payloads: list[bytes], end: bytes) -> None:
    stream = b"".join(b"data: " + payload + end + end for payload in payloads)
    parser = SseParser()
    assert [payload for byte in stream for payload in parser.feed(bytes([byte]))] == payloads


def test_an_event_in_many_pieces_is_not_copied_anew_for_each() -> None:
    """60 MB in 15,000 pieces: copied for each of them they are 450 GB, which no test has the time for."""
    parser, piece = SseParser(), b"x" * 4096
    assert not any(parser.feed(b"data: " if at == 0 else piece) for at in range(15_000))
    [whole] = parser.feed(b"\n\n")
    assert len(whole) == 14_999 * 4096


@pytest.mark.parametrize("piece", [b"x", b"x" * 700, b"data: y\n"])
def test_an_event_without_end_is_refused_before_it_fills_the_memory(piece: bytes) -> None:
    parser = SseParser(limit=10_000)
    with pytest.raises(SseOverflow, match="more than 10000 bytes"):
        for _ in range(10_001):
            assert parser.feed(piece) == []
    fine = SseParser(limit=10_000)  # the bound is on one event, not on the stream
    assert sum(len(fine.feed(b"data: " + b"x" * 700 + b"\n\n")) for _ in range(100)) == 100
