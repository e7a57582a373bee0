"""`train --from-miles run.sh`: a launch script is read as bash would read it, without a shell, and each flag's fate is told."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miles_async.cli import app, from_miles
from miles_async.cli.flags import parse_flags
from miles_async.cli.train import parse
from miles_async.settings.errors import SettingsError
from miles_async.settings.script import read_script
from scripts.bench.launch_scripts import SCRIPTS
from tests.floors.tree import ROOT

MEANT = (
    "--engine sglang --model-dtype bfloat16 --dynamic-sampling-filter-path none --metadata-key metadata --tool-key tools "
    "--no-rollout-skip-special-tokens --math-rule math_boxed"
)
BARE = st.text("abcXYZ019-_./=,:[]*", min_size=1, max_size=6)
TEXT = st.text("ab $`\"'\\#;|&()<>{}~*?!\n\té", max_size=8)


def in_double(text: str) -> str:
    return '"' + re.sub(r'([$`"\\])', r"\\\1", text) + '"'


PIECES = st.one_of(
    BARE,
    TEXT.filter(lambda text: "'" not in text).map(lambda text: f"'{text}'"),
    TEXT.map(in_double),
    TEXT.map(shlex.quote),
    st.text("ab $\"'#;&()", min_size=1, max_size=4).map(lambda text: "".join("\\" + c for c in text)),
    st.sampled_from(
        [
            "$V",
            '"$V"',
            "${V}",
            '"${V}x"',
            "${U:-d e}",
            '"${U:-d "e"}"',
            "${U-$V}",
            "${V:+on}",
            '"$@"',
            "${1:-one}",
            "${NONE[@]}",
            '"${U:=}"',
            "x\\\ny",
            "$((7 / -2))",
            '"$(( (1+5)*-3 % 4 ))"',
        ]
    ),
    st.sampled_from(["${A[@]}", '"${A[@]}"', '"p${A[@]}s"', "$'a\\tb'", '"$(cd "$(dirname "$0")" && pwd)"', "$A", '"a\\b"']),
)
WORDS = st.lists(PIECES, min_size=1, max_size=4).map("".join).filter(lambda word: word[0] != "[")  # [0]=x sets an element


@settings(max_examples=60)
@given(
    value=WORDS,
    elements=st.lists(WORDS, max_size=4),
    more=st.lists(WORDS, max_size=2),
    words=st.lists(WORDS, max_size=5),
)
def test_words_are_what_bash_makes_of_them(tmp_path_factory, value, elements, more, words) -> None:
    """The oracle is bash itself, with a python3 that prints what it is given."""
    path = tmp_path_factory.getbasetemp() / "oracle.sh"
    join = "  \\\n  ".join
    body = f"V={value}\nA=({join(elements)}\n  # a comment 'of one quote\n)\nA+=({' '.join(more)})\n"
    path.write_text(f"{body}python3 train.py {join(words)} # end\n")
    shell = f"set -f +B; python3() {{ shift; for w; do printf '%s\\0' \"$w\"; done; }}; . {path}"
    done = subprocess.run(["bash", "-c", shell, str(path)], capture_output=True, env={}, timeout=20, check=True)
    got = read_script(path, {}).words
    assume(not any(word.unread for word in got))  # $V0, which is set nowhere
    assert [word.text for word in got] == done.stdout.decode().split("\0")[:-1]


def as_script(folder: Path, name: str) -> Path:
    """A launch script as users have them: arrays, variables with defaults, a model file beside it, a job of Ray."""
    flags = ["--" + one.strip() for one in re.split(r"(?:^|\s)--", SCRIPTS[name]) if one]
    cuts = [flags[i::4] for i in range(4)]
    (folder / "models").mkdir()
    model = "".join(f"   {quoted(one)} # is so\n" for one in cuts[0])
    (folder / "models" / "model.sh").write_text(f"MODEL_ARGS=(\n{model})\n")
    arrays = [f"A{i}_ARGS=(\n   " + "\n   ".join(map(quoted, cut)) + "\n)" for i, cut in enumerate(cuts[1:3])]
    direct = " \\\n   ".join(map(quoted, cuts[3]))
    script = folder / "run.sh"
    job = r"{ \"env_vars\": { \"PYTHONPATH\": \"/x\", \"OWN_OF_TEST\": \"${BASE}\", \"NVLS\": \"${FAST}\" } }"
    script.write_text(f"""#!/bin/bash
