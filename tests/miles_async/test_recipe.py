"""`train --from-miles recipe.py`: a recipe in Python runs in the sandbox, between stand-ins, and its words are taken."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from miles_async.cli import app, recipe_child
from miles_async.cli.recipe import read_recipe
from miles_async.settings.errors import SettingsError
from miles_async.settings.script import ScriptCommands

RECIPE = '''
import os
from dataclasses import dataclass, field
from typing import Literal

import torch
import typer

import miles.utils.external_utils.command_utils as U
from beside import EXTRA
from lib.shared import rate

os.environ["MADE_OF_TEST"] = "1"


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    mode: Literal["normal", "debug"] = "normal"
    model_name: str = "Small-1B"
    gpus: int | None = None
    hardware: str = "H100"
    wide: bool = False
    lr: float = 1e-6
    names: list = field(default_factory=list)

    def __post_init__(self):
        self.gpus = self.gpus or U.NUM_GPUS_OF_HARDWARE[self.hardware]


def prepare(args):
    U.exec_command_cpu(f"mkdir -p /models && touch {os.environ['MARK_OF_TEST']}")
    U.hf_download_dataset("some/set")
    os.makedirs("/models/x")
    with open("/models/x/notes.yaml", "w") as file:
        file.write("a: 1")


@U.dataclass_cli
def main(args: ScriptArgs):
    prepare(args)
    words = (
        f"--hf-checkpoint /models/{args.model_name} {rate(args.lr)} "
        f"--num-rollout {2 if args.mode == 'debug' else 3000} "
        """--train-env-vars '{"A": "b c"}' """
        f"{EXTRA} {U.get_default_wandb_args(__file__)} "
    )
    if args.wide:
        words += "--use-tis "
    U.execute_train(
        train_args=words, num_gpus_per_node=args.gpus, megatron_model_type="small", config=args,
        train_script="train_async.py", extra_env_vars={"NCCL_DEBUG": "WARN"},
    )


if __name__ == "__main__":
    typer.run(main)
'''


MODEL = """import os


def model_args() -> str:
    return f"--num-layers {os.environ.get('MADE_OF_TEST') or 9} --moe-layer-freq [0,1]"
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a recipe, what it imports, and its model file."""
    for name, text in {
        "scripts/run_it.py": RECIPE,
        "scripts/beside.py": 'EXTRA = "--seed 3"\n',
        "lib/__init__.py": "",
        "lib/shared.py": "def rate(lr):\n    return f'--lr {lr}'\n",
        "scripts/models/small.py": MODEL,
        "train.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("MARK_OF_TEST", str(tmp_path / "mark"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return tmp_path


def read(tree: Path, text: str = "", *arguments: str) -> ScriptCommands:
    path = tree / "scripts" / "run_it.py"
    if text:
        path.write_text(text)
    return read_recipe(path, arguments=arguments)


def test_a_recipe_gives_the_words_that_it_would_launch_with(tree: Path) -> None:
    before = sorted(tree.rglob("*"))
    script = read(tree)
    assert [word.text for word in script.words] == [
        *("--num-layers", "1", "--moe-layer-freq", "[0,1]", "--hf-checkpoint", "/models/Small-1B", "--lr", "1e-06"),
        *("--num-rollout", "3000", "--train-env-vars", '{"A": "b c"}', "--seed", "3"),
    ]  # fmt: skip
    assert not any(word.unread for word in script.words) and script.program == "train_async.py"
    assert {name: word.text for name, word in script.environment.items()} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_DEBUG": "WARN",
    }
    [note] = script.notes
    assert note.startswith("not run: mkdir (line 31)") and "hf_download_dataset" in note and "write /models/x/notes.yaml" in note
    assert sorted(tree.rglob("*")) == before and "MADE_OF_TEST" not in os.environ


def test_a_recipe_is_given_its_arguments_and_its_variables(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILES_SCRIPT_MODEL_NAME", "Other")
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-test")
    told = f"{tree}/scripts/run_it.py --mode debug --wide --lr=2e-5 --extra-env-vars 'A_OF_TEST=1'"
    assert app.main(["train", "--from-miles", told, "--lr", "3", "--dry-run"]) == 2
    out = capsys.readouterr().out
    for line in ("--num-rollout 2 ", "--hf-checkpoint /models/Other ", "--use-tis ", "A_OF_TEST=1 in the environment"):
        assert line in out, out
    assert "--lr 2e-05 " in out and "given on this command line" in out
    assert "--wandb-key ***" in out and "secret-of-test" not in out
    del os.environ["A_OF_TEST"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mode fast", "mode is one of normal, debug, not 'fast'"),
        ("--gpus many", "gpus does not take 'many'"),
        ("--depth 3", "it takes no --depth; it takes --cuda-core-dump,"),
        ("--gpus", "--gpus needs a value"),
    ],
)
def test_an_argument_that_a_recipe_does_not_take_is_one_line(words: str, said: str, tree: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tree, "", *words.split())
    assert said in str(caught.value) and "\n" not in str(caught.value)


HEAD = """import os, sys, subprocess, pathlib
import miles.utils.external_utils.command_utils as U
import typer, torch
import numpy as np
"""
TRAIN = "U.execute_train(train_args=%s, num_gpus_per_node=8, megatron_model_type=None)\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "launches no train"),
        (TRAIN % "'--a'" + TRAIN % "'--b'", "launches 2 trains (line 5, 6)"),
        ("raise ValueError('no\\nsuch model')\n", "launches no train: line 5: ValueError: no such model"),
        ("sys.exit('give a key')\n", "launches no train: it ends with give a key"),
        ("while True: pass\n", "did not come to its end in the sandbox: "),
        ("x = [0] * (1 << 40)\n", "MemoryError"),
        ("os.kill(os.getppid(), 9); os._exit(3)\n", "did not come to its end in the sandbox: exit"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 1))\n", "launches no train: line 6: "),
        ("print(open('/etc/shadow').read())\n", "launches no train: line 5: "),
        ("if torch.cuda.is_available():\n    pass\n", "torch.cuda.is_available() decides, and is not there"),
        ("if np.float32 == 'x':\n    pass\n", "numpy.float32 decides, and is not there"),
        ("def f(:\n", "SyntaxError"),
        ("os.write(1, b'x' * (1 << 23))\n", "did not come to its end in the sandbox: output"),
        (
            "app = typer.Typer()\n@app.command()\ndef prepare(): pass\n@app.command()\ndef full_train(x: int): pass\napp()\n",
            "it has the commands prepare, full-train: name one",
        ),
    ],
)
def test_a_recipe_without_one_launch_is_refused_in_one_line(
    text: str, said: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_async.cli.recipe.DEADLINE_S", 3.0)
    with pytest.raises(SettingsError) as caught:
        read(tree, HEAD + text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_sandbox_a_recipe_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SettingsError, match="which is run in a sandbox alone: the Python sandbox did not start") as caught:
        read(tree)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named_where_it_becomes_a_word(tree: Path) -> None:
    text = (
        HEAD
        + "n = torch.cuda.device_count()\nconf = U.encode_pseudo_file('a: 1')\n"
        + TRAIN % ("f'--lr 1 --rollout-num-gpus {n} --eval-config {conf} --seed 2'")
    )
    script = read(tree, text)
    assert [word.text for word in script.words if not word.unread] == [
        "--lr", "1", "--rollout-num-gpus", "--eval-config", "--seed", "2"
    ]  # fmt: skip
    assert [(word.text, word.unread) for word in script.words if word.unread] == [
        ("<torch.cuda.device_count()>", "torch.cuda.device_count() is not there in the sandbox"),
        ("<a file of the recipe's own>", "a file of the recipe's own is not there in the sandbox"),
    ]


def test_a_file_that_decides_is_looked_for_outside(tree: Path) -> None:
    (tree / "there").mkdir()
    text = (
        HEAD
        + (
            f"here = pathlib.Path({str(tree)!r})\n"
            "found = (here / 'there').is_dir() and not os.path.exists(here / 'gone') and os.path.isfile(here / 'train.py')\n"
        )
        + TRAIN % "f'--found {found}'"
    )
    assert [word.text for word in read(tree, text).words] == ["--found", "True"]


def test_a_command_of_several_takes_its_words(tree: Path) -> None:
    text = (
        HEAD
        + f"""
