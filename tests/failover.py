"""A primary, its replica, and three sentinels that watch them, as processes on loopback ports; with logins, or by TLS."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bus.server.binary import ServerBinary, find_server

NAME, SECRET, SENTINEL_SECRET = "house", "open-sesame", "look-out"
REPLICA = "ACL SETUSER follower on >follow +psync +replconf +ping"


class Failover:
    """`url`: for clients, with the login of user `trainer` if there are rules for it. `certificate`: of all; they speak TLS."""

    def __init__(self, folder: Path, binary: ServerBinary, *, rights: Sequence[str] = (), certificate: Path | None = None) -> None:
        self._folder, self._binary = folder, str(binary.path)
        self._tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": str(certificate)} if certificate else {}
        self._lines = ["bind 127.0.0.1", "enable-debug-command yes"]
        if certificate is not None:
            self._lines += [f"tls-{n}-file {certificate}" for n in ("cert", "ca-cert")]
            self._lines += [f"tls-key-file {certificate.with_name('key.pem')}", "tls-auth-clients no", "tls-replication yes"]
        self.ports = free_ports(5)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rights, self._secret = " ".join(rights), SENTINEL_SECRET if rights else None
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports[2:])
        query = f"?ssl_ca_certs={certificate}" if certificate else ""
        self.url = f"redis{'s' if certificate else ''}+sentinel://{'trainer@' if rights else ''}{hosts}/{NAME}/0{query}"

    def start(self) -> None:
        """Returns when the sentinels know each other and both servers."""
        server = ['save ""', "maxmemory-policy noeviction", "repl-diskless-sync-delay 0"]
        server += ["masteruser follower", "masterauth follow"]
        for n in (0, 1):
            self._start(f"redis{n}", n, [*server, *([f"replicaof 127.0.0.1 {self.ports[0]}"] if n else ())])
            for rule in (REPLICA, *filter(None, [self._rights])):
                self.server(n).execute_command(*rule.split())
        until("the replica to follow", lambda: self.server(1).info("replication").get("master_link_status") == "up")
        for n in (2, 3, 4):
            watched = [f"sentinel monitor {NAME} 127.0.0.1 {self.ports[0]} 2", f"sentinel down-after-milliseconds {NAME} 1500"]
            login = [f"requirepass {SENTINEL_SECRET}", f"sentinel sentinel-pass {SENTINEL_SECRET}"] if self._secret else []
            self._start(f"sentinel{n}", n, [*login, *watched, f"sentinel failover-timeout {NAME} 3000"], "--sentinel")
        until("the sentinels to see each other", lambda: all(map(self._sees_all, (2, 3, 4))))

    def _start(self, name: str, n: int, lines: Sequence[str], *flags: str) -> None:
        home, port = self._folder / name, self.ports[n]
        home.mkdir()
        ports = ["port 0", f"tls-port {port}"] if self._tls else [f"port {port}"]
        own = [line for line in self._lines if not flags or not line.startswith("enable")]
        (home / "redis.conf").write_text("\n".join([*ports, f"dir {home}", *own, *lines]) + "\n")
        with (home / "log").open("wb") as log:
            words = [self._binary, str(home / "redis.conf"), *flags]
            self._processes.append(subprocess.Popen(words, stdout=log, stderr=log))
        until(f"{name} to answer", lambda: self._answers(n))

    def _answers(self, n: int) -> bool:
        try:
            self.server(n).ping()
        except (redis.ResponseError, redis.AuthenticationError):
            return True  # it asks for a login
        except redis.RedisError:
            return False
        return True

    def server(self, n: int) -> redis.Redis:
        """A client of one of the two, with all rights."""
        return redis.Redis(port=self.ports[n], socket_timeout=2, retry=Retry(NoBackoff(), 0), **self._tls)

    def _sentinel(self, n: int) -> dict[str, Any]:
        with redis.Redis(port=self.ports[n], password=self._secret, socket_timeout=2, **self._tls) as client:
            return dict(client.sentinel_master(NAME))

    def _sees_all(self, n: int) -> bool:
        state = self._sentinel(n)
        return state["num-other-sentinels"] == 2 and state["num-slaves"] == 1

    @property
    def primary(self) -> int:
        """Which of the two the sentinels name: 0 or 1."""
        return self.ports.index(self._sentinel(4)["port"])

    def sever(self) -> None:
        """From now on the replica hears nothing of what is written."""
        for words in ("ACL SETUSER follower off", "CLIENT KILL TYPE replica"):
            self.server(self.primary).execute_command(*words.split())

    def promote(self) -> None:
        """The primary is killed; returns when its replica has taken over."""
        was = self.primary
        self._processes[was].kill()
        self._processes[was].wait(10)
        until("the failover", lambda: self.primary != was and self.server(1 - was).info("replication")["role"] == "master", 30)

    def move(self) -> None:
        """As an operator does it: primary and replica change places."""
        was = self.primary
        with redis.Redis(port=self.ports[-1], password=self._secret, socket_timeout=2, **self._tls) as client:
            client.execute_command("SENTINEL", "FAILOVER", NAME)
        until("the change", lambda: self.primary != was and self._follows(was), 30)

    def _follows(self, n: int) -> bool:
        try:
            return bool(self.server(n).info("replication")["role"] == "slave")
        except redis.ConnectionError:
            return False  # it hangs up on everybody when it becomes one

    def close(self) -> None:
        """End them all."""
        for process in self._processes:
            process.kill()
            process.wait(10)


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens on now."""
    held = [socket.socket() for _ in range(n)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def until(what: str, seen: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll; fails with `what`."""
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


def certificate_in(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that is its own authority; key.pem lies beside it."""
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "1"]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(folder / "key.pem")]
    try:
        subprocess.run([*words, "-out", str(folder / "cert.pem"), *subject], check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return folder / "cert.pem"


@contextmanager
def failover(binary: ServerBinary | None = None, *, rights: Sequence[str] = (), tls: bool = False) -> Iterator[Failover]:
    """See above; gone at the end."""
    with TemporaryDirectory(prefix="ma-sentinel-") as name:
        folder, made = Path(name), None
        try:
            certificate = certificate_in(folder) if tls else None
            made = Failover(folder, binary or find_server(), rights=rights, certificate=certificate)
            made.start()
            yield made
        finally:
            if made is not None:
                made.close()
