"""What is installed from a wheel is enough: it trains from an empty folder. It holds nothing that only tests use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.crash.toy import make_toy
from tests.floors.tree import PACKAGES, ROOT

SMALL = """--rollout-batch-size 2 --n-samples-per-prompt 2 --num-generation-workers 1 --dynamic-sampling-filter-path none --no-save
--skip-eval-before-train"""
SETTINGS = "runs/quickstart/settings.toml"


def test_the_wheel_holds_every_file_of_the_packages_and_trains_from_an_empty_folder(tmp_path: Path) -> None:
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
    wanted = {str(p.relative_to(source)) for name in PACKAGES for p in (source / name).rglob("*") if p.is_file()}
    assert inside == wanted
    target, desk = tmp_path / "target", tmp_path / "desk"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True, timeout=60, cwd=tmp_path)
    desk.mkdir()
    toy = make_toy(tmp_path / "toy") / "model"
    words = ["quickstart", "--hf-checkpoint", str(toy), "--num-rollout", "1", "--console", "plain", *SMALL.split()]
    done = subprocess.run(
        [sys.executable, str(target / "bin" / "miles-async"), *words],
        env={**os.environ, "PYTHONPATH": str(target)}, cwd=desk, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "finished at step 1" in done.stdout
    assert f'prompt_data = "{target}/miles_async/configs/data/arithmetic_train.jsonl"' in (desk / SETTINGS).read_text()
