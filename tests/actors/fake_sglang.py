"""A stand-in for `python -m sglang.launch_server` that starts in no time and fails as it is told.

FAKE_SGLANG names a JSON list of failures, tried in order. Each: `log` (what it prints), `exit` (status; null: hang), and when
it does not apply: `unless_env` (name=value is set), `unless_flag` ("name" or "name=value" is given), `times` (that
often only). When none applies it serves: /health, /model_info, /server_info, /generate (all but the first only to
who shows the key of its --config file), and writes what it is asked to
sample to <plan>.asked, a line each. No sampled token comes while there is a file <plan>.compiling.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def flags(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word, value in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:]] = "" if value.startswith("--") else value
    return found


def applies(failure: dict[str, Any], given: dict[str, str], plan: Path, number: int) -> bool:
    name, _, value = failure.get("unless_env", "").partition("=")
    if name and os.environ.get(name) == value:
        return False
    name, _, value = failure.get("unless_flag", "").partition("=")
    if name and name in given and (not value or given[name] == value):
        return False
    if "times" in failure:
        counter = plan.with_name(f"{plan.name}.{number}")
        used = int(counter.read_text()) if counter.exists() else 0
        counter.write_text(str(used + 1))
        return used < failure["times"]
    return True


class Handler(BaseHTTPRequestHandler):
    version = ""
    asked: Path
    api_key = ""

    def parse_request(self) -> bool:
        known = super().parse_request()
        shown = self.headers.get("Authorization") if known else None
        if known and self.api_key and self.path != "/health" and shown != f"Bearer {self.api_key}":
            self.send_error(401)
            return False
        return known

    def do_GET(self) -> None:
        self.answer({"weight_version": self.version, "model_path": "m", "stream_interval": 32, "skip_tokenizer_init": True})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/generate":
            with self.asked.open("a") as file:
                file.write(json.dumps(body["sampling_params"]) + "\n")
            while body["sampling_params"]["temperature"] > 0 and self.asked.with_suffix(".compiling").exists():
                time.sleep(0.02)
        meta = {
            "completion_tokens": 1,
            "weight_version": self.version,
            "finish_reason": {"type": "length", "length": 1},
        }
        self.answer({"output_ids": [3], "meta_info": meta})

    def answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


def main() -> None:
    given = flags(sys.argv[1:])
    plan = Path(os.environ["FAKE_SGLANG"])
    print("[fake] loading", flush=True)
    for number, failure in enumerate(json.loads(plan.read_text())):
        if applies(failure, given, plan, number):
            print(failure["log"], flush=True)
            if failure["exit"] is None:
                signal.pause()
            if failure["exit"] < 0:
                os.kill(os.getpid(), -failure["exit"])
            sys.exit(failure["exit"])
    Handler.version = given["weight-version"]
    if "config" in given:  # YAML, of which JSON strings are a part
        name, _, value = Path(given["config"]).read_text().partition(": ")
        Handler.api_key = json.loads(value) if name == "api-key" else ""
    Handler.asked = plan.with_name(f"{plan.name}.asked")
    ThreadingHTTPServer((given["host"], int(given["port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