pkill -9 sglang   # what went before
set -ex
HERE="$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" &>/dev/null && pwd)"
source "${{HERE}}/models/model.sh"
LINKS=$(nvidia-smi topo -m | grep -c NV)
if [ "$LINKS" -gt 0 ]; then FAST=1; else FAST=0; fi
BASE=${{BASE_DIR:-MODEL}}
{arrays[0]}
{arrays[1]}
ENVIRONMENT="{job}"
ray start --head --num-gpus 8
ray job submit --address=http://127.0.0.1:8265 --runtime-env-json="$ENVIRONMENT" -- \\
   python3 train.py --hf-checkpoint $BASE {direct} ${{MODEL_ARGS[@]}} ${{A0_ARGS[@]}} "${{A1_ARGS[@]}}" 2>&1 | tee out.log
""")
    return script


def quoted(flag: str) -> str:
    return " ".join(word if re.fullmatch(r"[\w/.,:=-]+", word) else shlex.quote(word) for word in flag.split())


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_OF_TEST", "")
    monkeypatch.delenv("BASE_DIR", raising=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_what_its_flags_give(name: str, tmp_path: Path) -> None:
    args = parse(["--from-miles", str(as_script(tmp_path, name)), "--num-rollout", "7"])
    more = "--no-save" if "fsdp" in name else "--train-backend megatron"
    direct = parse_flags(f"{MEANT} {more} --hf-checkpoint MODEL {SCRIPTS[name]} --num-rollout 7".split(), frozenset()).values
    assert args.refused.found == []
    got, wanted = ({value.typed: value.words for value in values} for values in (args.values, direct))
    assert got == wanted
    assert os.environ["OWN_OF_TEST"] == "MODEL" and "NVLS" not in os.environ
    told = "\n".join(args.told)
    assert re.search(r"--num-rollout 3000 +given on this command line", told) and "NVLS is not set: FAST is set in the `if`" in told
    assert "not run: pkill (line 2), ray start (line" in told and "KEY" not in told


def test_a_script_is_tried_without_a_gpu(tmp_path: Path) -> None:
    """No flag behind a script could take back what it passes on to SGLang."""
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py --lr 1e-6 --sglang-mem-fraction-static 0.7 --sglang-router-policy x --rollout-num-gpus 4\n")
    asked = parse(["--from-miles", str(script), "--engine", "embedded", "--rollout-num-gpus", "0"])
    assert {value.typed: value.words for value in asked.values} == {
        "--dynamic-sampling-filter-path": ("none",), "--lr": ("1e-6",), "--engine": ("embedded",), "--rollout-num-gpus": ("0",),
        "--actor-num-gpus-per-node": ("8",), "--n-samples-per-prompt": ("1",), "--metadata-key": ("metadata",),
        "--no-save": ("true",),
        "--no-rollout-skip-special-tokens": ("false",), "--math-rule": ("math_boxed",), "--lr-decay-style": ("linear",),
    }  # fmt: skip
    assert sum("left out: this command line says --engine embedded" in line for line in asked.told) == 2
    assert not any("--engine sglang" in line for line in asked.told) and not asked.refused.found
    passed = parse(["--from-miles", str(script)])
    assert "--sglang-mem-fraction-static" in {value.typed for value in passed.values}


LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --num-layers 48 --swiglu --recompute-granularity full"


@pytest.mark.parametrize(
    ("family", "more", "behind", "backend"),
    [
        ("qwen3_next", LAYOUT, "", "torch"),
        ("qwen3_next", f"{LAYOUT} --mtp-num-layers 0", "", "torch"),
        ("qwen3_next", f"{LAYOUT} --mtp-num-layers 1", "", "megatron"),
        ("qwen3_next", LAYOUT, "--train-backend megatron", "megatron"),
        ("qwen3_next", LAYOUT, "--train-backend torch", "torch"),
        ("qwen3", LAYOUT, "", "megatron"),
        ("qwen3", f"{LAYOUT} --lora-rank 32", "", "torch"),
        ("qwen3", f"{LAYOUT} --lora-rank 0", "", "megatron"),
        ("gemma3", LAYOUT, "", "megatron"),
        ("no_such_family", LAYOUT, "", "megatron"),
    ],
)
def test_a_model_that_megatron_does_not_know_is_trained_by_torch_unless_a_backend_is_named(
    tmp_path: Path, family: str, more: str, behind: str, backend: str
) -> None:
    for name in ("model", "torch_dist"):
        (tmp_path / name).mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": family}))
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py --hf-checkpoint {tmp_path}/model --ref-load {tmp_path}/torch_dist {more}\n")
    args = parse(["--from-miles", str(script), *behind.split()])
    got = {value.typed: value.words for value in args.values}
    told = "\n".join(args.told)
    assert got["--train-backend"] == (backend,) and args.refused.found == []
    instead = backend == "torch" and not behind
    assert got.keys() >= {"--tensor-model-parallel-size", "--swiglu", "--ref-load"} or instead
    if instead:
        assert (
            got.keys() & {"--tensor-model-parallel-size", "--sequence-parallel", "--num-layers", "--swiglu", "--ref-load"} == set()
        )
        assert got["--gradient-checkpointing"] == ("true",)
        assert f"--train-backend torch: {'LoRA is' if 'lora' in more else 'Megatron does not know qwen3_next here'}" in told
        assert re.search(r"--tensor-model-parallel-size 2 +without effect: torch trains", told)
        assert re.search(r"--ref-load .* left out: a checkpoint of Megatron", told)
    else:
        assert "without effect" not in told


def test_all_refusals_come_at_once_and_name_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text("""X=(--lr $(cat lr.txt) --num-layers $(layers)
  --hf-checkpoint ${MODEL_OF_TEST} --lora-type lora --rollout-bach-size 4)
