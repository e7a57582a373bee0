"""What is installed from a wheel has all that it reads at run time, and nothing that only tests use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.floors.tree import PACKAGES, ROOT


def test_the_wheel_holds_every_file_of_the_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    keep = shutil.ignore_patterns("__pycache__", "*.egg-info", ".venv", "runs", "build")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        at = ROOT / name
        shutil.copytree(at, source / name, ignore=keep) if at.is_dir() else shutil.copy(at, source / name)
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path))
    pip = [sys.executable, "-m", "pip", "wheel", str(source), *flags]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as found:
        inside = {name for name in found.namelist() if not name.partition("/")[0].endswith(".dist-info")}
        found.extractall(tmp_path / "installed")
    wanted = {str(p.relative_to(source)) for name in PACKAGES for p in (source / name).rglob("*") if p.is_file()}
    assert inside == wanted
    code = "import bus.dead, bus.inspect, bus.ledger, miles_async.console.report, sys; print(bus.__file__)"
    run = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); {code}"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.stdout.startswith(str(tmp_path)), done.stderr[-2000:]
