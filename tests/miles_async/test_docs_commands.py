"""Every command that README.md and docs/ show is run: on one small run, while it is under way and after its end, or as a dry run.
What cannot be run here stands in ELSEWHERE with its reason, and is read by the command's own parser. One that fits nowhere fails.

Output on a page is compared with what the command prints here: heads of tables, first words of lines, sentences without numbers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from bus import Bus
from bus.topology import POLICY
from miles_async.cli import app
from miles_async.settings.catalog import names, passed_on
from miles_async.settings.errors import SettingsError
from miles_async.settings.miles import table as miles_flags
from tests.crash.conftest import toy
from tests.crash.house import Run, Tables, merged, toml_of, toy_tables, until
from tests.floors.tree import ROOT
from tests.miles_async.docs_house import COMMANDS, PAGES, UNHURRIED, Shown, furnish, labels, parsed, reader_env
from tests.warm.launched import warmed

__all__ = ("toy",)  # a fixture
LIVE: Tables = {
    "rollout": {"num_rollout": 100_000, "rollout_sample_filter_path": "my_hooks.in_no_hurry"},
    "ckpt": {"save_interval": 50},
    "launch": {"console": "plain"},
}
STARTING = ("train", "quickstart")
NOT_DRY = {
    "--multimodal-keys",
    "--lora-adapter-path",
}  # need a model that sees (tests/actors/test_pictures.py), an adapter (tests/trainer/test_lora.py)
HELP = {"--help", "--explain"}
BESIDE = ("worker", "top", "console", "shadow")  # processes of their own beside the run
ELSEWHERE = {
    "top": "without --plain it needs a terminal: tests/miles_async/test_top.py gives it one",
    "convert": "needs megatron-core: tests/megatron/test_convert_command.py converts both ways",
    "ray": "needs a cluster: tests/cluster submits to one",
    "qualify": "needs a server that nobody uses: tests/engine/test_qualify.py tries several",
    "chat": "needs a checkpoint of the last step: tests/miles_async/test_after_training.py asks one",
    "serve-model": "serves until Ctrl-C: tests/miles_async/test_after_training.py calls it by OpenAI's client",
    "export": "as for chat: tests/miles_async/test_after_training.py loads what it wrote",
    "get": "needs a package index: tests/system/test_real_model.py fetches and trains",
}
OTHER_PROGRAMS = {
    "ray": "a cluster's own command: tests/cluster starts one",
    "kubectl": "no Kubernetes here; tests/miles_async/test_cluster_recipes.py reads the manifests",
    "mkdocs": "tests/miles_async/test_site.py builds the site",
    "ulimit": "changes the shell",
}
AFTER_TOO = ("status", "doctor", "ledger", "trace", "samples", "report")
BY_CHANCE = re.compile(
    r"^(starting recorder|run quickstart has|finished at|report:|outlasted|zero_std|dropped: |entry not delivered|worker-|"
    r"group kept|valkey|of them are trained)"
)
"""What a page shows and another run need not print: other settings, another end, drops, a checkpoint just now."""


def ours(*, inline: bool = True) -> dict[tuple[str, ...], Shown]:
    """By their words: what the pages show more than once is run once, compared with what is shown anywhere."""
    found: dict[tuple[str, ...], Shown] = {}
    for command in COMMANDS:
        if command.words and (inline or not command.inline) and not (command.words in found and not command.output):
            found[command.words] = command
    return found


def test_every_command_is_understood_by_its_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name in the text is a mention; a flag or an argument more is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("python3 train.py --num-rollout 3\n")
    refused = []
    for words, command in ours().items():
        try:
            parsed(words)
        except SettingsError as error:
            mention = command.inline and re.search("arguments are required|expected one argument", str(error))
            if "<TAB>" not in command.line and not mention:
                refused.append(f"{command}: {error}")
    assert len(ours()) > 90 and refused == []


FOREIGN = {
    "SGLang": "custom-weight-loader disable-fast-image-processor disable-radix-cache "
    "enable-deterministic-inference enable-memory-saver enable-prefill-delayer "
    "enable-return-routed-experts enable-weights-cpu-backup dist-init-addr",
    "Miles": "async-max-concurrent-samples async-unused-samples-handler",
    "Redis": "appendonly bind maxmemory-policy requirepass",
    "Ray, torchrun": "address head num-gpus max-restarts",
    "Slurm": "array gres requeue signal",
    "kubectl": "from-literal replicas",
    "pip": "find-links no-index",
    "nobody, as an example of a typing error": "rollout-bach-size",
}


def test_every_flag_that_a_page_names_exists() -> None:
    """docs/results.md tells of runs as they were."""
    folders = ("miles_async", "actors", "scripts")
    code = "".join(file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    known = {f"--{name}" for line in FOREIGN.values() for name in line.split()}
    known |= set(re.findall(r"""["'](--[a-z][a-z0-9-]*)=?["']""", code)) | {flag for flag, _ in miles_flags()}
    known |= {f"--{no}{name.replace('_', '-')}" for name in names() for no in ("", "no-")}
    flag = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*+(?:-[a-z0-9]++)*+(?!-)")  # not --sglang-NAME and --async-*
    unknown = {
        f"{page}: {found}"
        for page, text in PAGES.items()
        if page != "results.md"
        for found in flag.findall(text)
        if found not in known and not passed_on(found)
    }
    assert unknown == set()


def test_settings_of_every_train_command_are_accepted(
    tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, toy, toml_of(toy_tables(toy, tmp_path)))
    (tmp_path / "run.sh").write_text(
        "python3 train.py --hf-checkpoint DIR --prompt-data data.jsonl --input-key question --rm-type math --num-rollout 3 "
        "--n-samples-per-prompt 8"
    )
    wrong = []
    for words, command in ours().items():
        if words[0] not in STARTING or len(words) == 1 or "<TAB>" in command.line or NOT_DRY.intersection(words):
            continue
        status = app.main([*words, *(() if HELP.intersection(words) else ("--dry-run",))])
        said = capsys.readouterr()
        if status != 0:
            wrong.append(f"{command}: {said.err}")
        if HELP.intersection(words) and not labels(command.output) <= labels(said.out):
            wrong.append(f"{command}: prints {said.out}")
    assert wrong == []


def test_commands_of_other_programs_are_there(tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in COMMANDS:
        if command.words:
            continue
        program, *words = command.line.split() if command.line.endswith('"') else shlex.split(command.line, comments=True)
        if program.endswith(".sh"):
            assert os.access(ROOT / program, os.X_OK), command
        elif program.endswith(("python", "python3")) and words[0] == "-m":
            assert find_spec(words[1]), command
        elif program.endswith(("python", "python3")) and words[0] != "-c":
            source = (ROOT / words[0]).read_text()
            assert [word for word in words[1:] if re.match(r"--\S+$", word) and f'"{word}"' not in source] == [], command
        elif program == "pip":
            asked = re.findall(r"miles-async\[([\w,]+)\]", command.line)
            assert asked and {extra for found in asked for extra in found.split(",")} <= extras.keys(), command
        else:
            assert program in (*OTHER_PROGRAMS, "python", "redis-cli", "redis-server"), command


def test_redis_is_started_and_asked_as_written(tmp_path: Path) -> None:
    """On a socket in place of all addresses; by the packaged server and a client of ours where there is no Redis."""
    [start] = [c.line for c in COMMANDS if c.line.startswith("redis-server --")]
    asked = {c.line for c in COMMANDS if c.line.startswith("redis-cli ") and " -s " not in c.line}
    socket = tmp_path / "redis.sock"
    env = {**reader_env(tmp_path), "MILES_ASYNC_BUS_PASSWORD": "secret", "REDISCLI_AUTH": "secret"}
    words = f"exec {start} --port 0 --unixsocket {socket} --dir {tmp_path}"
    with subprocess.Popen(words, shell=True, env=env, stdout=subprocess.DEVNULL) as server:
        try:
            until("Redis", socket.exists, seconds=30)
            for line in asked:
                words = line.replace("redis-cli", f"redis-cli -s {socket}")
                answer = subprocess.run(words, shell=True, env=env, capture_output=True, text=True, timeout=30)
                assert answer.returncode == 0 and answer.stdout.strip() and "ERR" not in answer.stdout, line
        finally:
            server.terminate()


def shell(here: Path, line: str, warm: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A line as pasted into bash, with the environment's Python and our command on the path. `warm`: see tests/warm."""
    env = reader_env(here)
    if warm is not None:
        env = warmed(warm, env)
    return subprocess.run(
        ["bash", "-c", line], cwd=here, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=240
    )


async def trained(bus: Bus) -> list[str]:
    """Samples by the steps that trained them."""
    entries = [entry for entry in await bus.scan_all(POLICY) if entry.fields["type"] == "policy.step"]
    return [sample for entry in entries for sample in (await bus.message(entry)).samples]


class Desk:
    """The folder of a reader, with a run in it."""

    def __init__(self, here: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        self.here, self.run, self._capsys = here, run, capsys
        self.wrong: list[str] = []
        self.left = {
            words: command
            for words, command in ours().items()
            if (words[0] not in (*STARTING, *ELSEWHERE) or "--plain" in words)
            and "<TAB>" not in command.line
            and (len(words) > 1 or not command.inline)
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.sample = ""

    def ask(self, *words: str) -> tuple[int, str]:
        """Status, and all that it prints."""
        self._capsys.readouterr()
        status = app.main(words)
        said = self._capsys.readouterr()
        return status, said.out + said.err

    def try_all(self, *chosen: str) -> None:
        """Every command left of these names (`bus dead` is one of `bus`): it answers, and in the shape that its page shows."""
        for words, command in list(self.left.items()):
            if words[0] in chosen:
                self.try_one(command)

    def try_one(self, command: Shown) -> None:
        self.left.pop(command.words, None)
        if command.name == "tune" and "=" in command.line:
            self.ask("tune", "--revert", "0")  # what another page has set
        for _ in range(20):  # the run goes on: what lay on a stream a moment ago may be trained
            status, said = self.ask(*self._real(command.words))
            if "It may have moved on" not in said:
                break
        if status != 0:
            self.wrong.append(f"{command}: status {status}: {said}")
        if command.name != "trace" or self.run.launcher.poll() is not None:  # a life has its end after the run's
            self.compare(command, said)

    def compare(self, command: Shown, said: str) -> None:
        """What the page shows below a command with what was printed."""
        missing = {label for label in labels(command.output) - labels(said) if not BY_CHANCE.search(label)}
        if missing:
            self.wrong.append(f"{command}: the page shows {sorted(missing)}, it prints\n{said}")

    def _real(self, words: tuple[str, ...]) -> list[str]:
        """With names of this run: a sample that was trained, an entry that lies on its stream, a step to come."""
        found = [re.sub(r"^g\d{7}/\d$|^ID$", self.sample, word) for word in words]
        if words[:2] == ("bus", "show"):
            found[2:] = ["groups", self.ask("bus", "tail", "groups", "--no-follow")[1].split()[1]]
        if "--at-step" in found:
            found[found.index("--at-step") + 1] = "90000"
        if "--run" in found:
            found[found.index("--run") + 1] = "quickstart"
        if "--runs-dir" in found:  # in a container
            found[found.index("--runs-dir") + 1] = "runs"
        return [*found, "--no-follow"] if "tail" in words else found

    def begin(self, name: str) -> None:
        """A process of its own beside the run."""
        [command] = [c for c in self.left.values() if c.name == name and (c.output or not c.inline) and "--bus" not in c.words][:1]
        for words in [words for words in self.left if words[0] == name]:
            if words != command.words:
                del self.left[words]
        run = [sys.executable, "-u", "-m", "miles_async", *command.words]
        env = self.run.environment()
        env["PYTHONPATH"] += f"{os.pathsep}{self.here}"
        with (self.here / f"{name}.out").open("w") as out:
            self.processes[name] = subprocess.Popen(run, stdout=out, stderr=out, env=env, text=True)

    def said(self, name: str) -> str:
        return (self.here / f"{name}.out").read_text()

    def end(self, name: str, number: signal.Signals | None = signal.SIGINT) -> None:
        """Ctrl-C, or its own end; it printed what the page shows."""
        process = self.processes.pop(name)
        if number is not None:
            process.send_signal(number)
        status = process.wait(60)
        [command] = [command for command in self.left.values() if command.name == name]
        del self.left[command.words]
        if status not in (0, 130):
            self.wrong.append(f"{command}: status {status}: {self.said(name)}")
        self.compare(command, self.said(name))


@pytest.fixture
def desk(toy: Path, warm: Path | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    with TemporaryDirectory(prefix="ma-desk-") as directory:
        here = Path(directory)
        monkeypatch.chdir(here)
        monkeypatch.syspath_prepend(str(here))
        held_out: Tables = {"eval": {"eval_prompt_data": ["held_out", f"{toy / 'prompts.jsonl'}@[0:12]"], "eval_interval": 5}}
        run = Run(here, merged(merged(toy_tables(toy, here), held_out), LIVE), warm, "quickstart")
        furnish(here, toy, toml_of(toy_tables(toy, here)))
        run.start()
        made = Desk(here, run, capsys)
        try:
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
                process.wait()
            run.clean()


@pytest.mark.timeout(300)
def test_training_ones_own_model_runs_as_the_readme_has_it(tmp_path: Path, toy: Path, warm: Path | None) -> None:
    furnish(tmp_path, toy, "")
    [line] = [c.line for c in COMMANDS if "--name mine --hf-checkpoint DIR" in c.line]
    small = "--num-rollout 1 --rollout-batch-size 2 --rollout-max-response-len 16 --console plain"
    done = shell(tmp_path, f"{line} {small} --dynamic-sampling-filter-path none", warm)
    assert done.returncode == 0 and "finished at step 1" in done.stdout, done.stderr


@pytest.mark.timeout(600)
def test_commands_about_a_run_answer_as_the_pages_show(desk: Desk) -> None:
    """First what asks, then what changes, then the stop; then what answers of a run that has ended."""
    run = desk.run
    run.until_step(1)
    for name in BESIDE:
        desk.begin(name)
    run.until_step(14)  # whatif wants eight after those in which the run fills up
    (desk.here / UNHURRIED).touch()
    desk.sample = run.ask(trained)[0]
    two_runs = desk.left.pop(("report", "quickstart", "other"))
    del desk.left["trace", "eSTEP/NUMBER"]  # of an evaluation that is stuck
    asking = dict(desk.left)
    desk.try_all("whatif", "status", "doctor", "bus", "ledger", "trace", "samples", "report", "completion")
    desk.try_all("tune")
    for line in [c.line for c in COMMANDS if c.line.startswith("redis-cli -s")]:
        done = shell(desk.here, line)
        if done.returncode != 0 or not done.stdout.strip() or "ERR" in done.stdout:
            desk.wrong.append(f"{line}: {done.stdout}{done.stderr}")
    until("the worker's samples", lambda: "activated" in desk.said("worker"))
    until("an evaluation in the view", lambda: "eval held_out" in desk.said("top"))
    [address] = re.findall(r"http://\S+", desk.said("console"))
    with build_opener(HTTPCookieProcessor()).open(address) as page:
        assert page.status == 200
    for name in ("worker", "console"):
        desk.end(name)
    for words in [words for words in desk.left if words[0] == "stop" and words != ("stop", "--run", "quickstart")]:
        del desk.left[words]
    (desk.here / UNHURRIED).unlink()
    desk.try_all("stop")
    for name in ("top", "shadow"):
        desk.end(name, None)
    assert run.launcher is not None and run.launcher.wait(60) == 0
    for command in COMMANDS:
        if command.name == "train" and "finished at" in command.output:
            desk.compare(command, run.output())

    for words, command in asking.items():
        if words[0] in AFTER_TOO:
            desk.try_one(command if words[0] == "trace" else replace(command, output=""))
    desk.try_all("replay")
    shutil.copytree(run.dir, run.dir.with_name("other"))
    desk.try_one(two_runs)
    for line in (line for page in PAGES.values() for line in re.findall(r"^(python -c \".*?^\")$", page, re.M | re.S)):
        done = shell(desk.here, line)
        if done.returncode != 0 or not done.stdout:
            desk.wrong.append(f"{line}: {done.stderr}")
    assert desk.left == {}, "a new kind of command"
    if desk.wrong:
        pytest.fail("\n".join(desk.wrong))


def test_lines_of_a_shell_work_as_pasted(tmp_path: Path) -> None:
    """Completion, and code on the command line."""
    [completion] = {c.line for c in COMMANDS if "completion bash" in c.line}
    [code] = {c.line for c in COMMANDS if c.line.startswith('python -c "f')}
    for line in (f"{completion}\ncomplete -p miles-async", code):
        done = shell(tmp_path, line)
        assert done.returncode == 0 and done.stdout and not done.stderr, done
