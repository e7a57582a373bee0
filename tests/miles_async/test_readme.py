"""The commands of the README run as they stand there. A new one must be tried here, or the test of their list fails."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.crash.toy import make_toy

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
COMMANDS = [shlex.split(line, comments=True) for line in LINES if line.startswith(("miles-async ", "./"))]
TRAIN = [words[1:] for words in COMMANDS if words[1:2] == ["train"] and "--help" not in words]
HELP = [words[1:] for words in COMMANDS if "--help" in words]
ASKING = ("status", "tune", "ledger", "trace", "doctor", "report")
ON_A_RUN = [words[1:] for words in COMMANDS if len(words) > 1 and words[1] in ASKING]
TAIL = [words[1:] for words in COMMANDS if words[1:3] == ["bus", "tail"]]
ELSEWHERE = {
    "worker": "tests/crash/test_workers.py starts workers, tests/hosts on other hosts",
    "top": "tests/miles_async/test_top.py runs one as a process on a terminal of its own",
    "console": "tests/miles_async/test_web_console.py starts one as a process",
    "shadow": "tests/miles_async/test_cli_shadow.py runs it beside a run and on what one left",
    "whatif": "tests/miles_async/test_whatif.py asks it of a record",
    "stop": "tests/crash/test_detach.py stops runs with and without a launcher",
}


def test_every_command_is_tried_somewhere() -> None:
    left = [w for w in COMMANDS if w[1:] not in [*TRAIN, *HELP, *ON_A_RUN, *TAIL] and not w[0].startswith("./")]
    assert {words[1] for words in left} == set(ELSEWHERE)
    assert len(TRAIN) == 3 and len(ON_A_RUN) == 6, "the list is read from the page"
    for words in COMMANDS:
        assert not words[0].startswith("./") or os.access(ROOT / words[0], os.X_OK)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page's reader has: the configs, a model in DIR, prompts."""
    here = tmp_path_factory.mktemp("desk")
    make_toy(here / "toy").joinpath("model").rename(here / "DIR")
    config = here / "DIR" / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    shape = here / "DIR" / "config.json"  # a dry run looks whether answers fit the model's context
    shape.write_text(json.dumps(json.loads(shape.read_text()) | {"max_position_embeddings": 4096}))
    (here / "configs").symlink_to(ROOT / "configs")
    rows = [{"question": f"{i}+1=", "answer": f"#### {i + 1}"} for i in range(256)]
    (here / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name in ("train.parquet", "test.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), here / name)
    return here


def command(desk: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """It in that folder."""
    return subprocess.run(
        [sys.executable, "-m", "miles_async", *words],
        cwd=desk,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("words", [*TRAIN, *HELP], ids=" ".join)
def test_settings_of_a_train_command_are_accepted(words: list[str], desk: Path) -> None:
    done = command(desk, *words, *([] if "--help" in words else ["--dry-run"]))
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(150)
def test_training_ones_own_model_runs(desk: Path) -> None:
    small = "--num-rollout 1 --rollout-batch-size 2 --rollout-max-response-len 16 --console plain"
    small += " --dynamic-sampling-filter-path none"
    done = command(desk, *TRAIN[0], *small.split())
    assert done.returncode == 0, done.stderr
    assert "finished at step 1" in done.stdout


@pytest.mark.parametrize("words", ON_A_RUN, ids=" ".join)
def test_a_command_about_a_run_answers(words: list[str], whole) -> None:
    whole.tell(lambda story: story.issue("g0000042", n_samples=4))
    whole.ask("tune", "max_weight_staleness=2")  # a value that the page does not set
    status, out, err = whole.ask(*words)
    assert status == 0 and out, err


def test_the_newest_entries_of_a_stream_are_shown(whole) -> None:
    assert whole.ask(*TAIL[0], "--no-follow")[0] == 0
