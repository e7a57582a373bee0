"""A small server that speaks the Hugging Face Hub's API as huggingface_hub calls it: repositories of files, by revision."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Repos = Mapping[str, Mapping[str, bytes]]
"""`models/OWNER/NAME` or `datasets/OWNER/NAME` -> file -> content."""


def revision_of(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name, body in sorted(files.items()):
        digest.update(name.encode() + body)
    return digest.hexdigest()


@contextmanager
def hub(repos: Repos) -> Iterator[tuple[str, list[str]]]:
    """(address, paths asked for). `repos` may change while it serves; a repository named `.../gated` is gated."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: Mapping[str, str], length: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            asked.append(f"{self.command} {path}")
            words = path.split("/")
            if words[0] == "api":
                kind, owner, name, *rest = words[1:]
                self.api(f"{kind}/{owner}/{name}", rest)
            else:
                kind = "datasets" if words[0] == "datasets" else "models"
                owner, name, _, _, *file = words[1:] if kind == "datasets" else words
                self.file(f"{kind}/{owner}/{name}", "/".join(file))

        do_HEAD = do_GET

        def missing(self, repo: str) -> bool:
            if repo in repos and not repo.endswith("/gated"):
                return False
            gated = repo in repos
            code = {"X-Error-Code": "GatedRepo" if gated else "RepoNotFound", "X-Error-Message": "no"}
            self.answer(403 if gated else 401, b"{}", code)
            return True

        def api(self, repo: str, rest: list[str]) -> None:
            if self.missing(repo):
                return
            files = repos[repo]
            sha = revision_of(files)
            if len(rest) > 1 and rest[0] in ("revision", "tree") and rest[1] not in ("main", sha):
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif rest[:1] == ["tree"]:
                rows = [{"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for n, b in files.items()]
                self.answer(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
            else:
                name = repo.partition("/")[2]
                body = {
                    "id": name,
                    "modelId": name,
                    "sha": sha,
                    "siblings": [{"rfilename": one} for one in files],
                    "private": False,
                }
                self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def file(self, repo: str, file: str) -> None:
            if self.missing(repo):
                return
            files = repos[repo]
            if file not in files:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision_of(files)})
                return
            body = files[file]
            etag = hashlib.sha1(body).hexdigest()
            self.answer(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": revision_of(files), "Accept-Ranges": "bytes"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
