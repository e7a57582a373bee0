"""The command as a user meets it: exit statuses, one line per refusal, help without heavy imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_async.cli import app
from miles_async.cli.options import add_json_option, add_run_options, chosen_run
from miles_async.settings.errors import SettingsError
from miles_async.settings.miles import WHY_NOT, why_not
from miles_async.settings.runs import find_run, write_run_file

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "numpy", "pyarrow", "rich")
HEAVY = (*LIBRARIES, "redis", "actors.runtime.context", "actors.runtime.run", "actors.trainer.objective", "bus", "asyncio")
CONFIG = """
[model]
hf_checkpoint = "builtin:arithmetic"
[rollout]
prompt_data = "train.jsonl"
num_rollout = 3
rm_type = "math"
"""


def in_process(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "miles_async", *words],
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def started(folder):
    """A settings file and the data that it names."""
    (folder / "c.toml").write_text(CONFIG)
    (folder / "train.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["train", "--help", "all"], ["--version"], ["train", "--dry-run", "c.toml"]]
)
def test_help_and_dry_run_import_nothing_heavy(words, tmp_path):
    started(tmp_path)
    code = (
        "import sys; from miles_async.cli.app import main; status = main(sys.argv[1:]);"
        f"heavy = [name for name in {(LIBRARIES if '--dry-run' in words else HEAVY)!r} if name in sys.modules];"
        "print(heavy, file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert done.stdout


def helped(capsys, *topic):
    assert app.main(["train", "--help", *topic]) == 0
    return capsys.readouterr().out


def test_help_is_one_screen_with_a_way_in(capsys):
    shown = helped(capsys)
    assert len(shown.splitlines()) <= 30 and max(map(len, shown.splitlines())) < 140
    for way in ("--help GROUP", "--help WORD", "--help miles", "--help all", "  grpo "):
        assert way in shown
    assert "--tis-clip " in helped(capsys, "grpo") and "--bus-url" not in helped(capsys, "grpo")
    assert "--tail-slots" in helped(capsys, "tail") and "--lr " not in helped(capsys, "tail")
    assert "live: next step (trainer)" in helped(capsys, "tis_clip")
    assert app.main(["train", "--help", "zork"]) == 2
    assert "nothing is called 'zork'" in capsys.readouterr().err


def test_the_quickstart_says_in_its_help_that_it_takes_the_flags_of_train(capsys):
    assert app.main(["quickstart", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: miles-async quickstart [--flag value ...]\n") and "usage: miles-async train" not in said
    assert "--dry-run" in said and "--prompt-data" in said


def test_help_says_of_each_flag_of_miles_what_it_is_here(capsys):
    rows = dict(line.split(maxsplit=1) for line in helped(capsys, "miles").splitlines())
    assert rows["--rollout-batch-size"] == "the same" and "config.json" in rows["--padded-vocab-size"]
    assert rows["--tis-threshold"].startswith("--tis-clip") and "--name" not in rows
    assert rows["--sglang-router-NAME"] == "passed on to the program: --router-NAME"
    assert {why_not(flag) for flag in ("--lora-type", "--allgather-cp")} <= {why for why, _ in WHY_NOT}
    assert why_not("--nonsense") == ""


def test_a_flag_is_explained_from_its_declaration(capsys):
    from miles_async.settings.catalog import catalog

    def explained(*flags):
        assert app.main(["train", "quickstart", "--explain", *flags]) == 0
        return capsys.readouterr().out

    shown = explained("--tis-threshold")
    for said in (
        *("--tis-clip NUMBER\n  For use_tis and use_icepop: upper bound", "a number > 0", "default       2.0", "[grpo] tis_clip"),
        *("tune tis_clip=VALUE, from the next step (trainer) on", "also --tis-threshold"),
        "correction bounds are ordered (objective.py)",
    ):
        assert said in shown
    shown = explained("max_weight_staleness", "--no-rollout-shuffle", "--lora-type", "--moe-permute-fusion")
    assert "stale data is corrected" in shown and "others follow staleness_lookahead" in shown and "while it runs fixed" in shown
    assert "--lora-type: refused: A run trains one adapter" in shown and "--moe-permute-fusion: a field of megatron-core" in shown
    assert "no such flag" in explained("governor_min_ess") and "the same flag" in explained("lr")
    # A rule that asks a property of all settings looks at what that is made of, and a table of names in it is looked through.
    assert "inner deadlines are shorter" in explained("lease_s")
    assert "wait leaves room for its lookahead" in explained("update_weights_interval")
    assert explained(*catalog()).count("in a file") == len(catalog())
    assert app.main(["train", "--explain", "tis_clap"]) == 2 and "Did you mean tis_clip?" in capsys.readouterr().err
    assert app.main(["train", "--explain"]) == 2 and "--explain needs a value" in capsys.readouterr().err


def test_help_shows_every_flag_with_unit_and_default(capsys):
    from miles_async.settings.catalog import catalog

    shown = helped(capsys, "all")
    text = " ".join(shown.split())
    words = set(text.replace(",", " ").split())
    assert {spec.flag for spec in catalog().values()} <= words
    assert text.count("default: ") + text.count("(required)") == len(catalog())
    assert text.count("unit: ") == sum(bool(spec.unit) for spec in catalog().values())
    assert max(map(len, shown.splitlines())) < 140


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "Did you mean train?"),
        (["train", "none.toml"], "no such settings file: none.toml"),
        (["train", "c.toml", "b.toml"], "one settings file expected"),
        (["train", "c.toml", "--rollout-bach-size", "4"], "Did you mean --rollout-batch-size?"),
        (["train", "c.toml", "--global-batch-size", "7"], "global_batch_size = 7"),
        (["train", "c.toml", "--dryrun"], "Did you mean --dry-run?"),
        (["tune", "rollout_temperature=\udcff1"], "word 2, 'rollout_temperature=\\udcff1', is no UTF-8 text"),
        (["train", "c.toml", "--padded-vocab-size", "4"], "Miles has it. The architecture comes from config.json"),
    ],
)
def test_a_refusal_is_one_line_on_stderr_and_status_2(words, said, tmp_path):
    started(tmp_path)
    done = in_process(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert said in line and "Traceback" not in line


def test_a_dry_run_tells_all_that_is_wrong_at_once(tmp_path):
    started(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def two(args, sample, more):\n    return 1.0\n"
        "def words(sample):\n    return 'good'\n"
        "def raises(samples):\n    return samples[0]['reward']\n"
        "def none(step, waiting):\n    return None\n"
        "async def nothing(task, session):\n    return None\n"
    )
    words = "--hf-checkpoint nowhere --prompt-data gone.jsonl --min-lr 1 --lora-type lora --rm-type none "
    words += "--eval-prompt-data e gone-too.jsonl --eval-interval 2 "
    words += "--custom-rm-path mine.two --dynamic-sampling-filter-path mine.raises --buffer-filter-path mine.none"
    words += " --custom-generate-function-path mine.nothing --custom-config-path gone.yaml"
    done = in_process("train", "c.toml", "second.toml", "--dry-run", *words.split(), cwd=tmp_path)
    said = [line.removeprefix("miles-async train: ").split(" ")[0] for line in done.stderr.splitlines()]
    fields = ["--lora-type", "one", "min_lr", "hf_checkpoint", "prompt_data", "eval_prompt_data"]
    fields += ["custom_config_path", "custom_rm_path", "dynamic_sampling_filter_path", "buffer_filter_path"]
    assert (done.returncode, said) == (2, [*fields, "custom_generate_function_path"])
    assert "(sample: dict) or (args, sample) -> number or table" in done.stderr and "raised TypeError" in done.stderr
    done = in_process("train", "c.toml", "--dry-run", "--rm-type", "none", "--custom-rm-path", "mine.words", cwd=tmp_path)
    assert done.returncode == 2 and "it gave str 'good', not a number" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_dry_run_prints_where_each_value_came_from(tmp_path):
    started(tmp_path)
    done = in_process("train", "c.toml", "--dry-run", "--lr", "1e-4", cwd=tmp_path)
    rows = {line.split(" = ")[0]: " ".join(line.split()) for line in done.stdout.splitlines() if " = " in line}
    assert rows["lr"] == "lr = 0.0001 # flag"
    assert rows["num_rollout"] == "num_rollout = 3 # file"
    assert rows["eps_clip"] == "eps_clip = 0.2 # default"
    assert rows["name"] == 'name = "c" # derived'
    assert not (tmp_path / "runs").exists()


def test_no_command_shows_help_and_fails(capsys):
    assert app.main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_not_an_error_message():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m miles_async train --help | head -c 1"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stderr == ""


class _Module:
    """A command that fails in a chosen way."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_arguments(self, parser) -> None:
        add_run_options(parser)
        add_json_option(parser)

    def run(self, args) -> int:
        raise self.error