from typing import Annotated
app = typer.Typer()
@app.callback()
def about(): pass
@app.command()
def prepare(): pass
@app.command("go")
def start(steps: int, name: Annotated[str, typer.Option("--called", "-c")] = "x", fast: bool = typer.Option(True)):
    {TRAIN % "f'--steps {steps * 2} --name {name} --fast {fast}'"}
class Model(torch.nn.Module): pass
subprocess.run(["rm", "-rf", "/"], check=True)
app()
"""
    )
    script = read(tree, text, "go", "4", "-c", "y", "--no-fast")
    assert [word.text for word in script.words] == ["--steps", "8", "--name", "y", "--fast", "False"]
    assert any("rm (line" in note for note in script.notes)


FORGED = "import json, os\nos.write(1, ({!r} + {}).encode())\nos._exit(0)"
FINE = {"line": 1, "words": "--a 1", "program": "train.py", "set": {}, "model": None, "environment": {}}


@pytest.mark.parametrize(
    "said",
    [
        "'{'",
        "'[' * 100000",
        repr(json.dumps({"trains": 5})),
        repr(json.dumps({"trains": [{**FINE, "environment": {"A": 1}}], "said": "", "asked": [], "not_run": []})),
        repr(json.dumps({"trains": [{**FINE, "environment": {"A": "\0"}}], "said": "", "asked": [], "not_run": []})),
        repr(json.dumps({"trains": [{**FINE, "environment": {"A=B": ""}}], "said": "", "asked": [], "not_run": []})),
        repr(json.dumps({"trains": [{**FINE, "words": "--a \0"}], "said": "", "asked": [], "not_run": []})),
    ],
)
def test_an_answer_that_a_recipe_forged_is_refused(tree: Path, said: str) -> None:
    with pytest.raises(SettingsError, match="does not say what it launches"):
        read(tree, FORGED.format(recipe_child.MARK, said))


def test_a_source_that_no_parser_takes_is_told(tree: Path) -> None:
    with pytest.raises(SettingsError, match="launches no train"):
        read(tree, "-" * 200_000 + "1")


def test_the_runs_own_secrets_reach_no_recipe(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_ASYNC_JUDGE_KEY", "zebracrossing")
    with pytest.raises(SettingsError) as told:
        read(tree, "import os\nraise SystemExit(str(os.environ.get('MILES_ASYNC_JUDGE_KEY')))")
    assert "zebracrossing" not in str(told.value)
