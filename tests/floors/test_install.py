"""What the scripts install with: uv under pip's configuration, pip itself where that says more than uv is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.floors.tree import ROOT


def told(folder: Path, **configured: str) -> subprocess.CompletedProcess[str]:
    """`uv_settings` under pip's configuration from the environment alone."""
    (folder / ".venv").symlink_to(sys.prefix)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "SSL_"))}
    env |= {"PIP_CONFIG_FILE": os.devnull} | configured
    line = f"set -euo pipefail; source {ROOT}/scripts/lib.sh; eval \"$(uv_settings)\"; env | grep -E '^(UV_|SSL_)'"
    return subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_uv_takes_the_indexes_folders_certificates_and_constraints_of_pip(tmp_path: Path) -> None:
    found = told(
        tmp_path,
        PIP_INDEX_URL="https://me:it's a secret@mirror/simple".replace(" ", "%20"),
        PIP_EXTRA_INDEX_URL="https://one/simple https://two/simple",
        PIP_FIND_LINKS="/wheels /more",
        PIP_CERT="/certs.pem",
        PIP_CONSTRAINT="/constraints.txt",
        PIP_TIMEOUT="60",
    )
    assert sorted(found.stdout.splitlines()) == [
        "SSL_CERT_FILE=/certs.pem",
        "UV_CONSTRAINT=/constraints.txt",
        "UV_DEFAULT_INDEX=https://me:it's%20a%20secret@mirror/simple",
        "UV_FIND_LINKS=/wheels,/more",
        "UV_INDEX=https://one/simple https://two/simple",
    ]


def test_what_only_pip_can_be_told_is_left_to_pip(tmp_path: Path) -> None:
    found = told(tmp_path, PIP_INDEX_URL="https://mirror/simple", PIP_PROXY="http://me@proxy:3128")
    assert found.stdout == ""
