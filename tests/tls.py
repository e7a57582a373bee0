"""TLS in front of a real Redis, as a service or stunnel does it: the packaged server is built without."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest


@asynccontextmanager
async def tls_before(socket_path: Path, folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """(port, certificate) of a TLS server on localhost that passes everything on to a unix socket."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "1"]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate), *subject]
    await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(socket_path))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass_on(reader, inner_writer))
                tasks.create_task(_pass_on(inner_reader, writer))
        finally:
            inner_writer.close()
            writer.close()

    server = await asyncio.start_server(serve, "localhost", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1], certificate
    finally:
        server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
