"""Launch scripts of bash are read as bash runs them: the oracle is bash, with a python3 that prints what it is given."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from miles_async.settings.errors import SettingsError
from miles_async.settings.model_file import model_words
from miles_async.settings.script import read_script

PRINTS = '#!/bin/bash\nwhile [ $# -gt 0 ]; do case "$1" in *train.py) shift; printf \'%s\\0\' "$@" >&9; exit;; esac; shift; done\n'
EXTRA = {"NUM_GPUS": "8", "EMPTY": "", "LIST": "0,1,2", "NAME_OF_TEST": "Qwen3-VL-2B-Instruct"}


def bash_gives(path: Path, *arguments: str) -> list[str]:
    """The words of train.py, as bash has them."""
    stubs = path.parent / "stubs"
    stubs.mkdir(exist_ok=True)
    for name in ("python3", "ray"):
        (stubs / name).write_text(PRINTS)
        (stubs / name).chmod(0o755)
    out = path.parent / "out"
    with out.open("wb") as file:
        subprocess.run(
            ["bash", "-c", f'exec 9>&1 >/dev/null; exec bash "{path}" "$@"', "bash", *arguments],
            stdout=file, stderr=subprocess.DEVNULL, env={"PATH": f"{stubs}:/usr/bin:/bin", **EXTRA}, timeout=20, cwd=path.parent,
        )  # fmt: skip
    return out.read_bytes().decode().split("\0")[:-1]


def words(path: Path, *arguments: str) -> list[str]:
    """The words of train.py, as they are read; each is known."""
    script = read_script(path, EXTRA, arguments)
    assert [word for word in script.words if word.unread] == [], script.notes
    return [word.text for word in script.words]


SAME = {
    "programs whose output follows from their words": """
        D="/data/sets/Math-17K.jsonl"
        train $(seq 16 8 48) $(seq -s, 0 3) $(basename "$D" .jsonl) "$(dirname $D)" $(basename /a/b/) `basename $D`
        """,
    "case, cuts and counts of a text": """
        L=$(echo "$NAME_OF_TEST" | tr '[:upper:]' '[:lower:]')
        M=$(echo "$NAME_OF_TEST" | sed 's/-Instruct//g; s/Qwen3-VL-/qwen3-/g')
        N=$(echo $LIST | tr ',' '\\n' | wc -l)
        P=$(echo a:b:c | cut -d: -f2)
        train $L $M $N $P "$(echo -n x; echo y)" "$(printf '%s-%d\\n' a 3)" "$(date +%Y)"
        """,
    "folders of the script": """
        HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
        ABOVE="$(cd "${HERE}/.." && pwd)"; ROOT=$(cd -- "${HERE}/../.." > /dev/null 2>&1; pwd)
        train $HERE $ABOVE "$ROOT/x" $(dirname "$0") $(realpath "$HERE/..") "$(cd "$(dirname "$0")/.." && pwd -P)"
        cd "$ABOVE"
        """,
    "tests on what is known": """
        if [ -z "$EMPTY" ] && [ "$NUM_GPUS" -gt 4 ]; then A=many; elif [ "$NUM_GPUS" = 4 ]; then A=four; else A=few; fi
        if [[ "$NAME_OF_TEST" == Qwen3-VL-* && -n $LIST ]]; then B=vl; fi
        if ! [ "$NUM_GPUS" -ne 8 ]; then C=eight; fi
        [ "$A" = many ] && D=yes || D=no
        [ "$A" = few ] && E=yes || E=no
        if [ -z "$NOWHERE" ] || [ "$NOWHERE" = 0 ]; then F=unset; fi
        if [[ -z "${NOWHERE:-}" ]]; then G=1; else G=2; fi
        test "$A" != few -a 1 -lt 2 && H=and
        case "$NAME_OF_TEST" in Qwen2*) I=two;; Qwen3-VL-2B*|x) I=three;; *) I=other;; esac
        case "$NUM_GPUS" in 4) J=4;; *) J=rest;; esac
        if (( NUM_GPUS > 4 && NUM_GPUS % 8 == 0 )); then K=whole; fi
        if echo "$NAME_OF_TEST one two" | grep -qw two; then L=there; fi
        train $A $B $C $D $E $F $G $H $I $J $K $L
        """,
    "loops": """
        A=()
        for ((i=0; i<6; i++)); do if (( i < 2 )); then A+=(0); elif ((i == 4)); then continue; else A+=($((i * 2))); fi; done
        for x in a "b c" $(seq 1 2); do A+=("$x"); [ "$x" = 1 ] && break; done
        n=3; while [ $n -gt 0 ]; do A+=(n$n); n=$((n - 1)); done
        until [ "$n" -ge 2 ]; do ((n++)); A+=(u$n); done
        printf -v FREQ "[%s]" "$(IFS=', '; echo "${A[*]}")"
        train --freq "$FREQ" ${#A[@]} "${A[1]}" ${A[0]}
        """,
    "functions": """
        X=outer
        both() {
          local X="$1" y=$2
          shift
          Y="$X-$y-$#"
          if [ $# -gt 2 ]; then return 0; fi
          Z=late
        }
        both a b c d; Z1=${Z:-none}; both a b; Z2=$Z
        say() { echo "said $1"; }
        function start { train "$@" $X $Y $Z1 $Z2 "$(say it)"; }
        start --lr 1 "two words"
        """,
    "parts of a value": """
        P=/data/run.v2/model.tar.gz; A=(x y z); A[1]=w; A[3]=last
        train ${P##*/} ${P%.gz} ${P%%.*} ${P#/} ${NAME_OF_TEST//-/_} ${NAME_OF_TEST/Qwen/q} ${NAME_OF_TEST,,} \\
          ${LIST:2} ${LIST:0:1} \\
          ${#P} "${A[@]}" ${A[1]} ${#A[@]} "${A[*]}" ${NOWHERE:+set} ${EMPTY:-dash} "${EMPTY-kept}" ${A[@]:+some}
        """,
    "reading a text into variables": """
        LINE="--num-layers 28  --rotary-base 1000000"
        read -ra M <<< "${LINE}"
        read -r FIRST REST <<< "one"
        IFS=',' read -ra G <<< "$LIST"
        train ${M[@]} $FIRST "$REST" "${G[@]}" ${#G[@]}
        """,
    "here-documents": """
        A=7
        T=$(cat <<EOF
        one "$A" \\$A $((A + 1)) it's (here
        EOF
        )
        R=$(cat <<'END'
        $A as it is
        END
        )
        cat > /dev/null <<-STOP
        A=8
        \tSTOP
        STOP
        train "$T" "$R"
        """,
    "shells of their own": """
        A=1; (A=2; B=3); echo x | A=4
        C=$(A=5; echo $A); { A=6; }
        D() ( A=7 ); D
        train $A ${B:-unset} $C
        """,
    "arguments": """
        if [ $# -lt 2 ]; then echo "usage"; exit 1; fi
        MODE="$1"; RANK=$2
        while [[ $# -gt 0 ]]; do case $1 in --lr) LR=$2; shift 2;; *) shift;; esac; done
        run() { local mode="$1"; if [ "$mode" = fast ]; then ARGS=(--fast); else ARGS=(--slow); fi; train ${ARGS[@]} $RANK $LR; }
        run "$MODE"
        """,
    "exported, eval and another shell": """
        export A=3 B; B=4; C=5
        eval 'D=$((A + C))'; E=$(bash -c 'echo $A-${C-}')
        bash -c "true"; unset C
        train $A $D ${C:-gone} $E
        """,
    "arithmetic": """
        a=7 b=2; : $((c = a << 2)); ((a += 3))
        train $((a / -b)) $((a % 3 == 1 ? 5 : 6)) $((2 ** 5 - 0x10)) $((!a || b && 1)) $((-a / b)) $(( (a + b) * 2 )) \\
          $c $((a++)) $a $((~b & 7)) $((010)) $(python3 -c "print(int(1.5 * 1024))" | cat)
        """,
    "a pipe behind": """
        train --a 1 2>&1 | tee /dev/null
        """,
    "a comment, and quotes in odd places": """
        X=$(echo a  # it's no quote
        )
        Y='it'"'"'s' ; Z=a#b
        train "$X" "$Y" $Z a\\ b "$(echo "in (brackets")" ${NOWHERE:-"a b"}  # done
        """,
}  # fmt: skip


@pytest.mark.parametrize("what", SAME)
def test_a_script_is_read_as_bash_runs_it(what: str, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "run.sh"
    path.parent.mkdir(parents=True)
    text = SAME[what].replace("train ", "python3 train.py ")
    path.write_text("\n".join(line.removeprefix("        ") for line in text.splitlines()) + "\n")
    given = ("fast", "3", "--lr", "1e-6") if what == "arguments" else ()
    wanted = bash_gives(path, *given)
    if what == "arithmetic":
        wanted.append("1536")  # the python3 of this test prints nothing
    assert wanted and words(path, *given) == wanted


UNSURE = {
    'X=(--a 1)\nif nvidia-smi; then X+=(--b 2); fi\npython3 train.py "${X[@]}"': (["--a", "1"], "X is set in the `if` at run.sh:2"),
    "if nvidia-smi; then N=1; else N=2; fi\npython3 train.py --n $N": (["--n"], "N is set in the `if` at run.sh:1"),
    "N=$(nvidia-smi -L | wc -l)\npython3 train.py --n $N": (["--n"], "$(nvidia-smi -L | wc -l) is not run"),
    "while true; do N=$(free); if [ $N -gt 2 ]; then break; fi; done\npython3 train.py --n $N --m 1": (
        ["--n", "--m", "1"], "N is set in the `while` at run.sh:1"
    ),
    "f() { if ready; then return; fi; N=2; }\nN=1\nf\npython3 train.py --n $N": (["--n"], "N is set in the function f"),
    "for x in $(ls); do N=$x; done\npython3 train.py --n ${N:-1}": (["--n"], "N is set in the `for` at run.sh:1"),
    'case "$(uname)" in Linux) N=1;; *) N=2;; esac\npython3 train.py --n $N': (["--n"], "N is set in the `case` at run.sh:1"),
    "ready && N=1 || N=2\npython3 train.py --n $N": (["--n"], "N is set in what `"),
    "A[$(x)]=1\npython3 train.py --n ${A[@]}": (["--n"], "A is set in parts, at run.sh:1"),
    "mapfile -t A < list\npython3 train.py --n ${A[@]}": (["--n"], "`mapfile` at run.sh:1 is not run"),
    "python3 train.py --n {1,2}": (["--n"], "{1,2} is known to a shell alone"),
    "python3 train.py --n $((N + 1)) --m $(( $(x) + 1 ))": (["--n", "--m"], "is known to a shell alone"),
    'N=$(f() { echo 1; ls; }; f)\npython3 train.py --n "$N"': (["--n"], "is not run"),
}  # fmt: skip


@pytest.mark.parametrize("text", UNSURE)
def test_what_only_a_shell_knows_is_unread_and_says_why(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text + "\n")
    found = read_script(tmp_path / "run.sh", {}).words
    known, why = UNSURE[text]
    assert [word.text for word in found if not word.unread] == known
    assert any(why in word.unread for word in found), [word.unread for word in found]


def test_what_branches_have_in_common_is_known(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("""
if nvidia-smi; then A=1; B=(--x 2 --y 3); echo one; else B=(--x 2 --z 3); A=1; fi
if nvidia-smi; then exit 1; fi
nvidia-smi || exit 3
if [ -f /etc/hosts_of_test ]; then ssh other true; fi
python3 train.py --a $A ${B[@]}
""")
    found = read_script(path, {}).words
    assert [word.text for word in found if not word.unread] == ["--a", "1", "--x", "2"]
    assert [word.text for word in found if word.unread] == ["--y", "3", "--z", "3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "if [ $# -lt 3 ]; then\necho usage\nexit 1\nfi\npython3 train.py\n",
            "ends at `exit` (run.sh:3) and starts no train.py",
        ),
        ("if true; then\npython3 train.py\n", "run.sh ends before 'fi'"),
        ("fi\npython3 train.py\n", "run.sh:1: 'fi' ends nothing"),
        ("while true; do A=1; done\npython3 train.py\n", "takes more than 50000 commands"),
        ("A=aaaaaaaaaaaaaaaa\nfor i in $(seq 1 40); do A=$A$A; done\npython3 train.py\n", "A grows past"),
        ("(" * 3000 + "python3 train.py" + ")" * 3000, "nested too deeply"),
        ("f() { f; }\nf\n", "starts no train.py"),
        ("pkill -f train.py\necho train.py\n", "starts no train.py"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_script(tmp_path / "run.sh", {})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_environment_of_a_job_is_read_or_told_and_never_refused_for_what_is_unread(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    start = 'ray job submit --runtime-env-json="${J}" -- python3 train.py --lr 1'
    path.write_text(f"""N=$(nvidia-smi | wc -l)
FAST=$([ "$N" -gt 0 ] && echo "1" || echo "0")
HERE=$(cd "$(dirname "$0")" && pwd)
J=$(cat <<EOF_JSON
{{"env_vars": {{"A": "${{FAST}}", "B": "$HERE/x", "C": "${{NOWHERE:-}}"}}}}
EOF_JSON
)
{start}
""")
    script = read_script(path, {})
    assert script.environment["B"].text == f"{tmp_path}/x" and script.environment["C"].text == ""
    assert script.environment["A"].unread and [word.text for word in script.words] == ["--lr", "1"]
    for unread in (
        "J=$(python3 - <<PY\nimport json; print(json.dumps({'a': \"it's\"}))\nPY\n)",
        'J="{\\"x\\": $(y "1")}"',
    ):
        path.write_text(f"{unread}\n{start}\n")
        script = read_script(path, {})
        assert script.environment == {} and [word.text for word in script.words] == ["--lr", "1"]
        assert any("the environment of the job is not known: $(" in note for note in script.notes)


MODEL = '''import os

from model_args_utils import load_sibling_model_args, moe_layer_freq

LAYERS = 2 * 3


def model_args(base: str | None = None, layers: int = LAYERS) -> str:
    """A model."""
    base = base if base is not None else os.environ.get("BASE_OF_TEST") or "10000"
    return (
        f"--num-layers {layers} "  # a comment
        f"--rotary-base {base} "
        f"--moe-layer-freq {moe_layer_freq(nlayers=layers, first_k_dense_replace=1)} "
        "--swiglu "
    )
'''


def models(folder: Path) -> Path:
    place = folder / "scripts" / "models"
    place.mkdir(parents=True)
    (place / "big.py").write_text(MODEL)
    small = "from model_args_utils import load_sibling_model_args\n\n\ndef model_args() -> str:\n"
    (place / "small.py").write_text(small + '    return load_sibling_model_args(__file__, "big", layers=2, base="5")\n')
    return place


def test_the_model_of_a_script_is_read_from_its_model_file_and_not_run(tmp_path: Path) -> None:
    place = models(tmp_path)
    path = tmp_path / "examples" / "deep" / "run.sh"
    path.parent.mkdir(parents=True)
    read = 'read -ra MODEL_ARGS <<< "${LINE}"\npython3 train.py --lr 1 ${MODEL_ARGS[@]} --seed 2\n'
    line = 'LINE="$(%s python3 /nowhere/tools/model_args_utils.py "%s")" || exit 1\n'
    big = "--num-layers 6 --rotary-base 10000 --moe-layer-freq [0,1,1,1,1,1] --swiglu"
    for name, before, wanted in (
        ("big", "", big),
        ("big", "BASE_OF_TEST=77", big.replace("10000", "77")),
        ("small", "", "--num-layers 2 --rotary-base 5 --moe-layer-freq [0,1] --swiglu"),
    ):
        path.write_text(line % (before, name) + read)
        assert words(path) == ["--lr", "1", *wanted.split(), "--seed", "2"]
    for name, text, why in (
        ("gone", "", "there is no scripts/models/gone.py in the folders above"),
        (
            "wild",
            "def model_args():\n    return open('/etc/passwd').read()\n",
            "is more than is read without running it",
        ),
        ("long", "def model_args():\n    return 'x' * 99999999999\n", "a text that long"),
        ("deep", "def model_args():\n    return model_args()\n", "nested too deeply"),
        ("none", "def model_args():\n    return None\n", "gives no text"),
        ("syntax", "def model_args(:\n", "SyntaxError"),
    ):
        if text:
            (place / f"{name}.py").write_text(text)
        assert why in model_words(name, [place], {})[1]
        path.write_text(line % ("", name) + read)
        script = read_script(path, EXTRA)
        assert [word.text for word in script.words if not word.unread] == ["--lr", "1", "--seed", "2"]
        assert [note for note in script.notes if "what MODEL_ARGS holds is left out" in note and "config.json" in note]


def test_a_model_file_of_bash_is_found_above_and_a_missing_one_blames_itself_alone(tmp_path: Path) -> None:
    place = models(tmp_path)
    (place / "big.sh").write_text("N=${LAYERS:-6}\nMODEL_ARGS=(--num-layers $N)\n")
    path = tmp_path / "examples" / "deep" / "run.sh"
    path.parent.mkdir(parents=True)
    for source, layers in (
        ('source "/root/elsewhere/scripts/models/big.sh"', "6"),
        ('LAYERS=3 source "$(dirname "$0")/../scripts/models/big.sh"', "3"),
        ('source "$UNSET_OF_TEST/models/big.sh"', "6"),
    ):
        path.write_text(f"{source}\npython3 train.py ${{MODEL_ARGS[@]}} --n ${{LAYERS:-0}}\n")
        assert words(path) == ["--num-layers", layers, "--n", "0"]
    path.write_text("source /root/scripts/models/gone.sh\npython3 train.py ${MODEL_ARGS[@]} ${EVAL_ARGS[@]} --lr 1\n")
    script = read_script(path, {})
    assert [word.text for word in script.words] == ["--lr", "1"]
    assert [note.partition(": ")[2] for note in script.notes] == [
        "/root/scripts/models/gone.sh is not read: no such file, nor in the folders above the script; MODEL_ARGS may be left out",
        "${EVAL_ARGS[@]} is set nowhere, and stands for nothing",
    ]


def test_where_a_variable_is_exported_a_test_on_it_is_decided(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("""
if command -v nvidia-smi >/dev/null 2>&1; then FOUND=$(nvidia-smi -L | wc -l); else FOUND=0; fi
NUM_GPUS=${NUM_GPUS:-${FOUND}}
if [ -z "$NUM_GPUS" ] || [ "$NUM_GPUS" -le 0 ]; then NUM_GPUS=1; fi
python3 train.py --actor-num-gpus-per-node $NUM_GPUS
""")
    assert [word.text for word in read_script(path, {"NUM_GPUS": "4"}).words if not word.unread][-1] == "4"
    assert read_script(path, {}).words[-1].unread == "NUM_GPUS is set in the `if` at run.sh:4"


def test_what_a_script_writes_is_told_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        f"cat > {tmp_path}/conf <<EOF\nx: 1\nEOF\nX=$(echo noise >&2; echo noise > {tmp_path}/n; echo 1)\npython3 train.py --n $X\n"
    )
    script = read_script(path, {})
    assert [word.text for word in script.words] == ["--n", "1"] and "not run: cat > " in script.notes[-1]
    assert [one.name for one in tmp_path.iterdir()] == ["run.sh"]
