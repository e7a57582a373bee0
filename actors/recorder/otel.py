"""Lives of samples as OpenTelemetry traces: what trained.jsonl says of a sample becomes spans, sent as OTLP/JSON over HTTP.

A trace is one sample, its id made from the run and the sample's: sent twice, it is the same one. Times are those of the record:
each part begins where the one before ended, since hosts' clocks differ and no part can end before it began.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import msgspec

from actors.recorder.records import Record
from bus.errors import UNREADABLE, printable
from bus.messages.samples import Mark

ANSWER_S = 8.0
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"  # NAME=VALUE,...: keys of a collector, which are on no command line
REFUSED = (400, 413, 422)  # what was sent is to blame, and will be next time too
_AFTER = {"begun": "generation", "resumed": "generation", "parked": "interrupted"}
"""What follows a mark, until the next one; else the sample waits in a queue."""

Span = dict[str, Any]


def traced(run_id: str, share: float) -> Callable[[Record], list[Span] | None]:
    """Makes the spans of a record; None for one that is no sample's, or not among the share of samples, chosen by id."""

    def of(record: Record) -> list[Span] | None:
        trace = _hashed(16, run_id, str(record["sample"]))
        if int(trace[16:], 16) >= share * 2**64:
            return None
        return spans_of(record, trace)

    return of


def spans_of(record: Record, trace: str) -> list[Span]:
    """The sample's span first, then its parts in order. A sample that was trained again after a crash has two in its trace. Raises
    KeyError, TypeError or ValueError for a record of another shape."""
    step = record.get("step", -1)
    root = _hashed(8, trace, f"{record['kind']} {step} {record['wall']}")
    parts = list(_parts(record))
    tokens = {"tokens": sum(n for v, _, n in record["spans"] if v >= 0), "turns": record.get("turns", 1)}
    about = {
        "sample": record["sample"],
        "group": record["sample"].rpartition("/")[0],
        "outcome": record["kind"],
        "reward": record["reward"],
        "scorer": record["scorer"],
        "finish": record["finish"],
        "versions": sorted({v for v, _, _ in record["spans"] if v >= 0}),
        "generate_s": record["generate_s"],
        **tokens,
    }
    if record["kind"] == "trained":
        about |= {"step": step, "trained_tokens": record["trained"], "share": record["share"]}
    begin, end = (parts[0][1], parts[-1][2]) if parts else (float(record["wall"]),) * 2
    spans = [_span(trace, root, "", "sample", begin, end, about)]
    for i, (name, begin, end, facts) in enumerate(parts):
        spans.append(_span(trace, _hashed(8, root, str(i)), root, name, begin, end, facts))
    return spans


def _parts(record: Record) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Name, begin and end in seconds, and facts of each part of a sample's life."""
    marks = msgspec.convert(record["marks"], list[Mark])
    now = marks[0].wall if marks else float(record["judged"] if record.get("judged") else record["wall"])
    for mark, after in pairwise(marks):
        what, _, reason = mark.what.partition(": ")
        name, end = _AFTER.get(what, "queued"), max(now, after.wall)
        if after.what == "delivered again":  # who had it is gone, and what he did is not on record
            yield "lost lease", now, end, {}
        elif end > now or name != "queued":
            facts: dict[str, Any] = {"worker": mark.who} if mark.who else {}
            if name == "generation":
                facts["tokens"] = after.tokens - mark.tokens
            yield name, now, end, facts | ({"reason": reason} if reason else {})
        now = end
    scored = now + float(record.get("score_s", 0.0))
    yield "scoring", now, scored, {"scorer": record["scorer"], "reward": record["reward"]}
    judged = max(scored, float(record["judged"] if record.get("judged") else record["wall"]))
    yield "judging", scored, judged, {}
    if record["kind"] == "trained":
        yield "training", judged, max(judged, float(record["wall"])), {"step": record["step"], "tokens": record["trained"]}


def _span(trace: str, span: str, parent: str, name: str, begin: float, end: float, facts: dict[str, Any]) -> Span:
    made: Span = {"traceId": trace, "spanId": span, "parentSpanId": parent, "name": name, "kind": 1}
    made |= {"startTimeUnixNano": str(int(begin * 1e9)), "endTimeUnixNano": str(int(end * 1e9))}
    made["attributes"] = [_attribute(f"miles_async.{key}", value) for key, value in facts.items()]
    if name == "lost lease":
        made["status"] = {"code": 2, "message": "its worker was lost"}
    return made


def _attribute(key: str, value: object) -> dict[str, Any]:
    return {"key": key, "value": _value(value)}


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float) and math.isfinite(value):
        return {"doubleValue": value}
    return {"stringValue": str(value)}


def _hashed(n_bytes: int, *words: str) -> str:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=n_bytes).hexdigest()


class Otlp:
    """A collector, as a tracker. One that cannot be reached is tried again; spans that it refuses are dropped and counted."""

    def __init__(self, endpoint: str, run: str, run_id: str) -> None:
        """`endpoint`: without a path, that of the protocol's is taken. ValueError for headers in another shape."""
        self._url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
        self._headers = {"Content-Type": "application/json"} | headers(os.environ.get(HEADERS, ""))
        facts = {"service.name": "miles_async", "service.instance.id": run_id, "miles_async.run": run}
        self._resource = {"attributes": [_attribute(key, value) for key, value in facts.items()]}
        self.refused, self._tell_at = 0, 1

    def take(self, points: list[list[Span]]) -> str:
        spans = [span for sample in points for span in sample]
        scope = {"scope": {"name": "miles_async.samples"}, "spans": spans}
        body = msgspec.json.encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]})
        try:
            with urlopen(Request(self._url, body, self._headers), timeout=ANSWER_S) as answer:
                n, why = _rejected(answer.read(1 << 20))
        except HTTPError as error:
            with error:
                if error.code not in REFUSED:
                    raise ConnectionError(f"{self._url} answers {error.code} {error.reason}") from None
                n, why = len(spans), f"{error.code} {error.reason}"
        self.refused += n
        if self.refused < self._tell_at:
            return ""
        self._tell_at = 2 * self.refused
        return f"{self.refused} spans were refused so far and are dropped: {why}"

    def close(self, finished: bool) -> None:
        """Nothing is kept open."""


def _rejected(answer: bytes) -> tuple[int, str]:
    """How many spans of a request a collector did not take, and why."""
    try:
        found = msgspec.json.decode(answer)["partialSuccess"]
        return int(found.get("rejectedSpans", 0)), printable(str(found.get("errorMessage", "")))[:200]
    except (*UNREADABLE, KeyError, TypeError, ValueError, AttributeError):
        return 0, ""


def headers(text: str) -> dict[str, str]:
    """NAME=VALUE,..., values with %XX for other signs. ValueError, without the values, for another shape."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(name.strip() and sign for name, sign, _ in pairs):
        raise ValueError(f"{HEADERS} is not NAME=VALUE,NAME=VALUE")
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}
