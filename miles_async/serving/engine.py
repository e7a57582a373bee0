"""The embedded engine beside this process, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from actors.runtime.child import PYTHON
from actors.runtime.leftovers import ends_with_us
from miles_async.settings.errors import SettingsError

BOOT_S = 600.0
STOP_S = 10.0
LOOK_S = 0.1


@asynccontextmanager
async def engine_of(directory: Path, *, threads: int) -> AsyncIterator[str]:
    """Its address, once it answers. SettingsError with its own words where it refuses the model, and after BOOT_S."""
    with TemporaryDirectory(prefix="miles-async-") as folder:
        port_file, log = Path(folder) / "port", Path(folder) / "log"
        flags = ["--model-path", str(directory), "--port-file", str(port_file), "--threads", str(threads), "--stream-interval", "1"]
        async with ends_with_us():
            with log.open("wb") as opened:
                process = await asyncio.create_subprocess_exec(
                    *PYTHON, "actors.generation.engines.embedded", *flags, stdin=asyncio.subprocess.DEVNULL, stdout=opened,
                    stderr=opened, env=os.environ.copy(), start_new_session=True,
                )  # fmt: skip
            try:
                await _answers(process, port_file, log)
                yield f"http://127.0.0.1:{port_file.read_text().strip()}"
            finally:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), STOP_S)
                except TimeoutError:
                    process.kill()


async def _answers(process: asyncio.subprocess.Process, port_file: Path, log: Path) -> None:
    """Waits for the port, the process's end, or the deadline."""
    for _ in range(int(BOOT_S / LOOK_S)):
        if port_file.exists():
            return
        if process.returncode is not None:
            said = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            remedy = "Serve it with SGLang or vLLM: miles-async export writes a plain directory."
            raise SettingsError(said.removeprefix("embedded engine: "), remedy=remedy)
        await asyncio.sleep(LOOK_S)
    raise SettingsError(f"the engine does not answer after {BOOT_S:.0f} s", remedy="Give it more --threads, or a smaller model.")
