"""Samples reach a collector as spans: a real HTTP receiver reads them by OpenTelemetry's own schema."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from actors.recorder import trackers, trained
from actors.recorder.otel import HEADERS, headers, traced
from actors.recorder.tracker_kinds import TrackerSpec, opens, sources
from actors.recorder.trackers import PLACES, follow_all
from actors.recorder.trained import append_trained
from miles_async.launcher.place import Place
from miles_async.launcher.plan import recorder_spec
from miles_async.settings.errors import SettingsError
from miles_async.settings.load import settings_from

protobuf = pytest.importorskip("google.protobuf.json_format")
schema = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
MARKS = [["issued", "", 0, 100.0], ["begun", "w0", 0, 101.0], ["parked: drain", "w0", 40, 103.0], ["resumed", "w1", 40, 105.0]]
MARKS += [["delivered again", "w2", 40, 108.0], ["resumed", "w2", 60, 108.0], ["ended", "w2", 90, 110.0]]


def life(sample="g1/0", **other):
    """As trained.jsonl has it."""
    values = {"kind": "trained", "wall": 120.0, "step": 7, "sample": sample, "marks": MARKS, "spans": [[3, 3, 40], [4, 4, 50]]}
    values |= {"finish": "stop", "generate_s": 6.0, "reward": 1.0, "scorer": "math", "score_s": 0.5, "judged": 112.0}
    return values | {"trained": 90, "share": 0.01} | other


class Collector(ThreadingHTTPServer):
    """Takes traces, or answers as told."""

    def __init__(self):
        self.requests, self.headers, self.answers = [], [], []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = self.server.answers.pop(0) if self.server.answers else (200, b"{}")
                if status == 200:
                    self.server.headers.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                    self.server.requests.append(json.loads(body))
                    protobuf.Parse(body, schema.ExportTraceServiceRequest())  # raises for a field that it does not know
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spans(self):
        return [s for r in self.requests for one in r["resourceSpans"] for scope in one["scopeSpans"] for s in scope["spans"]]


@pytest.fixture
def collector():
    server = Collector()
    yield server
    server.shutdown()
    server.server_close()


def spec_of(tmp_path, endpoint, share=1.0):
    s = settings_from(
        hf_checkpoint="builtin:arithmetic", prompt_data="x", num_rollout=1, rm_type="math", name="r", use_tensorboard=False,
        otel_endpoint=endpoint, otel_sample_share=share,
    )  # fmt: skip
    folders = {"run_dir": str(tmp_path), "model_dir": "", "weights_dir": "", "blob_dir": ""}
    return recorder_spec(s, Place(**folders, stop_token_ids=(), num_rollout=1, fingerprint="")).trackers


def sent(tmp_path, spec):
    """Let the collector get what is on record, as one start of a run does; what was said to the operator."""
    said = []
    [follower] = follow_all(opens(spec), tmp_path, lambda text, *, well=False: said.append(text), sources(spec))
    follower.end(True)
    assert follower.join(20)
    return said


def facts(span):
    def value(v):
        [(kind, content)] = v.items()
        if kind == "arrayValue":
            return [value(one) for one in content["values"]]
        return int(content) if kind == "intValue" else content

    return {a["key"].removeprefix("miles_async."): value(a["value"]) for a in span["attributes"]}


def test_a_samples_life_is_one_trace_whose_parts_follow_each_other(tmp_path, collector, monkeypatch):
    monkeypatch.setenv(HEADERS, "authorization=Bearer%20k1,x-team=rl")
    append_trained(tmp_path, [life(), life("g1/1", kind="dropped", marks=[], step=-1, judged=0.0)])
    spec = spec_of(tmp_path, collector.url)
    assert sent(tmp_path, spec) == []
    [(path, told)] = collector.headers
    assert path == "/v1/traces" and told["authorization"] == "Bearer k1" and told["x-team"] == "rl"
    of_one = [s for s in collector.spans() if s["traceId"] == collector.spans()[0]["traceId"]]
    root, *parts = of_one
    times = [(s["name"], int(s["startTimeUnixNano"]) / 1e9, int(s["endTimeUnixNano"]) / 1e9) for s in of_one]
    assert times == [
        ("sample", 100.0, 120.0),
        ("queued", 100.0, 101.0),
        ("generation", 101.0, 103.0),
        ("interrupted", 103.0, 105.0),
        ("lost lease", 105.0, 108.0),
        ("generation", 108.0, 110.0),
        ("scoring", 110.0, 110.5),
        ("judging", 110.5, 112.0),
        ("training", 112.0, 120.0),
    ]
    assert {s["parentSpanId"] for s in parts} == {root["spanId"]} and len({s["spanId"] for s in of_one}) == len(of_one)
    about = facts(root)
    assert (about["sample"], about["group"], about["step"], about["tokens"], about["versions"]) == ("g1/0", "g1", 7, 90, [3, 4])
    assert [facts(s) for s in parts[1:3]] == [{"worker": "w0", "tokens": 40}, {"worker": "w0", "reason": "drain"}]
    assert parts[3]["status"]["code"] == 2
    assert [s["name"] for s in collector.spans() if s not in of_one] == ["sample", "scoring", "judging"]
    assert sent(tmp_path, spec) == [] and len(collector.requests) == 1, "what was sent is not sent again"


def test_clocks_that_differ_make_no_part_end_before_it_began():
    marks = [["issued", "", 0, 100.0], ["begun", "w0", 0, 10.0], ["ended", "w0", 5, 11.0]]
    spans = traced("r", 1.0)(life(marks=marks, judged=99.0, wall=98.0))
    begins, ends = ([int(s[key]) for s in spans] for key in ("startTimeUnixNano", "endTimeUnixNano"))
    assert all(b <= e for b, e in zip(begins, ends, strict=True)) and begins[1:] == sorted(begins[1:])
    assert ends[0] == max(ends) and begins[0] == min(begins)


def test_a_share_of_samples_is_chosen_by_their_ids():
    some, all_of_them = traced("run-1", 0.25), traced("run-1", 1.0)
    ids = [f"g{i}/{j}" for i in range(500) for j in range(4)]
    chosen = [i for i in ids if some(life(i))]
    assert 400 < len(chosen) < 600  # of 2,000, 500 expected; always the same ids
    assert all(all_of_them(life(i)) for i in ids) and not any(traced("run-1", 0.0)(life(i)) for i in ids)
    assert [s["traceId"] for s in some(life(chosen[0]))] == [s["traceId"] for s in all_of_them(life(chosen[0]))]
    assert traced("run-2", 1.0)(life("g0/0"))[0]["traceId"] != all_of_them(life("g0/0"))[0]["traceId"]


def test_a_collector_that_is_away_gets_all_later_and_what_it_refuses_is_counted(tmp_path, collector, monkeypatch):
    monkeypatch.setattr(trackers, "LOOK_S", 0.01)
    monkeypatch.setattr(trackers, "AGAIN_S", 0.01)
    in_part = b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "old"}}'
    collector.answers = [(503, b"busy"), (503, b"busy"), (200, in_part)]
    append_trained(tmp_path, [life()])
    spec, said = spec_of(tmp_path, collector.url), []
    [follower] = follow_all(opens(spec), tmp_path, lambda text, *, well=False: said.append(text), sources(spec))
    deadline = time.monotonic() + 20
    while len(said) < 3:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
    follower.end(True)
    assert follower.join(20)
    url = f"{collector.url}/v1/traces"
    fails = f"otel fails: ConnectionError: {url} answers 503 Service Unavailable. "
    assert said == [
        fails + "The run goes on; it gets what it missed when it works again",
        "otel: 2 spans were refused so far and are dropped: old",
        "otel takes metrics again",
    ]
    collector.answers = [(400, b"")]
    append_trained(tmp_path, [life("g2/0")])
    assert sent(tmp_path, spec) == ["otel: 9 spans were refused so far and are dropped: 400 Bad Request"]
    assert sent(tmp_path, spec) == [], "what was refused is not sent again"


def test_without_a_collector_the_record_waits(tmp_path):
    append_trained(tmp_path, [life()])
    [said] = sent(tmp_path, spec_of(tmp_path, "http://127.0.0.1:1"))
    assert "otel fails: URLError" in said and "refused" in said
    assert not (tmp_path / PLACES).exists()


def test_the_record_is_followed_from_one_file_into_the_next(tmp_path, collector, monkeypatch):
    monkeypatch.setattr(trained, "MOST_BYTES", 1)
    spec = spec_of(tmp_path, collector.url)
    samples = lambda: [facts(s)["sample"] for s in collector.spans() if s["name"] == "sample"]  # noqa: E731
    append_trained(tmp_path, [life("a/0")])
    sent(tmp_path, spec)
    with (tmp_path / trained.FILE).open("ab") as file:
        file.write(msgspec.json.encode(life("a/1")) + b'\n{"kind": "cut')
    append_trained(tmp_path, [life("b/0")])
    sent(tmp_path, spec)
    assert samples() == ["a/0", "a/1", "b/0"]
    for sample in ("c/0", "d/0", "e/0"):
        append_trained(tmp_path, [life(sample)])
    [said] = sent(tmp_path, spec)
    assert "away for longer than trained.1.jsonl lasts" in said
    assert samples()[3:] == ["d/0", "e/0"]


def test_settings_refuse_what_is_no_collector_and_keep_logins_off_the_command_line(tmp_path):
    with pytest.raises(SettingsError, match="otel_endpoint = 'collector:4318': not an http"):
        spec_of(tmp_path, "collector:4318")
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        spec_of(tmp_path, "https://me:hush@collector")
    assert "hush" not in str(refused.value)
    with pytest.raises(ValueError, match="is not NAME=VALUE") as bad:
        headers("Bearer hush")
    assert "hush" not in str(bad.value)
    assert isinstance(spec_of(tmp_path, "http://collector:4318"), TrackerSpec)
