"""The folder of one boot attempt: everything needed to see why it failed and to repeat it without us.

Owns <folder>/{attempt.json, log, reproduce.sh}, readable by the owner only. Values of variables that look like secrets are not
written.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

# A login shell's own variables: everything else may be why an engine behaves differently here than by hand.
_ORDINARY = frozenset({"HOME", "LANG", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER", "_", "HOSTNAME", "LS_COLORS"})
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_HIDDEN = "(set, not shown)"
_PACKAGES = (
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "torch",
    "triton",
    "flashinfer_python",
    "transformers",
    "sglang-router",
)


@dataclass(slots=True)
class BootRecord:
    """One attempt on disk. `result` is rewritten when the outcome is known."""

    folder: Path
    facts: dict[str, Any]

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def result(self, outcome: str, **facts: Any) -> None:
        """State how the attempt ended."""
        self.facts |= {"outcome": outcome, **facts}
        self._write()

    def log_text(self) -> str:
        """What the server printed so far."""
        try:
            return self.log.read_text(errors="replace")
        except OSError:
            return ""

    def _write(self) -> None:
        file = self.folder / "attempt.json"
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self.facts), indent=2))
        file.chmod(0o600)


def open_record(
    folder: Path, argv: Sequence[str], env: Mapping[str, str], *, changed: Mapping[str, str], degraded: Sequence[str]
) -> BootRecord:
    """Make the folder of one attempt. `env`: the child's whole environment; `changed`: what we set in it."""
    folder.mkdir(parents=True, exist_ok=True)
    unusual = {name: _shown(name, value) for name, value in sorted(env.items()) if name not in _ORDINARY}
    facts: dict[str, Any] = {
        "outcome": "starting",
        "argv": list(argv),
        "cwd": str(Path.cwd()),
        "environment_set_by_us": dict(changed),
        "environment_beyond_a_login_shell": unusual,
        "visible_gpus": env.get("CUDA_VISIBLE_DEVICES", "(all)"),
        "degraded": list(degraded),
        "versions": versions(),
    }
    record = BootRecord(folder, facts)
    record._write()
    script = folder / "reproduce.sh"
    exports = [f"export {name}={shlex.quote(value)}" for name, value in unusual.items() if value != _HIDDEN]
    script.write_text("\n".join(["#!/bin/sh", f"cd {shlex.quote(str(Path.cwd()))}", *exports, f"exec {shlex.join(argv)}", ""]))
    script.chmod(0o700)
    return record


def versions() -> dict[str, str]:
    """Installed versions of what a server is made of, as this process sees them."""
    found = {"python": platform.python_version(), "executable": sys.executable, "kernel": os.uname().release}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _shown(name: str, value: str) -> str:
    return _HIDDEN if _SECRET.search(name) else value
