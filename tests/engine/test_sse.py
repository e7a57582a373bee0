"""Events survive any cut of the byte stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.generation.sse import SseParser

PAYLOADS = st.lists(st.binary(max_size=30).filter(lambda b: not set(b) & set(b"\r\n")), max_size=8)


@given(PAYLOADS, st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_payloads_come_out_whole_however_the_stream_is_cut(
    payloads: list[bytes], end: bytes, data: st.DataObject
) -> None:
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