def _with_command(monkeypatch, error: BaseException) -> None:
    monkeypatch.setitem(sys.modules, "fake_command", _Module(error))
    monkeypatch.setattr(app, "COMMANDS", (app.Command("fake", "fake_command", "Fails."),))


def test_named_failures_become_one_line_and_defects_stay_tracebacks(monkeypatch, capsys):
    from bus import errors

    for error, status in (
        (SettingsError("no"), 2),
        (errors.BusUnreachable("no"), 2),
        (errors.InvariantBroken("no"), 1),
        (KeyboardInterrupt(), 130),
    ):
        _with_command(monkeypatch, error)
        assert app.main(["fake"]) == status
        assert capsys.readouterr().err.startswith("miles-async fake: ")
    _with_command(monkeypatch, RuntimeError("a defect"))
    with pytest.raises(RuntimeError):
        app.main(["fake"])


def test_argparse_commands_refuse_in_one_line_too(monkeypatch, capsys):
    _with_command(monkeypatch, SettingsError("never reached"))
    assert app.main(["fake", "--nonsense"]) == 2
    assert capsys.readouterr().err == ("miles-async fake: unrecognized arguments: --nonsense. See miles-async fake --help.\n")


def test_the_newest_run_is_found_by_default(tmp_path):
    for age, name in enumerate(["old", "new"]):
        path = write_run_file(tmp_path / name, run=name, bus_url=f"unix:///{name}")
        os.utime(path, (1000 + age, 1000 + age))
        assert path.stat().st_mode & 0o077 == 0
    assert find_run(run=None, runs_dir=tmp_path, bus_url=None).run == "new"
    found = find_run(run="old", runs_dir=tmp_path, bus_url=None)
    assert (found.run, found.bus_url, found.run_dir) == ("old", "unix:///old", tmp_path / "old")
    assert find_run(run="x", runs_dir=tmp_path, bus_url="redis://h").run_dir is None


