"""(pure) Server-sent events from a byte stream cut at arbitrary places. Work is linear in the bytes, however they are cut."""

EVENT_BYTES = 64 << 20  # a cumulative event of a million tokens has about 45 MB


class SseOverflow(ValueError):
    """An event that does not end."""


class SseParser:
    """Feed bytes, get the data of each event that became complete. Lines may end in LF or CRLF; comments and other
    fields are ignored; several data lines of one event are joined by LF. SseOverflow: an event has more than `limit` bytes."""

    __slots__ = ("_cr", "_limit", "_parts", "_size")

    def __init__(self, limit: int = EVENT_BYTES) -> None:
        self._parts: list[bytes] = []  # of the event that is not complete; no blank line in them
        self._size = 0
        self._cr = False  # a CR at the very end may be half of a CRLF: it waits for its LF
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        begins = not self._parts and not self._cr and b"\r" not in data
        if begins and data.find(b"\n") == len(data) - 2 and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            return [data[6:-2]]  # one whole event, as nearly all
        if self._cr:
            data, self._cr = b"\r" + data, False
        if b"\r" in data:
            if data.endswith(b"\r"):
                data, self._cr = data[:-1], True
            data = data.replace(b"\r\n", b"\n")
        if not self._parts:
            *events, rest = data.split(b"\n\n")
        else:
            # The blank line may lie across the border of two pieces.
            if data.startswith(b"\n") and self._parts[-1].endswith(b"\n"):
                head, rest = b"", data[1:]
            elif (end := data.find(b"\n\n")) >= 0:
                head, rest = data[:end], data[end + 2 :]
            else:
                self._hold(data)
                return []
            events = [b"".join((*self._parts, head))]
            self._parts.clear()
            self._size = 0
            *more, rest = rest.split(b"\n\n")
            events += more
        if rest:
            self._hold(rest)
        return [payload for payload in map(_payload, events) if payload is not None]

    def _hold(self, data: bytes) -> None:
        if not data:
            return
        self._size += len(data)
        if self._size > self._limit:
            raise SseOverflow(f"an event of more than {self._limit} bytes")
        if len(data) < 4096 and self._parts and len(self._parts[-1]) < 4096:
            self._parts[-1] += data  # a trickle of bytes takes no list entry each
        else:
            self._parts.append(data)


def _payload(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
