"""(pure) Server-sent events from a byte stream cut at arbitrary places."""


class SseParser:
    """Feed bytes, get the data of each event that became complete. Lines may end in LF or CRLF; comments and other
    fields are ignored; several data lines of one event are joined by LF."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        text = self._rest + data
        if b"\r" in text:
            # A CR at the very end may be half of a CRLF: it waits for its LF.
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        return [payload for payload in map(_payload, events) if payload is not None]


def _payload(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:  # nearly all
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
