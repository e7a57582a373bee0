"""Try a running inference server: which of the capabilities that runs rest on it has. Writes a record of its release, which runs on
this host read. Nobody may use the server meanwhile; it goes on with its weights and its version."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from miles_async.settings.errors import SettingsError

TOKEN = "MILES_ASYNC_ENGINE_TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `qualify`."""
    parser.add_argument(
        "--engine-url", required=True, metavar="URL", help="Base URL of a running SGLang server or embedded engine."
    )
    parser.add_argument("--out", default="", metavar="FILE", help="Write the record there instead; runs do not read it.")


def run(args: argparse.Namespace) -> int:
    """0: it was tried, whatever it lacks. 2: it could not be."""
    from actors.generation.engines.sglang import qualified
    from actors.generation.engines.sglang.qualify import NotQualified, qualify

    if not args.engine_url.startswith(("http://", "https://")):
        raise SettingsError("no address", field="--engine-url", value=args.engine_url, remedy="Give one as http://HOST:PORT.")
    try:
        record = asyncio.run(qualify(args.engine_url, token=os.environ.get(TOKEN, "")))
    except NotQualified as error:
        raise SettingsError(str(error)) from None
    for name, found in record.capabilities.items():
        print(f"{name:12}{'yes' if found.ok else 'no':5}{found.figure if found.ok else found.why}")
    path = Path(args.out) if args.out else qualified.own_folder() / f"{record.release}.json"
    try:
        qualified.write(record, path)
    except OSError as error:
        raise SettingsError(f"the record cannot be written: {error.strerror}", field="--out", value=str(path)) from None
    print(f"{record.release} on {record.device or 'an unnamed device'}: {path}")
    return 0