def test_a_run_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(SettingsError, match="no run in"):
        find_run(run=None, runs_dir=tmp_path, bus_url=None)
    write_run_file(tmp_path / "quickstart", run="quickstart", bus_url="unix:///x")
    with pytest.raises(SettingsError, match="Did you mean quickstart"):
        find_run(run="quikstart", runs_dir=tmp_path, bus_url=None)
    with pytest.raises(SettingsError, match="bus_url"):
        find_run(run=None, runs_dir=tmp_path, bus_url="http://x")
    (tmp_path / "quickstart" / "run.json").write_text("{}")
    with pytest.raises(SettingsError, match="is not a run file"):
        find_run(run=None, runs_dir=tmp_path, bus_url=None)


def test_a_run_that_is_being_started_is_told_from_none(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("")
    for run, why in ((None, "no run in"), ("src", "no run in")):
        with pytest.raises(SettingsError, match=why):
            find_run(run=run, runs_dir=tmp_path, bus_url=None)
    (tmp_path / "first").mkdir()  # before the launcher has made a model, or checked one, there is no more than this
    for run in (None, "first"):
        with pytest.raises(SettingsError, match="run first has no bus yet: it is being started, or its start failed"):
            find_run(run=run, runs_dir=tmp_path, bus_url=None)
    write_run_file(tmp_path / "quickstart", run="quickstart", bus_url="unix:///x")
    assert find_run(run=None, runs_dir=tmp_path, bus_url=None).run == "quickstart"
    with pytest.raises(SettingsError, match="run first has no bus yet"):
        find_run(run="first", runs_dir=tmp_path, bus_url=None)


def test_shared_options_find_a_run(tmp_path):
    write_run_file(tmp_path / "a", run="a", bus_url="unix:///a")
    parser = app.OneLineParser(prog="miles-async x")
    add_run_options(parser)
    assert chosen_run(parser.parse_args(["--runs-dir", str(tmp_path)])).run == "a"
    assert chosen_run(parser.parse_args(["--bus", "redis://h:1"])).bus_url == "redis://h:1"
