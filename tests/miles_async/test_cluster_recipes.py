"""What docs/cluster.md gives to copy: manifests whose commands this release understands, a kit of wheels."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

from miles_async.cli import worker
from miles_async.cli.app import main
from tests.crash.toy import make_toy

ROOT = Path(__file__).parents[2]
MANIFESTS = {file.stem: list(yaml.safe_load_all(file.read_text())) for file in (ROOT / "configs" / "k8s").glob("*.yaml")}
PASSWORD = "MILES_ASYNC_BUS_PASSWORD"


def containers(of: str) -> dict[str, dict[str, Any]]:
    """By name, each with the volumes of its pod."""
    pods = [m["spec"]["template"]["spec"] for m in MANIFESTS[of] if "template" in m.get("spec", {})]
    return {c["name"]: {**c, "pod": pod} for pod in pods for c in pod["containers"]}


def worker_flags(words: list[str]) -> argparse.Namespace:
    """As `miles-async worker` reads them."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    worker.add_arguments(parser)
    return parser.parse_args(words)


def test_the_manifests_go_together() -> None:
    trainer, redis, one = containers("run")["trainer"], containers("run")["redis"], containers("workers")["worker"]
    (service,) = [m for m in MANIFESTS["run"] if m["kind"] == "Service"]
    flags = worker_flags([*one["command"][2:], *one["args"]])
    assert flags.bus_url == f"redis://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for container, name in ((trainer, PASSWORD), (one, PASSWORD), (redis, "PASSWORD")):
        (secret,) = [e["valueFrom"]["secretKeyRef"] for e in container["env"] if e["name"] == name]
        assert secret == {"name": "miles-async-bus", "key": "password"}
        mounted = {m["name"] for m in container["volumeMounts"]}
        claimed = {m["metadata"]["name"] for m in MANIFESTS["run"][2]["spec"]["volumeClaimTemplates"]}
        assert mounted <= {v["name"] for v in container["pod"].get("volumes", [])} | claimed
    for container in (trainer, one):
        (shm,) = [v for v in container["pod"]["volumes"] if v["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory", "where weights lie"


def test_the_recipe_of_the_manifest_passes_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_toy(tmp_path / "toy").joinpath("model").rename(tmp_path / "qwen")
    (tmp_path / "data").mkdir()
    template = tmp_path / "qwen" / "chat_template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (tmp_path / "data" / "train.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 64)
    recipe = next(m for m in MANIFESTS["run"] if m["kind"] == "ConfigMap")["data"]["run.toml"]
    file = tmp_path / "run.toml"
    file.write_text(recipe.replace("/models", str(tmp_path)).replace('"/runs"', f'"{tmp_path}/runs"'))
    command = containers("run")["trainer"]["command"]
    assert command == ["miles-async", "train", "/recipe/run.toml"]
    assert main(["train", str(file), "--dry-run", "--rollout-max-response-len", "16"]) == 0, capsys.readouterr().err


def test_a_kit_installs_a_project_and_what_it_needs_without_a_registry(tmp_path: Path) -> None:
    """The project is built here; what it needs comes as a wheel, as from a registry."""
    pytest.importorskip("setuptools")
    (tmp_path / "registry").mkdir()
    with ZipFile(tmp_path / "registry" / "needed-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("needed.py", "VALUE = 7\n")
        wheel.writestr("needed-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1\n")
        wheel.writestr("needed-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("needed-1.dist-info/RECORD", "")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "whole.py").write_text("import needed\n")
    build = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    about = '[project]\nname = "whole"\nversion = "1"\noptional-dependencies = {more = ["needed"]}\n'
    (tmp_path / "whole" / "pyproject.toml").write_text(f"{build}{about}[tool.setuptools]\npy-modules = ['whole']\n")
    kit = [str(ROOT / "scripts" / "pack_wheels.py"), "kit", "--project", "whole", "--extras", "more", "--"]
    kit += ["--no-build-isolation", "--no-index", "--find-links", "registry"]
    install = ["-m", "pip", "install", "--no-index", "--find-links", "kit", "--target", "node", "whole[more]"]
    for words in (kit, install):
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=50)
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "kit", check=True)
    assert {p.name for p in (tmp_path / "node").glob("*.py")} == {"needed.py", "whole.py"}