nvidia-smi -L && X+=(--use-tis --tis-clip 3)
for seed in 1 2; do
  python3 train_async.py ${X[@]} --seed $seed --save a b
done
""")
    assert app.main(["train", "--from-miles", str(script), "--tis-clip", "2"]) == 2
    out, err = capsys.readouterr()
    said = [line.removeprefix("miles-async train: ") for line in err.splitlines()]
    assert [line.split()[0] for line in said[:5]] == ["--lr", "--hf-checkpoint", "--use-tis", "--seed", "--rollout-bach-size"]
    assert said[0].endswith("$(cat lr.txt) is not run (run.sh:1). Give --lr VALUE behind the script.")
    assert "${MODEL_OF_TEST} is set nowhere (run.sh:2)" in said[1]
    assert "X is set in what `&&` joins at run.sh:3" in said[2] and "Give --use-tis or --no-use-tis behind" in said[2]
    assert "seed is set in the `for` at run.sh:4" in said[3] and "Did you mean --rollout-batch-size?" in said[4]
    assert any("A run trains one adapter" in line for line in said[5:]) and any(
        "'b' belongs to no flag" in line for line in said[5:]
    )
    assert "--num-layers $(layers)" in out and "left out: $(layers) is not run" in out
    assert "train_async.py generates while it trains" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo nothing\n", "starts no train.py"),
        (
            "if x; then\npython train.py --lr 1\nelse\npython train.py --lr 2\nfi\n",
            "starts train.py 2 times (run.sh:2, run.sh:4)",
        ),
        ("X='open\npython train.py\n", 'ends before "\'"'),
        ('python train.py --colocate "$X" --lr $(lr) $(more)', "run.sh:1: $(more) may hold flags: $(more) is not run."),
        (
            "source gone.sh\npython train.py --lr 1 ${OWN_ARGS[@]} ${MODEL_ARGS[@]}",
            "${OWN_ARGS[@]} may be set in gone.sh, which",
        ),
        ("source run.sh\n", "sources more than 32 files"),
        (
            "ray job submit --runtime-env-json='{' -- python3 train.py --lr 1\n",
            "run.sh:1: --runtime-env-json is no JSON object",
        ),
    ],
)
def test_what_is_no_launch_script_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(SettingsError) as caught:
        args = parse(["--from-miles", str(tmp_path / "run.sh")])
        assert not args.told or re.search(r"note: run.sh:\d: (\$X|\$\{MODEL_ARGS\[@\]\}) is set nowhere", "".join(args.told))
        raise args.refused.found[0]
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_commands_that_eval_or_another_shell_is_given_are_read_with_what_they_would_know(tmp_path: Path) -> None:
    path, start = tmp_path / "run.sh", "python3 train.py --a $A --b $((A * 4))"
    for text, words in (
        (f"A=3\neval '{start}'", ["--a", "3", "--b", "12"]),
        (f"A=3\nbash -c '{start}'", None),  # A is not exported
        (f"export A=3\nbash -c '{start}'", ["--a", "3", "--b", "12"]),
        (f'A=3\nsh -c "{start}"', ["--a", "3", "--b", "12"]),
    ):
        path.write_text(text)
        found = read_script(path, {}).words
        assert [word.text for word in found if not word.unread] == (words or ["--a", "--b"])
        assert all("is set nowhere" in word.unread or "shell alone" in word.unread for word in found if word.unread)


def test_what_a_function_is_given_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text('start() {\n  python3 train.py --lr 1 "$@"\n}\nstart --num-rollout 5\n')
    assert app.main(["train", "--from-miles", str(path), "--dry-run"]) == 2
    assert "--num-rollout 5 " in capsys.readouterr().out


def test_what_a_model_file_would_say_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run 1.sh"
    path.write_text(
        'read -ra MODEL_ARGS <<< "$(ask the model)"\n'
        "python3 train.py --sglang-cuda-graph-bs 1 2 ${MODEL_ARGS[@]} --lr $1 --wandb-key ${KEY_OF_TEST} --seed 4\n"
    )
    args = parse(["--from-miles", f"'{path}' 2e-6"])
    assert args.refused.found == []
    assert {value.typed: value.words for value in args.values if value.typed in ("--lr", "--seed", "--wandb-key")} == {
        "--lr": ("2e-6",), "--seed": ("4",)
    }  # fmt: skip
    told = "\n".join(args.told)
    assert "note: run 1.sh:1: what MODEL_ARGS holds is left out: $(ask the model) is not run; config.json says the same" in told
    assert re.search(r"--wandb-key \*\*\* +left out, as an empty secret says nothing: \$\{KEY_OF_TEST\} is set nowhere", told)
    assert parse(["--from-miles", str(path)]).refused.found != []  # a path with a space; its argument is missing
    with pytest.raises(SettingsError, match="No closing quotation"):
        parse(["--from-miles", "run.sh 'a"])


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    """What a shell would run by any of these leaves no file."""
    script = tmp_path / "run.sh"
    traces = [
        f"touch {tmp_path}/a",
        f"X=$(touch {tmp_path}/b)",
        f"Y=`touch {tmp_path}/c`",
        f"Z=${{U:-$(touch {tmp_path}/d)}}",
    ]
    script.write_text("\n".join([*traces, f"cat <(touch {tmp_path}/e)", 'python3 train.py --name "$X$Y$Z" --lr 1e-6', ""]))
    assert [word.text for word in read_script(script).words][-2:] == ["--lr", "1e-6"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]
    with pytest.raises(SettingsError, match="cannot read"):
        parse(["--from-miles", str(tmp_path / "none.sh")])
    assert from_miles.take_script(["c.toml"], None, frozenset()).words == ["c.toml"]  # type: ignore[arg-type]


def test_the_documentations_script_becomes_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change: UPDATE_DOCS=1 writes the answer anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "")
    monkeypatch.delenv("MODELS", raising=False)
    page = ROOT / "docs" / "from-miles.md"
    text = page.read_text()
    script, written = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.M | re.S)[:2]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen3-0.6B.sh").write_text(re.findall(r"# (MODEL_ARGS=.*)", script)[0] + "\n")
    (tmp_path / "run.sh").write_text(script)
    args = parse(["--from-miles", "run.sh"])
    told = "\n".join(args.told) + "\n"
    assert args.refused.found == []
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(text.replace(written, told))
    else:
        assert written == told, "run this test with UPDATE_DOCS=1"
